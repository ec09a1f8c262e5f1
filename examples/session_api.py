"""Sessions: token ids in, logits out, and moving back and forth in a conversation.

    python examples/session_api.py [MODEL]

Nothing here samples or decodes text by itself; it is what `generate` and `chat` are built on.
"""

from __future__ import annotations

import sys

import numpy as np

import bessemer
from bessemer.runtime.tokenizer import Tokenizer


def main(name: str = "smollm2") -> None:
    model = bessemer.compile(name)
    tokenizer = model.tokenizer
    ids = tokenizer.encode("The colour of the sky is")

    # Logits after the last token, float32 [vocab]; a copy that stays valid.
    session = model.session()
    logits = session.prefill(ids)
    print(f"{len(ids)} tokens fed, logits {logits.dtype}{list(logits.shape)}")
    for token in np.argsort(-logits)[:3]:
        print(f"  {logits[token]:8.3f}  {tokenizer.decode([int(token)])!r}")

    # Greedy decoding by hand. rewind(n) keeps the first n tokens.
    best = int(logits.argmax())
    after = session.decode(best)
    print(f"{session.position} of {session.capacity} tokens are held")
    session.rewind(len(ids))
    again = session.decode(best)
    print(f"rewound and decoded again, equal: {np.array_equal(after, again)}")

    # fork() copies the cache: two continuations of one prompt, which is fed only once.
    session.rewind(len(ids))
    other = session.fork()
    for branch, text in ((session, " blue"), (other, " not")):
        added = tokenizer.encode(text, add_special=False)
        print(f"  {text!r} goes on {_greedy(branch, added, 6, tokenizer)!r}")

    # Logits of every token of a prompt, [tokens, vocab]: for scoring text.
    session.rewind(0)
    rows = session.prefill(ids, all_logits=True)
    print(f"mean log-probability of the prompt: {_log_probability(rows[:-1], ids[1:]):.3f}")


def _greedy(session: bessemer.Session, ids: list[int], count: int, tokenizer: Tokenizer) -> str:
    """The continuation of `ids`, `count` tokens long."""
    logits = session.prefill(ids)
    chosen: list[int] = []
    for _ in range(count):
        chosen.append(int(logits.argmax()))
        logits = session.decode(chosen[-1])
    return tokenizer.decode(chosen)


def _log_probability(logits: np.ndarray, ids: list[int]) -> float:
    """Mean of log softmax(logits)[id] over the rows."""
    top = logits.max(-1, keepdims=True)
    norm = top[:, 0] + np.log(np.exp(logits - top).sum(-1))
    return float(np.mean(logits[np.arange(len(ids)), ids] - norm))


if __name__ == "__main__":
    main(*sys.argv[1:2])
