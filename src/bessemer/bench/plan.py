"""What is measured: prompts, and tokens generated, after some depth of context.

pp512: a prompt of 512 tokens.  tg64@d2000: 64 tokens one by one after 2000 others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bessemer.artifact.work import Step, Work
from bessemer.errors import UsageError

PREFILL, DECODE = "forward_prefill", "forward_decode"


@dataclass(frozen=True)
class Trial:
    """kind: "pp" or "tg".  tokens: fed while the clock runs.  depth: held before."""

    kind: str
    tokens: int
    depth: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}{self.tokens}" + (f"@d{self.depth}" if self.depth else "")

    @property
    def op(self) -> str:
        """The command of the measuring process."""
        return "prefill" if self.kind == "pp" else "decode"

    @property
    def entry(self) -> str:
        """The entry point of the compiled model."""
        return PREFILL if self.kind == "pp" else DECODE

    def steps(self, chunk: int) -> Iterator[Step]:
        """The forward calls. chunk: most rows of one."""
        size = chunk if self.kind == "pp" else 1
        for start in range(0, self.tokens, size):
            rows = min(size, self.tokens - start)
            last = self.kind == "tg" or start + rows == self.tokens
            yield Step(self.depth + start, rows, int(last))


@dataclass(frozen=True)
class Demand:
    """What a test asks of the machine, all steps together: see `artifact.work`."""

    flops: int
    weight_bytes: int
    cache_bytes: int

    @classmethod
    def of(cls, test: Trial, work: Work, chunk: int) -> Demand:
        steps, entry = list(test.steps(chunk)), test.entry
        return cls(
            sum(work.flops(entry, step) for step in steps),
            sum(work.weight_bytes(entry, step) for step in steps),
            sum(work.cache_bytes(entry, step) for step in steps),
        )


def plan(
    prompts: Sequence[int], generated: Sequence[int], depths: Sequence[int], context: int
) -> list[Trial]:
    """All combinations, in order and without repeats; a length of 0 leaves out its kind.

    Raises UsageError for a negative number, for nothing at all, and for what the context of the
    model can't hold.
    """
    if min([*prompts, *generated, *depths], default=0) < 0:
        raise UsageError("--prompt, --generate and --depth take numbers from 0")
    kinds = [("pp", n) for n in prompts if n] + [("tg", n) for n in generated if n]
    tests = [Trial(kind, count, depth) for depth in depths or (0,) for kind, count in kinds]
    if not tests:
        raise UsageError("nothing to measure: give --prompt or --generate a number above 0")
    for test in tests:
        if test.depth + test.tokens > context:
            raise UsageError(
                f"{test.name} needs a context of {test.depth + test.tokens} tokens, and the model "
                f"was compiled for {context}: compile it with a larger --context, or measure less"
            )
    return list(dict.fromkeys(tests))
