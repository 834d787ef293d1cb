"""Canaries: each adapter loads a tiny model as its library does, and the results are compared.

The tables in ``sites`` compare signatures. A canary detects a function whose behaviour changed
although its signature did not. The function ``canaries`` of ``_adapters/NAME/canary.py`` saves a
random model in a folder and yields each :class:`Canary` of the library NAME. A canary runs once
per release.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadstone._adapters.patch import patch
from loadstone._adapters.sites import LIBRARIES, sites_of
from loadstone._base import user_cache
from loadstone._base.version import __version__
from loadstone._execute.audit import audit

EQUAL, DIFFERS, FAILED, NOT_RUN = "equal", "differs", "failed", "not run"


@dataclass(frozen=True)
class Canary:
    """Two ways to load the same tiny model.

    Attributes:
        ours: the load by loadstone; ``None`` runs ``own`` again, under :func:`loadstone.patch`.
        is_audited: the model must pass :func:`loadstone.audit` too.
        uncompared: a pattern for tensors that cannot be bit-equal; "" if all are compared.
        note: the reason for ``ours``, ``is_audited`` or ``uncompared``.
        name: name of the load, if a library has several canaries.
    """

    own: Callable[[], Any]
    ours: Callable[[], Any] | None = None
    is_audited: bool = True
    uncompared: str = ""
    note: str = ""
    name: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of a library's canaries: ``EQUAL`` or another constant above, with a reason."""

    result: str
    reason: str = ""
    is_remembered: bool = False  # an earlier run found the same releases equal


def run(library: str, *, again: bool = False) -> Outcome:
    """Run the canaries of a library, unless they were equal before with the same releases."""
    facts = _facts(library)
    name = hashlib.blake2b(facts, digest_size=20).hexdigest()
    path = user_cache.folder("canaries") / f"{name}.json"
    with contextlib.suppress(OSError):
        known, _, note = (user_cache.read(path) or b"").partition(b"\n")
        if known == facts and not again:
            return Outcome(EQUAL, note.decode(errors="replace"), is_remembered=True)
    try:
        outcome = _compare(library)
    except (Exception, SystemExit) as error:  # libraries may raise any class
        return Outcome(FAILED, f"{type(error).__name__}: {error}")
    if outcome.result == EQUAL:
        user_cache.write(path, facts + b"\n" + outcome.reason.encode())
    return outcome


def _facts(library: str) -> bytes:
    """Return the releases for which a result is valid, for all libraries in the process."""
    version = sites_of(library).version()  # imports the library, and the libraries that it uses
    versions = {
        name: str(getattr(sys.modules[name], "__version__", ""))
        for name in ("torch", *LIBRARIES)
        if name in sys.modules
    }
    facts = [library, version, __version__, platform.python_version(), versions]
    return json.dumps(facts, sort_keys=True).encode()


def _compare(library: str) -> Outcome:
    import torch

    canaries = importlib.import_module(f"loadstone._adapters.{library}.canary").canaries
    note = ""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        canary: Canary
        for canary in canaries(Path(folder)):
            difference = _difference(library, canary)
            if difference:
                return Outcome(DIFFERS, ": ".join(filter(None, (canary.name, difference))))
            note = canary.note
    return Outcome(EQUAL, note)


def _difference(library: str, canary: Canary) -> str:
    expected = canary.own()
    with contextlib.nullcontext() if canary.ours else patch(library):
        model = (canary.ours or canary.own)()
    difference = next(differences(model, expected, canary.uncompared), "")
    if not difference and canary.is_audited and not audit(model).ok:
        difference = "the audit does not pass"
    return difference


def differences(model: Any, expected: Any, uncompared: str = "") -> Iterator[str]:
    """Yield a line for each tensor whose name, dtype, shape or bytes differ between two models."""
    import torch

    left, right = (
        {
            name: tensor
            for name, tensor in _tensors(side).items()
            if not (uncompared and re.search(uncompared, name))
        }
        for side in (model, expected)
    )
    for name in sorted(left.keys() ^ right.keys()):
        yield f"{name}: only in {'the library' if name in right else 'loadstone'}'s model"
    for name in sorted(left.keys() & right.keys()):
        ours, own = (_described(tensors[name]) for tensors in (left, right))
        if ours != own:
            yield f"{name}: {ours}, the library has {own}"
        elif not left[name].is_meta and not torch.equal(_raw(left[name]), _raw(right[name])):
            yield f"{name}: different bytes"


def _tensors(model: Any) -> dict[str, Any]:
    """Return the state dict, which has the components of quantized weights, and all buffers."""
    return {**dict(model.named_buffers(remove_duplicate=False)), **model.state_dict()}


def _described(tensor: Any) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def _raw(tensor: Any) -> Any:
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
