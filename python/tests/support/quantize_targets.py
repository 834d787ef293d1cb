"""Makes a load quantize targets to components, without a library that installs them."""

from __future__ import annotations

from collections.abc import Iterable

from loadstone._plan.extensions import TargetExtension
from loadstone._plan.model_targets import ModelTargets
from loadstone._plan.quantization import Quantization
from loadstone._plan.recipes import LibraryRecipes


class Quantized(TargetExtension):
    def __init__(self, names: Iterable[str], how: Quantization) -> None:
        self._quantize = dict.fromkeys(names, how)

    def expand(self, targets: ModelTargets) -> None:
        targets.quantize |= self._quantize


def quantizing(names: Iterable[str], how: Quantization) -> LibraryRecipes:
    return LibraryRecipes(None, extensions=[Quantized(names, how)])
