"""Recipes kept in the user's cache folder, under a digest of all that they depend on.

A file is one line of JSON (facts of the library and a checksum), then the recipes as the core
writes them. A damaged file is ignored and written anew. A plan checks its recipes again, so a
forged file cannot make a load reach outside its tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import conversion_mapping, core_model_loading

from loadstone import _core
from loadstone._catalog import Catalog
from loadstone._errors import Error
from loadstone._sites.transformers import SITES
from loadstone._transformers import quantized
from loadstone._transformers.question import Derived, Question
from loadstone._version import __version__

# Older files are removed when there are more than these.
FILES_MAX = 64

_FORM = 3


def folder() -> Path:
    """Where recipes are kept: ``loadstone/recipes`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "loadstone" / "recipes"


def derive(catalog: Catalog, question: Question) -> Derived:
    """As :func:`rules.derive`, from the cache where it is there.

    Thread safety: any number of threads and processes may share the folder; files appear whole.
    """
    if SITES.is_untried():  # what its conversion code depends on is not known
        from loadstone._transformers import rules

        return rules.derive(catalog, question)
    key = digest(catalog, question)
    path = folder() / f"{key}.json"
    derived = _read(path, key, catalog)
    if derived is not None:
        for index in derived.used if SITES.is_since("5.6") else ():
            question.conversions[index]._was_used = True
        return derived
    from loadstone._transformers import rules

    derived = rules.derive(catalog, question)
    if not derived.findings:
        _write(path, key, derived, catalog)
    return derived


# --- the key -------------------------------------------------------------------------------------


def digest(catalog: Catalog, question: Question) -> str:
    """The digest of everything that recipes depend on: 40 hexadecimal digits."""
    model = question.model
    cls = type(model)
    facts = {
        "form": _FORM,
        "versions": [__version__, transformers.__version__, torch.__version__],
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "prefix": model.base_model_prefix,
        "config": model.config.to_dict(),
        "dtypes": [question.dtype, question.built_dtype, question.dtype_plan],
        "conversions": [_described(each) for each in question.conversions],
        "quantizer": None if question.quantizer is None else _quantizer(question.quantizer),
        "numbers": quantized.digest(catalog) if question.decodes else "",
        "targets": [(name, list(t.shape), t.dtype) for name, t in model.state_dict().items()],
        "code": _code(model, question.conversions),
    }
    text = json.dumps(facts, default=str, sort_keys=True)
    return hashlib.blake2b(f"{text}\n{catalog.digest()}".encode(), digest_size=20).hexdigest()


# Attributes of a transform that change while it is used, or that are described on their own.
_NOT_DESCRIBED = {
    "collected_tensors",
    "compiled_sources",
    "distributed_operation",
    "layer_targets",
    "operations",
    "quantization_operation",
    "_was_used",
}


def _described(conversion: Any) -> Any:
    """A transform with its patterns and operations, as text that two equal ones share."""
    return [
        type(conversion).__qualname__,
        {name: str(getattr(conversion, name)) for name in _attributes(conversion)},
        [
            [type(each).__qualname__, {k: str(v) for k, v in vars(each).items() if _is_plain(v)}]
            for each in getattr(conversion, "operations", ())
        ],
    ]


def _attributes(conversion: Any) -> list[str]:
    """Names of what describes it: patterns, prefixes, what a subclass adds (an offset, say)."""
    slots = {name for cls in type(conversion).__mro__ for name in getattr(cls, "__slots__", ())}
    held = slots | getattr(conversion, "__dict__", {}).keys()
    return sorted(name for name in held - _NOT_DESCRIBED if hasattr(conversion, name))


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | list | tuple | dict | type(None))


def _quantizer(quantizer: Any) -> Any:
    config = quantizer.quantization_config.to_dict()
    return [type(quantizer).__qualname__, quantizer.pre_quantized, config]


def _code(model: Any, conversions: Iterable[Any]) -> list[str]:
    """Digests of the files with the conversion code, the model's own (remote) code and ours."""
    modules = {core_model_loading.__name__, conversion_mapping.__name__}
    for conversion in conversions:
        modules.add(type(conversion).__module__)
        modules.update(type(each).__module__ for each in getattr(conversion, "operations", ()))
    modules.update(
        cls.__module__
        for cls in {type(each) for each in model.modules()}
        if not cls.__module__.startswith("torch.")
    )
    package = Path(__file__).parent
    own = sorted([*package.glob("*.py"), *(package.parent / "tracing").glob("*.py")])
    return [_digest_of(name) for name in sorted(modules)] + [_digest_of_file(each) for each in own]


def _digest_of(module: str) -> str:
    with contextlib.suppress(TypeError, OSError, KeyError):
        file = inspect.getsourcefile(sys.modules[module])
        if file is not None:
            return f"{module} {_digest_of_file(Path(file))}"
    return module


def _digest_of_file(file: Path) -> str:
    status = file.stat()
    return _file_digest(file, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1024)
def _file_digest(file: Path, mtime_ns: int, size: int) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=20).hexdigest()


# --- the files -----------------------------------------------------------------------------------


def _read(path: Path, key: str, catalog: Catalog) -> Derived | None:
    """``None``: there is no such file, or none that can be believed."""
    try:
        if path.stat().st_uid != os.getuid():
            return None
        head, _, recipes = path.read_bytes().partition(b"\n")
        answer = json.loads(head)
        if answer.pop("key") != key or answer.pop("checksum") != _checksum(answer, recipes):
            return None
        derived = Derived(
            recipes=_core.Recipes.from_json(catalog._core, recipes.decode()),
            dtypes=answer["dtypes"],
            unexpected=[(name, source) for name, source in answer["unexpected"]],
            mismatched=[(name, tuple(a), tuple(b)) for name, a, b in answer["mismatched"]],
            used=answer["used"],
            units=answer["units"],
            quantized=answer["quantized"],
            decoded=answer["decoded"],
            unneeded=answer["unneeded"],
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, Error):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the files used last are the ones that stay
    return derived


def _write(path: Path, key: str, derived: Derived, catalog: Catalog) -> None:
    """A cache that cannot be written to is no reason to fail."""
    answer = dataclasses.asdict(dataclasses.replace(derived, recipes=None))
    del answer["recipes"], answer["findings"]
    recipes = derived.recipes.to_json(catalog._core).encode()
    answer |= {"checksum": _checksum(answer, recipes), "key": key}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(json.dumps(answer).encode() + b"\n" + recipes)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _prune(path.parent)


def _checksum(answer: dict[str, Any], recipes: bytes) -> str:
    text = json.dumps(answer, sort_keys=True).encode()
    return hashlib.blake2b(text + b"\n" + recipes, digest_size=20).hexdigest()


def _prune(where: Path) -> None:
    files = sorted(where.glob("*.json"), key=lambda each: each.stat().st_mtime)
    for old in files[:-FILES_MAX]:
        old.unlink(missing_ok=True)
