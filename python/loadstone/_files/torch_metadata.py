"""Read ``_metadata`` of state dicts in torch's files, and the names of non-tensor entries.

The core keeps only the tensors of such files, and ``torch.load(weights_only=True)`` rejects a file
that contains a single unknown class, so this module reads the pickle again. It never imports or
calls anything that the pickle names: every global becomes an empty class.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from typing import Any

from loadstone._files.catalog import Catalog

# The same limits as in the core.
_PICKLE_BYTES_MAX = 48 << 20
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
_WRAPPERS_MAX = 4
_TENSORS = frozenset({"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"})


def read_metadata(catalog: Catalog) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the entries of all shards that are not tensors; none for formats other than torch's.

    Returns:
        The metadata that ``load_state_dict`` passes to each module, by module path (None if the
        file has none), and the names of extra state that is not a tensor.
    """
    modules: dict[str, Any] | None = None
    objects: list[str] = []
    for shard in catalog.shards:
        state = _read_state(shard)
        metadata = getattr(state, "_metadata", None)
        if isinstance(metadata, dict):
            local = {path: fields for path, fields in metadata.items() if isinstance(fields, dict)}
            modules = (modules or {}) | local
        if isinstance(state, dict):
            objects += [name for name, value in state.items() if _is_extra_object(name, value)]
    return modules, objects


def _is_extra_object(name: Any, value: Any) -> bool:
    is_extra = isinstance(name, str) and name.rpartition(".")[2] == "_extra_state"
    return is_extra and not isinstance(value, _Tensor)


class _Foreign:
    """Replaces any class or function: accepts everything, and does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

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
        is_parameter = (module, name) == ("torch._utils", "_rebuild_parameter")
        return _Parameter if is_parameter else _Foreign

    def persistent_load(self, pid: Any) -> Any:
        return _Foreign()


def _read_state(path: str) -> Any:
    """Return the state dict, with stand-ins for tensors; ``None`` if the file is not torch's."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                pickles = (f for f in archive.infolist() if f.filename.endswith("/data.pkl"))
                record = next(pickles, None)
                if record is None or record.file_size > _PICKLE_BYTES_MAX:
                    return None
                with archive.open(record) as file:
                    return _unwrap(_Unpickler(file).load())
        with open(path, "rb") as file:  # noqa: PTH123
            if file.read(1) != b"\x80":
                return None
            file.seek(0)
            for _ in ("magic number", "protocol", "machine"):
                _Unpickler(file).load()
            return _unwrap(_Unpickler(file).load())
    except Exception:  # the pickle uses a feature that the stand-ins lack
        return None


def _unwrap(value: Any) -> Any:
    for _ in range(_WRAPPERS_MAX):
        if not isinstance(value, dict) or any(isinstance(v, _Tensor) for v in value.values()):
            break
        inner = (value[key] for key in _WRAPPERS if isinstance(value.get(key), dict))
        value = next(inner, value)
    return value
