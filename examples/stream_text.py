"""Text from a model, piece by piece as it comes.

    python examples/stream_text.py [MODEL] [PROMPT]

MODEL is anything that `bessemer run` takes; what is not compiled yet is compiled into the cache
first.
"""

from __future__ import annotations

import sys

import bessemer


def main(name: str = "smollm2", prompt: str = "The capital of France is") -> None:
    model = bessemer.compile(name)

    # A continuation of the text as it stands. Sampling is off unless asked for.
    stream = model.stream(prompt, max_tokens=24, stop=["\n\n"])
    print(prompt, end="")
    for piece in stream:
        print(piece, end="", flush=True)
    result = stream.result
    print(f"\n-- {len(result.tokens)} tokens, {result.finish_reason}")

    # The same sampled: equal seeds give equal texts.
    options = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 7}
    first, second = (model.generate(prompt, **options) for _ in range(2))
    print(f"-- sampled twice with one seed, equal: {first == second}")
    print(prompt + first)

    # A conversation keeps its KV cache: a turn costs what is new in it.
    conversation = bessemer.Conversation(model, "You answer in one short sentence.")
    for question in ("What is the capital of Italy?", "And of Spain?"):
        answer = conversation.ask(question, max_tokens=32)
        print(f"-- {question}")
        for piece in answer:
            print(piece, end="", flush=True)
        fed = answer.result.prompt_tokens
        print(f"\n-- {fed} of {answer.prompt_tokens} prompt tokens were new")


if __name__ == "__main__":
    main(*sys.argv[1:3])
