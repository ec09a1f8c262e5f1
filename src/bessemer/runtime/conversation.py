"""A conversation over several turns that keeps its KV cache.

Each turn renders the whole conversation by the chat template, keeps of the session what the new
token ids begin with, and feeds the rest: mostly the last answer's end and the new question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bessemer.arguments import shown
from bessemer.errors import ContextLengthError, UsageError
from bessemer.runtime.generate import Generation, generate_stream
from bessemer.runtime.model import Model, Pieces, common_prefix, sampling_options


class Conversation:
    """messages: the turns so far, as chat templates take them.  session: holds their tokens."""

    def __init__(self, model: Model, system: str | None = None) -> None:
        if not isinstance(model, Model):
            raise UsageError(f"a conversation needs a model, not {shown(model)}")
        self.model = model
        self.session = model.session()
        self.messages: list[dict[str, Any]] = []
        self.system = system

    @property
    def system(self) -> str | None:
        """What the model is told before everything; changing it begins a new conversation."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        if text is not None and not isinstance(text, str):
            raise UsageError(f"the system text is {shown(text)}; it must be text, or None")
        self._system = text
        self.reset()

    def reset(self) -> None:
        """Forget all turns; the system text stays."""
        self.messages = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})
        self.session.rewind(0)

    def ask(
        self,
        text: str,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] | str = (),
        **sampling: Any,
    ) -> Answer:
        """The answer to `text`, in pieces. Both become part of the conversation when it is over,
        also when it is cancelled; after an error neither does. Options as for `Model.stream`.

        Raises ContextLengthError, with both numbers, when the conversation has become too long.
        """
        question = {"role": "user", "content": text}
        ids = self.model.encode_chat([*self.messages, question])
        if len(ids) > self.session.capacity:
            raise ContextLengthError(
                f"the conversation would have {len(ids)} tokens (it has {self.session.position}), "
                f"and the context holds {self.session.capacity}: reset it, or ask for less"
            )
        options = sampling_options(sampling)
        # At least one token must be fed to get logits.
        keep = min(common_prefix(self.session.tokens, ids), len(ids) - 1)
        self.session.rewind(keep)
        generation = generate_stream(
            self.session,
            self.model.tokenizer,
            ids[keep:],
            max_tokens=max_tokens,
            sampling=options,
            stops=stop,
            history=ids[:keep],
        )
        return Answer(self, question, generation, len(ids))


class Answer(Pieces):
    """An answer in pieces.

    prompt_tokens: of the whole conversation up to the answer, of which only the new ones are fed
    (`result.prompt_tokens`).
    """

    def __init__(
        self,
        conversation: Conversation,
        question: dict[str, Any],
        generation: Generation,
        prompt_tokens: int,
    ) -> None:
        def ended() -> None:
            # A question that was taken back before its first token was never asked.
            if self.result.tokens:
                answer = {"role": "assistant", "content": self.result.text}
                conversation.messages += [question, answer]

        super().__init__(generation, ended)
        self.prompt_tokens = prompt_tokens
