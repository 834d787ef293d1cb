"""Make the state dict of symbols for ``load_state_dict``, with the names that rules give."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from loadstone import _core
from loadstone._base.dtypes import is_dtype, torch_dtype
from loadstone._files.catalog import Catalog
from loadstone._files.torch_metadata import read_metadata
from loadstone._model.targets import PlannedTarget, planned_targets
from loadstone._plan.model_symbol import WholeSymbol
from loadstone.tracing import Symbol, Trace

# Name, shape, dtype, sources, and whether the value is one unchanged source.
_Row = tuple[str, tuple[int, ...], str, list[str], bool]


class StateSymbols:
    """Symbols for a checkpoint's tensors; ``objects``: names of extra state without a tensor."""

    def __init__(
        self,
        trace: Trace,
        catalog: Catalog,
        rules: str,
        targets: Mapping[str, PlannedTarget],
    ) -> None:
        self.state: OrderedDict[str, Symbol] = OrderedDict()
        self._sources: dict[int, list[str]] = {}
        self._whole: dict[int, str] = {}
        for name, shape, dtype, sources, is_whole in _rows(catalog, rules):
            planned = targets.get(name)
            is_read = planned is not None and planned.origin == "checkpoint"
            if planned is not None and is_read and planned.shape != shape:
                shape, dtype, is_whole = planned.shape, planned.dtype, False
            if is_whole:
                symbol: Symbol = trace.source(sources[0])
                self._whole[symbol.value] = sources[0]
            else:
                form = trace.form(shape, torch_dtype(dtype) if is_dtype(dtype) else torch.uint8)
                symbol = WholeSymbol(trace, -1, form, (), name)
            self.state[name] = symbol
            self._sources[id(symbol)] = sources
        modules, objects = read_metadata(catalog)
        self.objects = frozenset(objects)
        self._metadata = modules and _renamed(modules, catalog, self.state)

    def copy(self) -> OrderedDict[str, Symbol]:
        """Return a state dict that ``load_state_dict`` may change."""
        state = OrderedDict(self.state)
        if self._metadata is not None:
            state._metadata = self._metadata  # type: ignore[attr-defined]
        return state

    def sources_of(self, symbol: torch.Tensor) -> list[str]:
        return self._sources[id(symbol)]

    def whole_source(self, symbol: Symbol) -> str | None:
        """Return the name of the checkpoint's tensor if the value is that tensor, unchanged."""
        return self._whole.get(symbol.value)


def _rows(catalog: Catalog, rules: str) -> Iterator[_Row]:
    if json.loads(rules):
        yield from _apply_rules(catalog, rules)
        return
    for name, info in catalog.tensors.items():
        yield name, tuple(info.shape), info.encoding, [name], is_dtype(info.encoding)


def _apply_rules(catalog: Catalog, rules: str) -> Iterator[_Row]:
    """Yield names and shapes from a conversion's plan, and sources from a load plan for these."""
    conversion = _core.make_conversion(
        catalog._core,
        rules=rules,
        block_dtype="F32",
        unexpected="ignore",
        threads=1,
        allow_non_finite=True,
    )
    tensors = json.loads(conversion.to_json())["tensors"]
    targets = [_core.Target(name, row["shape"], row["dtype"]) for name, row in tensors.items()]
    options = {"rules": rules, "missing": "zeros", "unexpected": "ignore"}
    plan = _core.make_plan(catalog._core, targets=targets, values_known=False, **options)
    document = json.loads(plan.to_json())
    for planned, target in zip(planned_targets(plan), document["targets"], strict=True):
        if planned.origin == "checkpoint":
            is_whole = _is_whole(target, document["sources"], planned)
            yield planned.name, planned.shape, planned.dtype, list(planned.sources), is_whole


def _is_whole(target: Any, sources: Any, planned: PlannedTarget) -> bool:
    boxes = target["recipe"]["boxes"]
    if len(boxes) != 1 or "decoding" in boxes[0]:
        return False
    source = sources[boxes[0]["source"]]
    in_order = all(dim[1] == dim[2] for dim in boxes[0]["dims"])
    is_plain = source["encoding"] == planned.dtype
    return in_order and is_plain and tuple(source["shape"]) == planned.shape


def _renamed(
    modules: dict[str, Any], catalog: Catalog, state: Mapping[str, Symbol]
) -> dict[str, Any]:
    """Remove a prefix from the module paths if a rule removed it from all names of tensors."""
    first, name = next(iter(catalog.tensors), ""), next(iter(state), "")
    prefix = first.removesuffix(name) if first.endswith(name) else ""
    return {path.removeprefix(prefix): entry for path, entry in modules.items()}
