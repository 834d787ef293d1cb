"""One conversion of a single file to a model's names by diffusers' converter of the class."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loadstone._adapters.diffusers.checkpoint import (
    MissingKeys,
    MissingShape,
    Shape,
    SymbolicCheckpoint,
    shapes_of,
)
from loadstone._base.errors import make

NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")

# A number in a tensor name may always be this large; converters count up to it.
NUMBERS_MIN = 10_000

# `int()` rejects longer numbers of a file.
_DIGITS_MAX = 18

# Stands for an unknown shape: tall, not square, and divisible into many equal parts.
_GUESS: Shape = (5040, 10080)

# Keys that diffusers' converters ignore, although its scripts map them. An entry has an effect only
# if its target would be missing. Delete it when diffusers maps the key.
UNMAPPED_KEYS = {
    # Wan first-last-frame: mapped by scripts/convert_wan_to_diffusers.py.
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
}


@dataclass
class Conversion:
    """A repeatable run of a converter.

    Attributes:
        checkpoint: opened again for each run, dequantized.
        function: takes ``checkpoint`` and ``arguments``.
        target_shapes: of the model's tensors.
        kernel: dequantizes block formats; "" if the model keeps them.
    """

    checkpoint: SymbolicCheckpoint
    function: Callable[..., Mapping[str, Any]]
    arguments: Mapping[str, Any]
    target_shapes: Mapping[str, Shape]
    kernel: str = "gguf"

    def run(
        self, missing_keys: MissingKeys, kernel: str = "gguf", is_search: bool = False
    ) -> Mapping[str, Any]:
        """Convert the file with absent tensors; a search adds names to ``missing_keys``."""
        checkpoint = self.checkpoint.fresh(missing_keys, kernel)
        checkpoint.shape_of_missing = self.shape_of_missing if is_search else None
        return self.function(checkpoint=checkpoint, **self.arguments)

    def shape_of_missing(self, key: str) -> MissingShape:
        """Return the shape of the same tensor in other blocks, or a guess."""
        shapes = self._shapes_by_pattern.get(NUMBER.sub("#", key))
        return MissingShape(*((shapes.most_common(1)[0][0], False) if shapes else (_GUESS, True)))

    @functools.cached_property
    def _shapes_by_pattern(self) -> dict[str, Counter[Shape]]:
        """Return shapes by names without numbers, with and without prefixes."""
        patterns: dict[str, Counter[Shape]] = {}
        for name, info in self.checkpoint.catalog.tensors.items():
            pattern = NUMBER.sub("#", name)
            at = 0
            while True:
                patterns.setdefault(pattern[at:], Counter())[tuple(info.shape)] += 1
                at = pattern.find(".", at) + 1
                if at == 0 or "#" in pattern[:at]:
                    break
        return patterns


def conversion_of(
    model: Any, checkpoint: SymbolicCheckpoint, function: Any, arguments: Mapping[str, Any]
) -> Conversion:
    require_series(checkpoint)
    arguments = {"config": dict(model.config), **arguments}
    return Conversion(checkpoint, function, arguments, shapes_of(model.state_dict()))


def has_own_names(state: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> bool:
    """Return whether a file, complete or partial, already has the model's names."""
    return checkpoint.keys() <= state.keys() or state.keys() <= checkpoint.keys()


def converted_tensors(state_dict: Mapping[str, Any], targets: Mapping[str, Any]) -> dict[str, Any]:
    """Return a converter's tensors; it may write None for missing ones.

    ``targets``: the model's tensors, to which :data:`UNMAPPED_KEYS` are mapped.
    """
    converted = {name: value for name, value in state_dict.items() if value is not None}
    for key, target in UNMAPPED_KEYS.items():
        if key in converted and key not in targets and target in targets:
            converted.setdefault(target, converted.pop(key))
    return converted


def require_series(checkpoint: SymbolicCheckpoint) -> None:
    """Raise ``plan.conversion`` for a number beyond any series; converters count up to it."""
    limit = max(NUMBERS_MIN, len(checkpoint.catalog.tensors))
    for name in checkpoint.catalog.tensors:
        for digits in NUMBER.findall(name):
            if len(digits) > _DIGITS_MAX or int(digits) > limit:
                raise make(
                    "plan.conversion",
                    "the library's converter counts up to the numbers in names, which exceed the "
                    "count of tensors: the series has gaps",
                    tensor=name,
                    found=digits[:_DIGITS_MAX],
                    expected=f"at most {limit}",
                )
