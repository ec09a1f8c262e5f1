"""Reshapes: how one shape's dimensions make up another's, in memory and in index expressions."""

from __future__ import annotations

from collections.abc import Sequence

from bessemer.graph.dims import Size, evaluate_size, product

# Symbolic sizes are compared by their values at a number that no other size has as a factor.
_SAMPLE = 1_000_003


class _Constant(dict[str, int]):
    """Every symbol has the same value."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self._value = value

    def __missing__(self, name: str) -> int:
        return self._value


def sample(size: Size, at: int = _SAMPLE) -> int:
    """A size as a number, for comparisons: each symbol counts as `at`."""
    return evaluate_size(size, _Constant(at))


Groups = list[tuple[list[int], list[int]]]


def reassociation(source: Sequence[Size], target: Sequence[Size]) -> Groups:
    """Pairs of dimension lists, source and target, with equal products, as fine as possible.

    Dimensions of size 1 that are left over belong to the last pair. Both shapes have as many
    elements, and neither is of rank 0.
    """
    groups: Groups = []
    i = j = 0
    while i < len(source) and j < len(target):
        left, right = [i], [j]
        i, j = i + 1, j + 1
        while True:
            a = sample(product(tuple(source[k] for k in left)))
            b = sample(product(tuple(target[k] for k in right)))
            if a < b and i < len(source):
                left.append(i)
                i += 1
            elif a > b and j < len(target):
                right.append(j)
                j += 1
            else:
                break
        groups.append((left, right))
    groups[-1][0].extend(range(i, len(source)))
    groups[-1][1].extend(range(j, len(target)))
    return groups


def reshape_index(
    source: Sequence[Size], target: Sequence[Size], at: Sequence[str]
) -> list[str] | None:
    """Index expressions into `source` for the element `at` of `target`, or None when that needs
    a division (a dimension of the source is then spread over several of the target's groups).
    """
    if not source:
        return []
    result = ["0"] * len(source)
    if not target:
        return result
    for left, right in reassociation(source, target):
        left = [k for k in left if source[k] != 1]
        right = [k for k in right if target[k] != 1]
        if [source[k] for k in left] == [target[k] for k in right]:
            for a, b in zip(left, right, strict=True):
                result[a] = at[b]
        elif len(left) == 1:
            terms: list[str] = []
            stride = 1
            for k in reversed(right):
                terms.insert(0, scaled(at[k], stride))
                size = target[k]
                if k != right[0]:
                    if not isinstance(size, int):
                        return None
                    stride *= size
            result[left[0]] = added(*terms)
        else:
            return None
    return result


def scaled(expression: str, by: int) -> str:
    """expression * by, in the syntax of affine maps."""
    if by == 1 or expression == "0":
        return expression
    return f"{_grouped(expression)} * {by}"


def added(*terms: str) -> str:
    """The sum of affine expressions."""
    kept = [t for t in terms if t != "0"]
    return " + ".join(kept) if kept else "0"


def _grouped(expression: str) -> str:
    return f"({expression})" if " " in expression else expression


def divided(expression: str, by: int) -> tuple[str, str]:
    """Quotient and remainder of an index expression by a constant."""
    grouped = _grouped(expression)
    return f"{grouped} floordiv {by}", f"{grouped} mod {by}"
