"""Recipes that an adapter derives from its library's own conversion code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadstone import _core


@dataclass
class AdapterRecipes:
    """Recipes for a plan, and the facts about the model that come with them.

    Attributes:
        recipes: of all targets that the checkpoint gives; ``None``: names match unchanged.
        dtypes: final dtype of each such target, by its safetensors name.
        ties: target, and the target that it is tied to; for models whose ties are not made yet.
        unexpected: the library's name and the checkpoint's name of each unused tensor.
        already_reported: missing targets that a finding names already.
        expected: missing target, and the name that it should have in the checkpoint.
        pairs: the library's name of an unused tensor, and the missing target that it may be.
        findings: problems found before anything is read.
        untied: names that the model ties, with their roots, where the checkpoint has a value for
            both: both are loaded, and tied again if they are equal.
        extensions: each a ``TargetExtension``, a class that cannot be imported without torch.
    """

    recipes: Any  # _core.Recipes, once they are there
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
        """Sets the ties and the final dtypes of targets.

        Names that the model ties and names that its library will tie are one group with one root,
        whatever their order.
        """
        if keeps_ties:
            self._keep_ties()
        parents: dict[str, str] = {}

        def top(name: str) -> str:
            while (parent := parents.get(name, name)) != name:
                name = parent
            return name

        ties = {each.name: each.tie_of or "" for each in targets if each.tie_of}
        if not (ties or self.ties or self.untied or self.dtypes):
            return
        for pair in (*ties.items(), *self.ties.items()):
            if pair[0] not in self.untied:
                parents[top(pair[0])] = top(pair[1])
        dtypes: dict[str, str] = {}
        for name, dtype in self.dtypes.items():
            dtypes.setdefault(top(name), dtype)
        # The model's own root; of names that are not tied yet, one that is loaded.
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
        """Makes names that the checkpoint holds values of their own for one tensor again."""
        untied, self.untied = self.untied, {}
        self.findings = [
            each for each in self.findings if each.code != "plan.tie" or each.target not in untied
        ]

    def unexpected_findings(self, policy: str) -> list[_core.Finding]:
        """One finding for each unused tensor of the checkpoint."""
        if policy == "ignore":
            return []
        severity = "error" if policy == "error" else "warning"
        return [
            _core.Finding(
                severity,
                "plan.unexpected",
                name,
                [source],
                f"nothing in the model is made of {source!r}"
                + (f" ({name!r} in the model's names)" if name != source else ""),
                f"the model misses {self.pairs[name]!r}, of the same shape"
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
    """The finding for a tensor that has another shape in the checkpoint than in the model."""
    message = f"'{name}' is {list(found)} in the checkpoint, the model wants {list(expected)}"
    advice = _core.shape_advice(list(found)) or suggestion
    return _core.Finding(severity, "plan.shape", name, list(sources), message, advice)
