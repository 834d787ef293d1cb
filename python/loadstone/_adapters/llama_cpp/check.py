"""Predict whether llama.cpp opens a GGUF file, from its header.

The rules in ``check_rules.json`` have the keys that llama.cpp requires, and the package ``gguf``,
which llama.cpp publishes, has the tensors of each architecture. Neither proves that llama.cpp
computes with the file's values, so the best verdict is "unknown".
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadstone._adapters.check import EngineCheck, Problem, conclude, rules
from loadstone._base.errors import FormatError
from loadstone._files.catalog import inspect

_CONVERT = "python -m loadstone convert {} OUT.gguf"
_LAYER = re.compile(r"^blk\.(\d+)\.")


def check(path: Path) -> EngineCheck:
    """See :func:`loadstone.check`."""
    rule = rules()["llama.cpp"]
    return conclude("llama.cpp", rule["release"], "check_rules.json", list(_problems(path, rule)))


def _problems(path: Path, rule: dict[str, Any]) -> Iterator[Problem]:
    try:
        catalog = inspect(path, allow_links=True)
    except FormatError as error:
        action = f"run `loadstone explain {error.code}`"
        yield Problem("does not open", f"the file is malformed: {error}", action, "loadstone")
        return
    if not all(shard.endswith(".gguf") for shard in catalog.shards):
        reason = "llama.cpp opens only GGUF files"
        command = _CONVERT.format(path)
        yield Problem("does not open", reason, "convert the model", "check_rules.json", (), command)
        return
    keys = catalog.metadata
    architecture = str(keys.get("general.architecture", ""))
    for row in rule["required_keys"]:
        name = row["key"].format(architecture=architecture or "ARCHITECTURE")
        if name not in keys:
            reason = "the file lacks a key that llama.cpp requires"
            action = "convert the model again, with llama.cpp's converter"
            yield Problem("does not open", reason, action, row["source"], (name,))
    if architecture and importlib.util.find_spec("gguf") is not None:
        yield from _foreign_tensors(architecture, list(catalog.tensors), keys)
    reason = "loadstone cannot predict whether llama.cpp computes with the values of this file"
    yield Problem("unknown", reason, "run the model with llama.cpp", "loadstone")


def _foreign_tensors(
    architecture: str, names: list[str], keys: dict[str, Any]
) -> Iterator[Problem]:
    """Yield tensors that the package gguf does not know, or that the file lacks."""
    import gguf

    source = "the package gguf: MODEL_TENSORS"
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        reason = f"the package gguf does not know the architecture {architecture!r}"
        yield Problem("unknown", reason, "install a newer llama.cpp", "the package gguf")
        return
    stems = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[known[architecture]]}
    foreign = [name for name in names if _stem(name) not in stems]
    if foreign:
        reason = f"the architecture {architecture!r} has no such tensors"
        yield Problem("unknown", reason, "run the model with llama.cpp", source, tuple(foreign))
    layers = {int(found[1]) for found in map(_LAYER.match, names) if found is not None}
    count = keys.get(f"{architecture}.block_count")
    absent = [f"blk.{index}" for index in range(int(count or 0)) if index not in layers]
    if absent:
        reason = f"the key {architecture}.block_count is {count}, but the file lacks these layers"
        action = "convert the model again"
        yield Problem("does not open", reason, action, "check_rules.json", tuple(absent))
    if "token_embd.weight" in {f"{stem}.weight" for stem in stems} - set(names):
        reason = "the file lacks the token embedding"
        action = "convert the model again"
        yield Problem("does not open", reason, action, source, ("token_embd.weight",))


def _stem(name: str) -> str:
    """Return a tensor's name without its suffix, with ``{bid}`` for the layer's index."""
    return _LAYER.sub("blk.{bid}.", name.rpartition(".")[0])
