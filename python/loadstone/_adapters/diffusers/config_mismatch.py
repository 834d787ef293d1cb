"""Detect a config that describes a different model than the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadstone import _core
from loadstone._adapters.diffusers import local_configs
from loadstone._adapters.diffusers.checkpoint import SymbolicCheckpoint, shapes_of
from loadstone._adapters.diffusers.config_search import (
    Candidate,
    Counts,
    Shapes,
    compare,
    search_changes,
    try_config,
)
from loadstone._adapters.diffusers.local_configs import ConfigSources

# If fewer tensors disagree, report each tensor and do not blame the config.
DISAGREEMENTS_MIN = 4

# Limit on the configs to try, because each trial builds a model on meta.
TRIALS_MAX = 16

# Limit on the repositories that a message names.
NAMES_MAX = 8


@dataclass
class Mismatch:
    """A config that does not fit the file, and candidates that may.

    Attributes:
        counts: numbers of tensors that disagree.
        edited: the config with changed fields; ``None`` if no change fits better.
        local: local configs that reduce the disagreements, best first.
        uncached: repositories of the model family whose configs were not tried.
    """

    counts: Counts
    edited: Candidate | None
    local: list[Candidate]
    uncached: list[str]

    @property
    def fitting(self) -> Candidate | None:
        candidates = (*self.local, *([] if self.edited is None else [self.edited]))
        return next((candidate for candidate in candidates if candidate.is_fitting), None)

    def finding(self) -> _core.Finding:
        """Return an error if a fitting config is known, else an info that adds to the errors."""
        fits = [candidate.description for candidate in self.local if candidate.is_fitting]
        lines = [
            f"{self.counts.total} tensors of file and model disagree ({self.counts}): the config "
            "is another model's"
        ]
        if self.edited is not None:
            count = self.edited.counts.total
            lines.append(
                f"with {self.edited.description} {f'{count} disagree' if count else 'all fit'}"
            )
        if fits:
            lines.append(f"{' and '.join(fits)} {'fits' if len(fits) == 1 else 'fit'}")
        elif self.local:
            best = self.local[0]
            lines.append(f"with {best.description} {best.counts.total} disagree ({best.counts})")
        if self.uncached and not fits:
            names = ", ".join(map(repr, self.uncached[:NAMES_MAX]))
            lines.append(
                f"these configs, which diffusers knows by name, are not in the cache and were not "
                f"tried: {names}"
            )
        advice = [f"pass {fits[0]}"] if fits else []
        if self.edited is not None and self.edited.is_fitting:
            advice.append("correct these fields of the config")
        advice += ["pass infer_config=True"] if advice else []
        severity, hint = "error" if advice else "info", ", or ".join(advice)
        return _core.Finding(severity, "plan.config_mismatch", "", [], "; ".join(lines), hint)


def find_mismatch(
    model: Any, file_shapes: Shapes, checkpoint: SymbolicCheckpoint, sources: ConfigSources
) -> Mismatch | None:
    """Search for a fitting config if many tensors disagree; ``file_shapes`` has model names."""
    cls, config = type(model), getattr(model, "config", None)
    counts = compare(shapes_of(model.state_dict()), file_shapes)
    is_suspect = counts.missing + counts.mismatched >= DISAGREEMENTS_MIN
    if not is_suspect or not isinstance(config, Mapping):
        return None
    edited = search_changes(cls, config, file_shapes)
    configs = local_configs.find(cls, checkpoint.catalog.shards, sources)[:TRIALS_MAX]
    trials = [try_config(cls, local.config, str(local), file_shapes) for local in configs]
    better = [trial for trial in trials if trial and trial.counts.total < counts.total]
    if edited is None and not better:
        return None
    better.sort(key=lambda candidate: candidate.counts.total)
    uncached = local_configs.uncached(checkpoint.fresh(), sources.cache)
    return Mismatch(counts, edited, better, uncached)
