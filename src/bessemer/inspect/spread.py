"""From the captured layers of a model to all of it: tables whose entries belong to layers, spread
over the layers that are alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from bessemer.artifact.layout import StateLayout, StoredWeight
from bessemer.codegen.generate import EntryPlan
from bessemer.codegen.main_graph import PlannedCall

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """prefix: of the names of layers' tensors, up to the number.  like: for each layer of the model
    the captured one that it is like.
    """

    prefix: str
    like: tuple[int, ...]

    def layer_of(self, name: str) -> int | None:
        """The layer that a weight belongs to, by its name."""
        found = re.match(rf"{re.escape(self.prefix)}(\d+)\.", name)
        return int(found[1]) if found else None

    def renamed(self, name: str, layer: int) -> str:
        """The name of a layer's weight in another layer."""
        return re.sub(rf"^{re.escape(self.prefix)}\d+\.", f"{self.prefix}{layer}.", name)

    def over(self, items: Sequence[T], layers: Sequence[int | None]) -> list[tuple[T, int | None]]:
        """The items of the whole model in order, each with its layer. layers: of `items`, None for
        those of no layer: they stay where they are, once.
        """
        inside = [i for i, layer in enumerate(layers) if layer is not None]
        if not inside:
            return [(item, None) for item in items]
        first, last = inside[0], inside[-1]
        found: list[tuple[T, int | None]] = [(item, None) for item in items[:first]]
        blocks: dict[int, list[tuple[T, bool]]] = {}
        current = 0
        for item, layer in zip(items[first : last + 1], layers[first : last + 1], strict=True):
            current = current if layer is None else layer
            blocks.setdefault(current, []).append((item, layer is not None))
        for layer, source in enumerate(self.like):
            for item, own in blocks.get(source, []):
                if own:
                    found.append((item, layer))
                elif layer == source:
                    found.append((item, None))
        return found + [(item, None) for item in items[last + 1 :]]

    def weights(self, table: Sequence[StoredWeight]) -> list[StoredWeight]:
        """The weight table of the whole model, at its places."""
        layers = [self.layer_of(w.name) for w in table]
        found, at = [], 0
        for weight, layer in self.over(table, layers):
            name = weight.name if layer is None else self.renamed(weight.name, layer)
            placed = StoredWeight.place(name, weight.shape, weight.dtype, weight.layout, at)
            at = placed.offset + placed.nbytes
            found.append(placed)
        return found

    def state(self, state: StateLayout) -> StateLayout:
        """The state of the whole model."""
        changed: dict[str, Any] = {}
        for field in fields(state):
            value = getattr(state, field.name)
            if isinstance(value, tuple) and value and hasattr(value[0], "layer"):
                changed[field.name] = self._entries(value)
        names = [self.layer_of(n.name) for n in state.named]
        named = [
            n if layer is None else replace(n, name=self.renamed(n.name, layer))
            for n, layer in self.over(state.named, names)
        ]
        return replace(state, named=tuple(named), **changed)

    def _entries(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            replace(entry, layer=layer)
            for layer, source in enumerate(self.like)
            for entry in entries
            if entry.layer == source
        )

    def calls(self, entry: EntryPlan, state: StateLayout) -> list[PlannedCall]:
        """The calls of an entry point of the whole model. A call belongs to the layer of its
        weights or of its cache; one that has neither, to that of the call before.
        """
        known = [self._layer_of_call(call, state) for call in entry.calls]
        inside = [i for i, (layer, _) in enumerate(known) if layer is not None]
        last = inside[-1] if inside else -1
        layers: list[int | None] = []
        current: int | None = None
        for i, (layer, has_weights) in enumerate(known):
            if layer is not None:
                current = layer
            elsewhere = layer is None and (has_weights or i > last)
            layers.append(None if elsewhere else current)
        return [call for call, _ in self.over(entry.calls, layers)]

    def _layer_of_call(self, planned: PlannedCall, state: StateLayout) -> tuple[int | None, bool]:
        """The layer, if weights or cache tell, and whether there are weights."""
        call = planned.call
        names = [a.view.buffer.name for a in call.accesses if a.view.buffer.kind == "weight"]
        found = [layer for name in names if (layer := self.layer_of(name)) is not None]
        if found:
            return found[0], True
        literals = dict(zip(call.spec.literals, call.literals, strict=True))
        if "entry" in literals:
            return state.entries[literals["entry"]].layer, bool(names)
        return None, bool(names)
