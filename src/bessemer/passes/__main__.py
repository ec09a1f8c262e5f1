"""`python -m bessemer.passes NAME FILE`: run one pass on a graph's text and print the result."""

from __future__ import annotations

import sys
from pathlib import Path

from bessemer.graph import parse_graph, print_graph, verify
from bessemer.passes.pipeline import every_pass, pass_by_name


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        names = ", ".join(p.name for p in every_pass())
        print(f"usage: python -m bessemer.passes NAME FILE\npasses: {names}", file=sys.stderr)
        return 2
    name, path = arguments
    graph = parse_graph(Path(path).read_text(encoding="utf-8"))
    after = pass_by_name(name).apply(graph)
    verify(after)
    sys.stdout.write(print_graph(after))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
