"""Findings for model tensors that a file lacks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from loadstone import _core
from loadstone._adapters.diffusers.checkpoint import SymbolicCheckpoint
from loadstone._adapters.diffusers.expected_keys import expected_keys, prefix
from loadstone._adapters.diffusers.missing_keys import Conversion, Shape
from loadstone._adapters.diffusers.supplements import supplements
from loadstone._base.dtypes import dtype_name
from loadstone._execute.report import human_bytes
from loadstone._plan.policies import policies_of
from loadstone._plan.recipes import AdapterRecipes
from loadstone.tracing._absent_symbol import AbsentSymbol, leaves


class MissingTensors:
    """The model tensors that a converted checkpoint lacks. Valid for one plan.

    Args:
        converted: the checkpoint's tensors by the model's names.
        missing, missing_of: the caller's policy, and policies of single tensors.
    """

    def __init__(
        self,
        model: Any,
        converted: Mapping[str, Any],
        missing: str | Mapping[str, str],
        missing_of: Mapping[str, str],
    ) -> None:
        self.state = model.state_dict()
        self.parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.absent = {
            name: value for name, value in converted.items() if isinstance(value, AbsentSymbol)
        }
        self.names = [name for name in self.state if name not in converted or name in self.absent]
        self._policies = policies_of(self.names, missing, missing_of)

    def report(
        self,
        recipes: AdapterRecipes,
        checkpoint: SymbolicCheckpoint,
        keys: Mapping[str, str],
        conversion: Conversion | None,
    ) -> None:
        """Add findings and expected names to a trace.

        ``conversion`` is ``None`` if the file has the model's names.
        """
        for name in self.absent.keys() & set(self.names):
            self._report_absent(recipes, checkpoint, name)
        others = [name for name in self.names if name not in self.absent]
        if others and conversion is not None:
            for key, target in supplements().items():
                if target in others:
                    recipes.expected[target] = prefix(keys) + key
            recipes.expected |= expected_keys(others, keys, conversion, checkpoint.missing_keys)
        used = {key for name in self.absent if name in self.state for key in self._lacks(name)}
        for key in (*checkpoint.missing_keys.requested, *checkpoint.missing_keys.assumed):
            if key not in used:
                recipes.findings.append(_unused(checkpoint.file_key(key)))

    def pair(self, recipes: AdapterRecipes, shapes: Mapping[str, Shape]) -> None:
        """Pair a missing and an unexpected tensor if no other tensors have their shape."""
        wanted = {name: tuple(self.state[name].shape) for name in self.names}
        missing, unexpected = Counter(wanted.values()), Counter(shapes.values())
        sources = dict(recipes.unexpected)
        for name, shape in wanted.items():
            if missing[shape] != 1 or unexpected[shape] != 1 or name in recipes.already_reported:
                continue
            other = next(each for each in shapes if shapes[each] == shape)
            source = sources[other]
            recipes.pairs[other] = name
            if self._policies[name] != "error":
                continue
            message = (
                f"{self._words(name)} is not in the checkpoint; {source!r}, which nothing in the "
                "model is made of, has the same shape"
            )
            recipes.already_reported.append(name)
            hint = f"if they are one, rename {source!r} in the file"
            finding = _core.Finding("error", "plan.missing", name, [source], message, hint)
            recipes.findings.append(finding)

    def _report_absent(
        self, recipes: AdapterRecipes, checkpoint: SymbolicCheckpoint, name: str
    ) -> None:
        present, lacks = leaves(self.absent[name])
        names = [checkpoint.file_key(key) for key in lacks]
        recipes.expected[name] = names[0]
        if not present and len(names) == 1:
            return
        listed = ", ".join(map(repr, names))
        there = ", ".join(map(repr, present))
        made = f"'{name}' is made of {there + ', which is there, and of ' if present else ''}"
        message = f"{made}{listed}, which the checkpoint lacks"
        if self._policies[name] == "error":
            recipes.already_reported.append(name)
            recipes.findings.append(_core.Finding("error", "plan.missing", name, names, message))
        else:
            message += ": all of it is filled"
            recipes.findings.append(_core.Finding("info", "plan.missing", name, names, message))

    def _lacks(self, name: str) -> list[str]:
        return leaves(self.absent[name])[1]

    def _words(self, name: str) -> str:
        tensor: torch.Tensor = self.state[name]
        kind = "parameter" if name in self.parameters else "persistent buffer"
        size = tensor.element_size() * math.prod(tensor.shape)
        dtype = dtype_name(tensor.dtype)
        return f"'{name}' ({kind} {dtype} {list(tensor.shape)}, {human_bytes(size)})"


def _unused(key: str) -> _core.Finding:
    message = (
        f"the library's converter asks for {key!r}, which the checkpoint lacks; nothing in the "
        "model is made of it"
    )
    return _core.Finding("info", "plan.missing", "", [key], message)
