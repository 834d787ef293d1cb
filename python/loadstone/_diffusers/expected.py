"""The name that a missing tensor should have in the file, after the model of its siblings."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")


def expected_key(target: str, keys: Mapping[str, str]) -> str | None:
    """The file's key for a target that it lacks; ``None``: nothing tells it.

    Args:
        target: the missing one, by the model's name.
        keys: target and file's key of tensors that are there.
    """
    for match in _NUMBER.finditer(target):
        like = re.compile(
            re.escape(target[: match.start()]) + r"(\d+)" + re.escape(target[match.end() :]) + "$"
        )
        for other, key in keys.items():
            found = like.match(other)
            if found is None:
                continue
            parts = [each for each in _NUMBER.finditer(key) if each[0] == found[1]]
            if len(parts) == 1:
                return key[: parts[0].start()] + match[0] + key[parts[0].end() :]
    leaf = target.rpartition(".")[2]  # a bias stands beside its weight
    for other in ("weight", "bias"):
        sibling = keys.get(f"{target[: len(target) - len(leaf)]}{other}")
        if other != leaf and sibling is not None and sibling.endswith(f".{other}"):
            return sibling[: -len(other)] + leaf
    return None
