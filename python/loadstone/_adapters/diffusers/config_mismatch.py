"""Detect a config that describes a different model than the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadstone import _core
from loadstone._adapters.diffusers import local_configs
from loadstone._adapters.diffusers.checkpoint import SymbolicCheckpoint, shapes_of
from loadstone._adapters.diffusers.config_search import (
    BlockCounts,
    Candidate,
    Counts,
    Shapes,
    compare,
    different_block_counts,
    search_changes,
    try_config,
)
from loadstone._adapters.diffusers.local_configs import ConfigSources

# If fewer tensors disagree, report each tensor and do not blame the config.
DISAGREEMENTS_MIN = 4

# Limit on the configs to try, because each trial builds a model on meta.
TRIALS_MAX = 16

# Limits on the repositories and on the series of blocks that a message names.
NAMES_MAX = 8
BLOCKS_MAX = 4


@dataclass
class Mismatch:
    """A config that does not fit the file, and candidates that may.

    Attributes:
        counts: numbers of tensors that disagree.
        edited: the config with changed fields; ``None`` if no change fits better.
        local: local configs that reduce the disagreements, best first.
        uncached: repositories of the model family whose configs were not tried.
        blocks: series of blocks that are longer in the file or in the model.
        is_option: the function takes a config, and can infer it.
    """

    counts: Counts
    edited: Candidate | None
    local: list[Candidate]
    uncached: list[str]
    blocks: list[BlockCounts]
    is_option: bool

    @property
    def fitting(self) -> Candidate | None:
        candidates = (*self.local, *([] if self.edited is None else [self.edited]))
        return next((candidate for candidate in candidates if candidate.is_fitting), None)

    def finding(self) -> _core.Finding:
        """Return an error if a fitting config is known, or the model lacks blocks.

        Otherwise the result is an info that adds to the errors.
        """
        fits = [candidate.description for candidate in self.local if candidate.is_fitting]
        lines = [
            f"{self.counts.total} tensors of file and model disagree ({self.counts}): the config "
            "is another model's",
            *(
                f"the file has {counts.in_file} blocks {counts.prefix[:-1]!r}, the config "
                f"{counts.in_model}"
                for counts in self.blocks[:BLOCKS_MAX]
            ),
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
        advice = [f"pass {fits[0]}"] if fits and self.is_option else []
        if self.edited is not None and self.edited.is_fitting:
            advice.append("correct these fields of the config")
        advice += ["pass infer_config=True"] if advice and self.is_option else []
        is_error = self.fitting is not None or has_surplus(self.blocks)
        severity, hint = "error" if is_error else "info", ", or ".join(advice)
        return _core.Finding(severity, "plan.config_mismatch", "", [], "; ".join(lines), hint)


def find_mismatch(
    model: Any,
    file_shapes: Shapes,
    checkpoint: SymbolicCheckpoint,
    sources: ConfigSources,
    needs_all_blocks: bool,
) -> Mismatch | None:
    """Search for a fitting config if many tensors disagree; ``file_shapes`` has model names.

    ``needs_all_blocks``: blocks of the file that the model lacks count too.
    """
    cls, config = type(model), getattr(model, "config", None)
    model_shapes = shapes_of(model.state_dict())
    counts = compare(model_shapes, file_shapes)
    blocks = different_block_counts(model_shapes, file_shapes) if counts.total else []
    lacks_blocks = needs_all_blocks and has_surplus(blocks)
    is_suspect = counts.missing + counts.mismatched >= DISAGREEMENTS_MIN or lacks_blocks
    if not is_suspect or not isinstance(config, Mapping):
        return None
    edited = search_changes(cls, config, file_shapes)
    configs = local_configs.find(cls, checkpoint.catalog.shards, sources)[:TRIALS_MAX]
    trials = [try_config(cls, local.config, str(local), file_shapes) for local in configs]
    better = [trial for trial in trials if trial and trial.counts.total < counts.total]
    if edited is None and not better and not lacks_blocks:
        return None
    better.sort(key=lambda candidate: candidate.counts.total)
    uncached = local_configs.uncached(checkpoint.fresh(), sources.cache)
    blocks = blocks if needs_all_blocks else [each for each in blocks if not has_surplus([each])]
    return Mismatch(counts, edited, better, uncached, blocks, sources.is_option)


def has_surplus(blocks: list[BlockCounts]) -> bool:
    return any(counts.in_file > counts.in_model for counts in blocks)
