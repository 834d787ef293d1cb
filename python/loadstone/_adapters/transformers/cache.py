"""Cache recipes in the user's cache folder, under a digest of all their inputs.

A file is one line of JSON (facts about the library and a checksum), then the core's recipes. A
damaged file is ignored and rewritten. Plans check recipes again, so a forged file cannot make a
load reach outside its tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from transformers import conversion_mapping, core_model_loading

from loadstone import _core, tracing
from loadstone._adapters import quantized
from loadstone._adapters.sites.transformers import SITES
from loadstone._adapters.transformers import derivation
from loadstone._adapters.transformers.code_key import CodeKey, UndescribedError, digest_of_file
from loadstone._adapters.transformers.conversion import ConversionInput, ConversionResult
from loadstone._base import user_cache
from loadstone._base.errors import Error
from loadstone._base.version import __version__
from loadstone._files.catalog import Catalog

_FORM = 4

# Libraries whose versions the key contains instead of their code.
_LIBRARIES = (transformers, torch, numpy)


def folder() -> Path:
    return user_cache.folder("recipes")


def derive(catalog: Catalog, conversion: ConversionInput) -> ConversionResult:
    """Return :func:`derivation.derive`'s result, from the cache if possible.

    Thread safety: threads and processes may share the folder; files appear atomically.
    """
    if SITES.is_untried():  # loadstone does not know all inputs of an untested release
        return derivation.derive(catalog, conversion)
    try:
        key = digest(catalog, conversion)
    except UndescribedError:
        return derivation.derive(catalog, conversion)
    path = folder() / f"{key}.json"
    result = _read(path, key, catalog)
    if result is not None:
        for index in result.used if SITES.is_since("5.6") else ():
            conversion.conversions[index]._was_used = True
        return result
    result = derivation.derive(catalog, conversion)
    if not result.findings:
        _write(path, key, result, catalog)
    return result


# --- the key -------------------------------------------------------------------------------------


def digest(catalog: Catalog, conversion: ConversionInput) -> str:
    """Digest everything that recipes depend on. May raise UndescribedError."""
    model, quantizer = conversion.model, conversion.quantizer
    cls = type(model)
    code = CodeKey([(model, "model"), (model.config, "config"), (quantizer, "quantizer")])
    for name in (core_model_loading.__name__, conversion_mapping.__name__):
        code.add_module(name)
    code.add_model_classes({type(module) for module in model.modules()})
    facts = {
        "form": _FORM,
        "versions": [sys.version, __version__, *(library.__version__ for library in _LIBRARIES)],
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "prefix": model.base_model_prefix,
        "config": model.config.to_dict(),
        "dtypes": [
            *(conversion.dtype, conversion.built_dtype, conversion.is_asked, conversion.dtype_plan)
        ],
        "conversions": [code.describe(transform) for transform in conversion.conversions],
        "quantizer": None if quantizer is None else _describe_quantizer(quantizer, code),
        "numbers": quantized.digest(catalog) if conversion.decodes else "",
        "targets": [(name, list(t.shape), t.dtype) for name, t in model.state_dict().items()],
        "code": [*code.digests(), *(digest_of_file(str(file)) for file in own_code())],
    }
    text = json.dumps(facts, default=str, sort_keys=True)
    return hashlib.blake2b(f"{text}\n{catalog.digest()}".encode(), digest_size=20).hexdigest()


def _describe_quantizer(quantizer: Any, code: CodeKey) -> list[Any]:
    code.add_model_classes([type(quantizer)])
    config = quantizer.quantization_config.to_dict()
    return [type(quantizer).__qualname__, quantizer.pre_quantized, config]


def own_code() -> list[Path]:
    packages = (Path(__file__).parent, Path(tracing.__file__).parent)
    return sorted(file for package in packages for file in package.glob("*.py"))


# --- the files -----------------------------------------------------------------------------------


def _read(path: Path, key: str, catalog: Catalog) -> ConversionResult | None:
    """Return a cached result, or ``None`` if the file is absent or not trustworthy."""
    try:
        content = user_cache.read(path)
        if content is None:
            return None
        head, _, recipes = content.partition(b"\n")
        answer = json.loads(head)
        if answer.pop("key") != key or answer.pop("checksum") != _checksum(answer, recipes):
            return None
        result = ConversionResult(**answer)
        result.recipes = _core.Recipes.from_json(catalog._core, recipes.decode())
        result.unexpected = [(name, source) for name, source in result.unexpected]
        result.mismatched = [(name, tuple(a), tuple(b)) for name, a, b in result.mismatched]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, Error):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the cache keeps the most recently used files
    return result


def _write(path: Path, key: str, result: ConversionResult, catalog: Catalog) -> None:
    answer = dataclasses.asdict(dataclasses.replace(result, recipes=None))
    del answer["recipes"], answer["findings"]
    recipes = result.recipes.to_json(catalog._core).encode()
    answer |= {"checksum": _checksum(answer, recipes), "key": key}
    user_cache.write(path, json.dumps(answer).encode() + b"\n" + recipes)


def _checksum(answer: dict[str, Any], recipes: bytes) -> str:
    text = json.dumps(answer, sort_keys=True).encode()
    return hashlib.blake2b(text + b"\n" + recipes, digest_size=20).hexdigest()
