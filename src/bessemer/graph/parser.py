"""Text to graph: the inverse of `printer`. Types are inferred again and compared with the text."""

from __future__ import annotations

import json
import re

import numpy as np

from bessemer.graph.core import Attr, Graph, Value
from bessemer.graph.dims import parse_size
from bessemer.graph.dtypes import DType
from bessemer.graph.schema import GraphError, build_from

_TOKEN = re.compile(
    r"\s*(?:(?P<comment>//[^\n]*)|(?P<string>\"(?:[^\"\\]|\\.)*\")|(?P<value>%\w+)|(?P<graph>@\S+)"
    r"|(?P<number>[-+]?(?:\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+|inf\b|nan\b|\d+))"
    r"|(?P<word>[A-Za-z_]\w*)|(?P<mark>[{}()\[\]<>=:,*+]))"
)
_DTYPES = {d.value for d in DType}


class _Tokens:
    def __init__(self, text: str) -> None:
        self.items: list[tuple[str, str, int]] = []
        at, line, counted = 0, 1, 0
        end = len(text.rstrip())
        while at < end:
            found = _TOKEN.match(text, at)
            if not found:
                rest = text[at:].lstrip()
                line += text.count("\n", counted, len(text) - len(rest))
                raise GraphError(f"line {line}: can't read {rest[:20].rstrip()!r}")
            at = found.end()
            kind = str(found.lastgroup)
            start = found.start(kind)
            line += text.count("\n", counted, start)
            counted = start
            if kind != "comment":
                self.items.append((kind, found[kind], line))
        self.items.append(("end", "", text.count("\n") + 1))
        self.at = 0

    def peek(self) -> str:
        return self.items[self.at][1]

    def next(self, expected: str | None = None) -> str:
        kind, text, line = self.items[self.at]
        if expected is not None and expected not in (text, kind):
            raise GraphError(f"line {line}: expected {expected!r}, found {text or 'the end'!r}")
        if kind == "end":
            raise GraphError(f"line {line}: the text breaks off")
        self.at += 1
        return text

    def accept(self, text: str) -> bool:
        if self.peek() == text and self.items[self.at][0] != "string":
            self.at += 1
            return True
        return False


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


def _array(t: _Tokens, dtype: DType) -> np.ndarray:
    t.next("[")
    shape = []
    while not t.accept("]"):
        shape.append(int(t.next("number")))
        t.accept(",")
    t.next("<")
    items: list[int | float | bool] = []
    while not t.accept(">"):
        text = t.next()
        items.append(text == "true" if text in ("true", "false") else _number(text))
        t.accept(",")
    return np.array(items, dtype=dtype.numpy).reshape(shape)


def _size_text(t: _Tokens) -> str:
    parts = []
    while t.peek() not in (",", "]", "}"):
        parts.append(t.next())
    return "".join(parts)


def _attr(t: _Tokens) -> Attr:
    kind, text, _ = t.items[t.at]
    if kind == "string":
        return str(json.loads(t.next()))
    if text in ("true", "false"):
        return t.next() == "true"
    if text in _DTYPES:
        dtype = DType(t.next())
        return _array(t, dtype) if t.peek() == "[" else dtype
    if text in ("inf", "nan"):
        return float(t.next())
    if t.accept("["):
        items = []
        while not t.accept("]"):
            items.append(_attr(t))
            t.accept(",")
        return tuple(items)
    if kind == "number" and t.items[t.at + 1][1] not in ("*", "+"):
        return _number(t.next())
    return parse_size(_size_text(t))


def _attrs(t: _Tokens) -> dict[str, Attr]:
    attrs: dict[str, Attr] = {}
    if t.accept("{"):
        while not t.accept("}"):
            name = t.next("word")
            t.next("=")
            attrs[name] = _attr(t)
            t.accept(",")
    return attrs


def _type_text(t: _Tokens) -> str:
    text = t.next("word") + t.next("[")
    while t.peek() != "]":
        text += t.next()
    return text + t.next("]")


def _node(t: _Tokens, values: dict[str, Value]) -> None:
    results = [t.next("value")]
    line = t.items[t.at - 1][2]
    while t.accept(","):
        results.append(t.next("value"))
    t.next("=")
    op = t.next("word")
    operands = []
    if t.accept("("):
        while not t.accept(")"):
            name = t.next("value")
            if name not in values:
                raise GraphError(f"line {line}: {name} is used before it is defined")
            operands.append(values[name])
            t.accept(",")
    attrs = _attrs(t)
    t.next(":")
    types = [_type_text(t)]
    while t.accept(","):
        types.append(_type_text(t))
    node = build_from(op, operands, attrs)
    inferred = [str(x).replace(" ", "") for x in node.types]
    if inferred != types:
        raise GraphError(f"line {line}: {op} gives {inferred}, the text says {types}")
    if len(results) != len(node.types):
        raise GraphError(f"line {line}: {op} has {len(node.types)} results, not {len(results)}")
    for name, value in zip(results, node.outputs, strict=True):
        if name in values:
            raise GraphError(f"line {line}: {name} is defined twice")
        values[name] = value


def parse_graph(text: str) -> Graph:
    """The graph that the text describes. Raises GraphError with a line number."""
    t = _Tokens(text)
    t.next("graph")
    name = t.next()[1:]
    t.next("{")
    values: dict[str, Value] = {}
    tables: dict[str, dict[str, Value]] = {"output": {}, "update": {}, "weight": {}}
    while not t.accept("}"):
        if t.peek().startswith("%"):
            _node(t, values)
            continue
        kind = t.next("word")
        if kind not in tables:
            raise GraphError(f"line {t.items[t.at - 1][2]}: expected an op, found {kind!r}")
        is_string = t.items[t.at][0] == "string"
        key = t.next()
        t.next("=")
        source = t.next("value")
        if source not in values:
            raise GraphError(f"line {t.items[t.at - 1][2]}: {source} is not defined")
        tables[kind][json.loads(key) if is_string else key] = values[source]
    return Graph(name, tables["output"], tables["update"], tables["weight"])
