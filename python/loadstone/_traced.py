"""What an adapter worked out from its library's own conversion code, for a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loadstone import _core

if TYPE_CHECKING:
    from loadstone._bitsandbytes.loading import QuantizedWeights


@dataclass
class Traced:
    """Recipes, and what the library knows of the model beside them.

    Attributes:
        recipes: of the targets that the checkpoint gives; then the library has an answer for all
            its tensors. ``None``: names match as they are.
        dtypes: final dtype of each of these, by its safetensors name.
        ties: target, and the target whose tensor it is; for models whose ties are not made yet.
        unexpected: the library's name and the checkpoint's own of tensors that nobody needs.
        reported_missing: missing targets that one of the findings tells of.
        expected: missing target, and the name that it should have in the checkpoint.
        pairs: the library's name of a tensor that nobody needs, and the missing target that it may
            be.
        findings: what there is to say before anything is read.
        units: weights that bitsandbytes quantized, or that are to be.
    """

    recipes: Any  # _core.Recipes, once they are there
    dtypes: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    unexpected: list[tuple[str, str]] = field(default_factory=list)
    reported_missing: list[str] = field(default_factory=list)
    expected: dict[str, str] = field(default_factory=dict)
    pairs: dict[str, str] = field(default_factory=dict)
    findings: list[_core.Finding] = field(default_factory=list)
    units: QuantizedWeights | None = None

    def adjust(self, target: _core.Target) -> None:
        """Puts in what is known of one of the model's tensors."""
        target.tie_of = root = target.tie_of or self.ties.get(target.name, "")
        if dtype := self.dtypes.get(root or target.name):
            target.dtype = dtype

    def broken(self) -> list[str]:
        """Weights of which a finding tells why they cannot be loaded."""
        return list(self.units.broken) if self.units is not None else []

    def unexpected_findings(self, policy: str) -> list[_core.Finding]:
        """One finding for each tensor that nobody needs."""
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
