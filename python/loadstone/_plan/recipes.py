"""Recipes that an adapter derives from its library's own conversion code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadstone import _core


@dataclass
class LibraryRecipes:
    """Recipes for a plan, and facts about the model.

    Attributes:
        recipes: of all targets with sources in the checkpoint; ``None``: names match unchanged.
        dtypes: final dtype of each such target, by its safetensors name.
        ties: target, and the target that it is tied to, if the model has not made the tie yet.
        unexpected: the library's name and the checkpoint's name of each unused tensor.
        already_reported: missing targets that a finding already names.
        expected: missing target, and its expected name in the checkpoint.
        pairs: the library's name of an unused tensor, and the missing target that it may be.
        untied: tied names with their roots, if the checkpoint has both values: both are loaded, and
            tied again if they are equal.
        extensions: each a ``TargetExtension``, a class that cannot be imported without torch.
    """

    recipes: Any  # _core.Recipes | None
    dtypes: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    unexpected: list[tuple[str, str]] = field(default_factory=list)
    already_reported: list[str] = field(default_factory=list)
    expected: dict[str, str] = field(default_factory=dict)
    pairs: dict[str, str] = field(default_factory=dict)
    findings: list[_core.Finding] = field(default_factory=list)
    untied: dict[str, str] = field(default_factory=dict)
    extensions: list[Any] = field(default_factory=list)

    def adjust(self, targets: Sequence[_core.Target], keeps_ties: bool = False) -> None:
        """Set ties and final dtypes; a group of tied names (the library's too) has one root."""
        if keeps_ties:
            self._keep_ties()
        parents: dict[str, str] = {}

        def top(name: str) -> str:
            while (parent := parents.get(name, name)) != name:
                name = parent
            return name

        ties = {target.name: target.tie_of for target in targets if target.tie_of}
        if not (ties or self.ties or self.untied or self.dtypes):
            return
        for pair in (*ties.items(), *self.ties.items()):
            if pair[0] not in self.untied:
                parents[top(pair[0])] = top(pair[1])
        dtypes: dict[str, str] = {}
        for name, dtype in self.dtypes.items():
            dtypes.setdefault(top(name), dtype)
        # The model's own root or, among names that are not tied yet, one that is loaded.
        heads = [target.name for target in targets if target.name not in ties]
        heads.sort(key=lambda name: name not in self.dtypes)
        roots: dict[str, str] = {}
        for name in [*heads, *self.untied]:
            roots.setdefault(top(name), name)
        for target in targets:
            root = roots.get(top(target.name), target.name)
            target.tie_of = "" if root == target.name else root
            if final := self.dtypes.get(root) or dtypes.get(top(root)):
                target.dtype = final

    def _keep_ties(self) -> None:
        """Tie names again, although the checkpoint has a value for each."""
        untied, self.untied = self.untied, {}
        self.findings = [
            finding
            for finding in self.findings
            if finding.code != "plan.tie" or finding.target not in untied
        ]

    def unexpected_findings(self, policy: str) -> list[_core.Finding]:
        if policy == "ignore":
            return []
        severity = "error" if policy == "error" else "warning"
        return [
            _core.Finding(
                severity,
                "plan.unexpected",
                name,
                [source],
                f"no tensor of the model is made from {source!r}"
                + (f" ({name!r} in the model's names)" if name != source else ""),
                f"the checkpoint lacks {self.pairs[name]!r}, of the same shape"
                if name in self.pairs
                else "",
            )
            for name, source in self.unexpected
        ]


def shape_mismatch(
    name: str,
    found: Sequence[int],
    expected: Sequence[int],
    sources: Sequence[str] = (),
    severity: str = "error",
    suggestion: str = "",
) -> _core.Finding:
    message = f"'{name}' is {list(found)} in the checkpoint, but {list(expected)} in the model"
    advice = _core.shape_advice(list(found)) or suggestion
    return _core.Finding(severity, "plan.shape", name, list(sources), message, advice)
