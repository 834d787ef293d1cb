"""Read ``_metadata`` of state dicts in torch's files, and the names of non-tensor entries.

The core keeps only the tensors of such files, so this module reads the pickle again. It imports and
calls nothing by name: every global becomes an empty class.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import IO, Any

from loadstone._files.catalog import Catalog

# The core's limits.
_PICKLE_BYTES_MAX = 48 << 20
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
_WRAPPERS_MAX = 4
_TENSORS = frozenset({"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"})


@dataclass
class Metadata:
    """The parts of torch files that are not tensors.

    Attributes:
        modules: what ``load_state_dict`` passes to each module, by path; ``None``: no metadata.
        objects: names of extra state that is not a tensor.
    """

    modules: dict[str, Any] | None = None
    objects: list[str] = field(default_factory=list)


def metadata_of(catalog: Catalog) -> Metadata:
    """Return the metadata of all shards; empty for formats other than torch's."""
    found = Metadata()
    for shard in catalog.shards:
        state = _state(shard)
        modules = getattr(state, "_metadata", None)
        if isinstance(modules, dict):
            known = {path: own for path, own in modules.items() if isinstance(own, dict)}
            found.modules = (found.modules or {}) | known
        if isinstance(state, dict):
            found.objects += [
                name
                for name, value in state.items()
                if isinstance(name, str)
                and name.rpartition(".")[2] == "_extra_state"
                and not isinstance(value, _Tensor)
            ]
    return found


class _Foreign:
    """Replaces any class or function: accepts everything, and does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        """Like ``list.extend``."""


class _Tensor(_Foreign):
    pass


class _Parameter(_Foreign):
    def __new__(cls, data: Any = None, *_: Any) -> Any:
        return data


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and name in _TENSORS:
            return _Tensor
        if module == "torch._utils" and name == "_rebuild_parameter":
            return _Parameter
        return _Foreign

    def persistent_load(self, pid: Any) -> Any:
        return _Foreign()


def _state(path: str) -> Any:
    """Return the state dict, with stand-ins for tensors; ``None`` for other kinds of files."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = (n for n in archive.infolist() if n.filename.endswith("/data.pkl"))
                record = next(names, None)
                if record is None or record.file_size > _PICKLE_BYTES_MAX:
                    return None
                with archive.open(record) as file:
                    return _unwrapped(_Unpickler(file).load())
        with open(path, "rb") as file:  # noqa: PTH123
            return _unwrapped(_before_zip(file)) if file.read(1) == b"\x80" else None
    except Exception:  # the pickle needs more than the stand-ins support
        return None


def _before_zip(file: IO[bytes]) -> Any:
    """Skip magic number, protocol and machine, which precede the content."""
    file.seek(0)
    for _ in range(3):
        _Unpickler(file).load()
    return _Unpickler(file).load()


def _unwrapped(value: Any) -> Any:
    for _ in range(_WRAPPERS_MAX):
        if not isinstance(value, dict) or any(isinstance(v, _Tensor) for v in value.values()):
            break
        inner = (value[key] for key in _WRAPPERS if isinstance(value.get(key), dict))
        value = next(inner, value)
    return value
