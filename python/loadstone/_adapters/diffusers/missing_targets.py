"""Findings for model tensors that a file lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from loadstone import _core
from loadstone._adapters.diffusers.checkpoint import Shape, SymbolicCheckpoint, shapes_of
from loadstone._adapters.diffusers.conversion import Conversion
from loadstone._adapters.diffusers.expected_keys import expected_keys
from loadstone._base.dtypes import dtype_name
from loadstone._execute.report import human_bytes
from loadstone._plan.policies import policies_of
from loadstone._plan.recipes import LibraryRecipes
from loadstone.tracing._absent_symbol import AbsentSymbol, leaves


class MissingTargets:
    """The model tensors that a converted checkpoint lacks. Valid for one plan.

    Args:
        converted: the checkpoint's tensors by the model's names.
        missing: the caller's policy.
        missing_of: policies of single tensors.
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
        self.names = [
            name
            for name in self.state
            if name not in converted or isinstance(converted[name], AbsentSymbol)
        ]
        # For each target that the converter makes, its present keys and its missing keys.
        self._leaves = {name: leaves(converted[name]) for name in self.names if name in converted}
        self._policies = policies_of(self.names, missing, missing_of)

    def report(
        self,
        recipes: LibraryRecipes,
        checkpoint: SymbolicCheckpoint,
        keys: Mapping[str, str],
        conversion: Conversion | None,
    ) -> None:
        """Add findings and expected names to traced recipes.

        ``conversion`` is ``None`` if the file has the model's names.
        """
        for name, (present, missing) in self._leaves.items():
            missing = [checkpoint.file_key(key) for key in missing]
            recipes.expected[name] = missing[0]
            if present or len(missing) > 1:
                self._report_parts(recipes, name, present, missing)
        others = [name for name in self.names if name not in self._leaves]
        if others and conversion is not None:
            recipes.expected |= expected_keys(others, keys, conversion, checkpoint.missing_keys)
        used = {key for _, missing in self._leaves.values() for key in missing}
        for key in checkpoint.missing_keys:
            if key not in used:
                recipes.findings.append(_unused(checkpoint.file_key(key)))

    def pair(self, recipes: LibraryRecipes, unexpected: Mapping[str, Shape]) -> None:
        """Pair a missing and an unexpected tensor if no other tensors have their shape.

        ``unexpected`` maps the library's names to shapes.
        """
        shapes = shapes_of({name: self.state[name] for name in self.names})
        missing_counts, counts = Counter(shapes.values()), Counter(unexpected.values())
        sources = dict(recipes.unexpected)
        for name, shape in shapes.items():
            is_pair = missing_counts[shape] == counts[shape] == 1
            if not is_pair or name in recipes.already_reported:
                continue
            other = next(other for other in unexpected if unexpected[other] == shape)
            recipes.pairs[other] = name
            if self._policies[name] == "error":
                message = (
                    f"{self._description(name)} is not in the checkpoint; {sources[other]!r}, "
                    "which the model does not use, has the same shape"
                )
                hint = f"if they are the same tensor, rename {sources[other]!r} in the file"
                self._report(recipes, name, [sources[other]], message, hint)

    def _report_parts(
        self, recipes: LibraryRecipes, name: str, present: list[str], missing: list[str]
    ) -> None:
        made_of = ", ".join(map(repr, missing))
        if present:
            made_of = f"{', '.join(map(repr, present))}, which the checkpoint has, and {made_of}"
        message = f"'{name}' is made from {made_of}, which the checkpoint lacks"
        if self._policies[name] == "error":
            self._report(recipes, name, missing, message)
        else:
            message += ", so loadstone fills all of it"
            recipes.findings.append(_core.Finding("info", "plan.missing", name, missing, message))

    def _report(
        self, recipes: LibraryRecipes, name: str, keys: list[str], message: str, hint: str = ""
    ) -> None:
        """Add an error that replaces the plan's own error."""
        recipes.already_reported.append(name)
        recipes.findings.append(_core.Finding("error", "plan.missing", name, keys, message, hint))

    def _description(self, name: str) -> str:
        tensor = self.state[name]
        kind = "parameter" if name in self.parameters else "persistent buffer"
        dtype, size = dtype_name(tensor.dtype), human_bytes(tensor.nbytes)
        return f"'{name}' ({kind} {dtype} {list(tensor.shape)}, {size})"


def _unused(key: str) -> _core.Finding:
    message = (
        f"the library's converter needs {key!r}, which the checkpoint lacks; no tensor of the "
        "model is made from it"
    )
    return _core.Finding("info", "plan.missing", "", [key], message)
