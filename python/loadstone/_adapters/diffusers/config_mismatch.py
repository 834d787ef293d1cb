"""Detect a config that describes a different model than the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loadstone import _core
from loadstone._adapters.diffusers import local_configs
from loadstone._adapters.diffusers.checkpoint import SymbolicCheckpoint
from loadstone._adapters.diffusers.diagnosis import (
    Counts,
    Diagnosis,
    Shapes,
    compare,
    diagnose,
    trial,
)

# Below this count, report each tensor and do not blame the config.
DISAGREEMENTS_MIN = 4

# Each trial builds a model on meta.
TRIALS_MAX = 16

# Limit on the repositories that a message names.
NAMES_MAX = 8


@dataclass(frozen=True)
class ConfigSources:
    """Sources of alternative configs.

    Attributes:
        given: the ``config`` argument of the caller.
        cache: the Hugging Face cache folder, unless it is the default one.
    """

    given: str | None = None
    cache: str | None = None


@dataclass
class Mismatch:
    """A config that does not fit the file, and candidates that may.

    Attributes:
        before: the disagreements.
        edited: field changes that fit better; ``None`` if the search found no such change.
        known: local configs that reduce the disagreements, best first.
        untried: repositories of the model family whose configs are not cached.
    """

    before: Counts
    edited: Diagnosis | None
    known: list[tuple[local_configs.LocalConfig, Counts]] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)

    def fitting(self, old: Mapping[str, Any]) -> dict[str, Any] | None:
        if self.known and self.known[0][1].total == 0:
            return dict(self.known[0][0].config)
        if self.edited is not None and self.edited.is_complete:
            return self.edited.config(old)
        return None

    def finding(self) -> _core.Finding:
        """Return an error if a fitting config is known, else an info next to the single errors."""
        fits = [known for known, counts in self.known if counts.total == 0]
        is_edited = self.edited is not None and self.edited.is_complete
        lines = [
            f"{self.before.total} tensors of file and model disagree ({self.before}): the config "
            "is another model's"
        ]
        if self.edited is not None:
            rest = "all fit" if is_edited else f"{self.edited.after.total} disagree"
            lines.append(f"with {self.edited} {rest}")
        if fits:
            lines.append(f"{' and '.join(map(str, fits))} {'fits' if len(fits) == 1 else 'fit'}")
        elif self.known:
            known, counts = self.known[0]
            lines.append(f"with {known} {counts.total} disagree ({counts})")
        if self.untried and not fits:
            names = ", ".join(map(repr, self.untried[:NAMES_MAX]))
            lines.append(
                f"these configs, which diffusers knows by name, are not in the cache and were not "
                f"tried: {names}"
            )
        advice = [f"pass {fits[0]}"] if fits else []
        advice += ["correct these fields of the config"] if is_edited else []
        advice += ["pass infer_config=True"] if advice else []
        severity, hint = "error" if advice else "info", ", or ".join(advice)
        return _core.Finding(severity, "plan.config_mismatch", "", [], "; ".join(lines), hint)


def examine(
    cls: Any,
    config: Mapping[str, Any],
    state: Shapes,
    found: Shapes,
    checkpoint: SymbolicCheckpoint,
    sources: ConfigSources,
) -> Mismatch | None:
    """Search for a fitting config if many tensors disagree; both shapes use the model's names."""
    before = compare(state, found)
    if before.missing + before.clashes < DISAGREEMENTS_MIN:
        return None
    edited = diagnose(cls, config, found)
    files = checkpoint.catalog.shards
    tried = [
        (each, trial(cls, each.config, found))
        for each in local_configs.find(cls, files, sources.given, sources.cache)[:TRIALS_MAX]
    ]
    known = [(each, counts) for each, counts in tried if counts and counts.total < before.total]
    if edited is None and not known:
        return None
    known.sort(key=lambda pair: pair[1].total)
    return Mismatch(
        before, edited, known, local_configs.uncached(checkpoint.decoded(), sources.cache)
    )
