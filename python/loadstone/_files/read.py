"""Read tensors of a checkpoint: whole tensors, boxes of them, or all tensors in one pass."""

from __future__ import annotations

import difflib
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from loadstone import _core
from loadstone._base import collector
from loadstone._base.dtypes import element_shape, is_dtype, is_floating
from loadstone._base.errors import Error, new_error
from loadstone._base.indexing import Selection, index_tensor, select, select_all
from loadstone._base.lazy_torch import torch
from loadstone._base.progress import ProgressCallback
from loadstone._base.warn import warn_of_overflows
from loadstone._files.catalog import Catalog, TensorInfo
from loadstone._model import devices
from loadstone._model.ranks import local_ranks

# One thread makes smaller reads.
ONE_THREAD_BYTES = 8 << 20
NEAREST_MAX = 3


class Entry(NamedTuple):
    """One tensor under the name that callers use: decoded, or unchanged.

    Attributes:
        encoding: a dtype by its safetensors name, a block format (``"Q4_K"``) or the name of a
            quantized encoding (``"nf4"``).
        dtype: default dtype of a read.
        components: names in the file by role; ``{"data": name}`` for a plain tensor.
    """

    name: str
    encoding: str
    shape: tuple[int, ...]
    dtype: str
    is_decoded: bool
    components: Mapping[str, str]
    stored_bytes: int

    def read_dtype(self, requested: str | None) -> str:
        """Return the dtype of a read; ``requested`` applies only to floating-point tensors."""
        return requested if requested and is_floating(self.dtype) else self.dtype


class _Quantized(NamedTuple):
    """A quantized tensor in the core's catalog; the shape may be unknown."""

    name: str
    encoding: str
    shape: tuple[int, ...] | None
    components: Mapping[str, str]


class TensorReader:
    """Reads the tensors of one catalog. Thread-safe.

    Args:
        decodes: decode quantized tensors and hide their components. If false, each tensor of the
            file is an entry, unchanged, except that block formats are always decoded.
    """

    @collector.paused()
    def __init__(self, catalog: Catalog, *, decodes: bool, receipt: str = "") -> None:
        self.catalog = catalog
        self.receipts: list[str] = []  # receipts as JSON, one per read, if requested
        self._digest = receipt
        rows = [_Quantized(*row) for row in catalog._core.quantized()]
        self._quantized = {row.components.get("data", row.name): row for row in rows}
        self.entries = {entry.name: entry for entry in self._entries(decodes)}
        self._components: set[str] = set()
        if not decodes:
            components = (row.components.values() for row in rows)
            self._components.update(catalog._core.companions(), *components)
        self._lock = threading.Lock()
        self.bytes_read = 0

    def entry(self, name: str) -> Entry:
        """Return the entry for a name; raise ``open.name`` if it is unknown."""
        try:
            return self.entries[name]
        except (KeyError, TypeError):
            shards = self.catalog.shards
            path = shards[0] if len(shards) == 1 else self.catalog._core.root
            for codes, row in self._quantized.items():
                if name in row.components.values():
                    message = (
                        f"the tensor belongs to the codes of {codes!r} and can be read only with "
                        "them"
                    )
                    raise new_error("open.name", message, path=path, tensor=name) from None
            raise _unknown_name(str(name), list(self.entries), path) from None

    def read(
        self, entry: Entry, dtype: str, selection: Selection | None = None, device: str = "cpu"
    ) -> torch.Tensor:
        """Read a tensor, or a box of it, into new memory."""
        selection = selection or select_all(entry.shape)
        if selection.numel == 0 and not entry.is_decoded:
            return _empty(entry.name, selection.shape, dtype, device)
        builder = _core.RecipeBuilder(self.catalog._core)
        value = self._value(builder, entry, dtype)
        for dim, (begin, count, step) in enumerate(selection.ranges):
            if (begin, count, step) != (0, entry.shape[dim], 1):
                value = builder.slice(value, dim, begin, count, step)
        shape = builder.shape(value)
        tensor = _empty(entry.name, shape, dtype, device)
        builder.add(entry.name, value)
        companions = self.companions([] if entry.is_decoded else [entry.name])
        for companion in companions:
            builder.add(companion.name, builder.source(companion.name))
        targets = [_core.Target(entry.name, shape, dtype), *companions]
        plan = plan_for(self.catalog, targets, builder.finish(), device)
        self.execute(plan, [tensor], [dtype], device, skipped=len(companions))
        return tensor.view(element_shape(selection.shape, dtype))

    def read_index(self, entry: Entry, dtype: str, index: Any, device: str) -> torch.Tensor:
        """Read the elements that an index selects; for a list or tensor, first the whole tensor."""
        selection = select(index, entry.shape, entry.name)
        tensor = self.read(entry, dtype, selection, device)
        return tensor if selection is not None else index_tensor(tensor, index, entry.name)

    def dtypes(self, requested: str | None = None) -> dict[str, str]:
        """Return the dtype to read each tensor with: see :meth:`Entry.read_dtype`."""
        return {name: entry.read_dtype(requested) for name, entry in self.entries.items()}

    @collector.paused()
    def read_all(
        self, dtypes: Mapping[str, str], device: str, threads: int
    ) -> dict[str, torch.Tensor]:
        """Read the named tensors in one pass."""
        entries = [self.entry(name) for name in dtypes]
        tensors = {
            entry.name: _empty(entry.name, entry.shape, dtypes[entry.name], device)
            for entry in entries
        }
        for entry in entries:
            if entry.is_decoded and not entry.shape:  # the shape is unknown if codes are missing
                _core.RecipeBuilder(self.catalog._core).numbers(
                    self.catalog._core, entry.name, "F32"
                )
        companions = self.companions(entry.name for entry in entries if not entry.is_decoded)
        targets = [_core.Target(entry.name, entry.shape, dtypes[entry.name]) for entry in entries]
        plan = plan_for(self.catalog, [*targets, *companions], device=device)
        skipped = len(companions)
        self.execute(
            plan, list(tensors.values()), list(dtypes.values()), device, threads, skipped=skipped
        )
        return tensors

    def components(self, entry: Entry) -> dict[str, torch.Tensor]:
        """Read a tensor's components unchanged, by role; blocks become rows of bytes."""
        forms = [_form(self.catalog.tensors[name]) for name in entry.components.values()]
        targets = [_core.Target(*form) for form in forms]
        tensors = [_empty(*form) for form in forms]
        self.execute(plan_for(self.catalog, targets), tensors, [dtype for *_, dtype in forms])
        return dict(zip(entry.components, tensors, strict=True))

    def _entries(self, decodes: bool) -> Iterator[Entry]:
        hidden = set(self.catalog._core.companions())
        if not decodes:  # block formats are decoded even then, so their scales are hidden
            hidden = set().union(*map(self._components_of_blocks, self._quantized.items()))
        for name, info in self.catalog.tensors.items():
            row = self._quantized.get(name) if decodes else None
            if row is not None:
                yield self._quantized_entry(row, info.shape)
            elif name not in hidden:
                is_blocks = not is_dtype(info.encoding)
                is_blocks = is_blocks and not info.encoding.startswith(("F4", "F6"))
                dtype = "F32" if is_blocks else info.encoding
                components = {"data": name}
                yield Entry(
                    name, info.encoding, info.shape, dtype, is_blocks, components, info.nbytes
                )
        if decodes:
            for row in self._quantized.values():
                if "data" not in row.components:
                    yield self._quantized_entry(row, ())

    def _components_of_blocks(self, item: tuple[str, _Quantized]) -> set[str]:
        data, row = item
        info = self.catalog.tensors.get(data)
        is_blocks = info is not None and not is_dtype(info.encoding)
        return set(row.components.values()) - {data} if is_blocks else set()

    def _quantized_entry(self, row: _Quantized, shape: tuple[int, ...]) -> Entry:
        stored = sum(self.catalog.tensors[name].nbytes for name in row.components.values())
        shape = shape if row.shape is None else row.shape
        encoding = row.encoding or "unknown"
        return Entry(row.name, encoding, shape, "F32", True, row.components, stored)

    def _value(self, builder: _core.RecipeBuilder, entry: Entry, dtype: str) -> int:
        try:
            if entry.is_decoded:
                return builder.numbers(self.catalog._core, entry.name, dtype)
            source = builder.source(entry.name)
            return source if dtype == entry.dtype else builder.cast(source, dtype)
        except Error as error:
            if error.code != "plan.recipe":
                raise
            message = "loadstone has no cast between these dtypes"
            found = entry.dtype if not entry.is_decoded else f"values of {entry.encoding}"
            raise new_error(
                "plan.dtype", message, tensor=entry.name, found=found, expected=dtype
            ) from error

    def is_component(self, name: str) -> bool:
        """Return whether a tensor is a component of a quantized tensor: codes, scales ..."""
        return name in self._components

    def companions(self, names: Iterable[str]) -> list[_core.Target]:
        """Return the other components of the codes in ``names``, which the core needs with them."""
        codes = set(names)
        rows = (self._quantized[name] for name in codes if name in self._quantized)
        companions = {name for row in rows for name in row.components.values()} - codes
        infos = (self.catalog.tensors[name] for name in companions)
        return [_core.Target(info.name, info.shape, info.encoding) for info in infos]

    def execute(
        self,
        plan: _core.Plan,
        tensors: Sequence[torch.Tensor],
        dtypes: Sequence[str],
        device: str = "cpu",
        threads: int = 0,
        progress: ProgressCallback | None = None,
        skipped: int = 0,
    ) -> None:
        """Execute a plan of :func:`plan_for`, except its last ``skipped`` targets."""
        plan.require_ok()
        with devices.Copier((device, tensor) for tensor in tensors) as copier:
            places = [
                (copier.address(tensor), tensor.nbytes, dtype)
                for tensor, dtype in zip(tensors, dtypes, strict=True)
            ]
            if threads == 0 and sum(size for _, size, _ in places) < ONE_THREAD_BYTES:
                threads = 1
            report = _core.execute(
                plan,
                places + [(0, 0, "U8")] * skipped,
                threads,
                progress,
                partial=skipped > 0,
                receipt=self._digest,
                device=copier.core,
            )
        warn_of_overflows(report.findings)
        receipt = report.receipt_json()
        with self._lock:
            self.bytes_read += report.numbers()["bytes_read"]
            self.receipts += [receipt] if receipt else []


def device_argument(device: Any) -> str:
    """Return a device's name in torch; ``plan.options`` if torch lacks it, or for ``"meta"``."""
    if str(device) == "cpu":
        return "cpu"
    try:
        resolved = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as reason:
        text = str(reason).partition("\n")[0]
        raise new_error(
            "plan.options", f"this device does not exist: {text}", field="device", found=str(device)
        ) from None
    if resolved.type == "meta":
        raise new_error(
            "plan.options",
            "tensors on meta have no values; the lazy tensors have shapes and dtypes",
            field="device",
            found="meta",
        )
    return "cpu" if resolved.type == "cpu" else str(resolved)


def _unknown_name(name: str, known: list[str], path: str) -> Error:
    leaf = name.rpartition(".")[2]
    pool = [other for other in known if other.rpartition(".")[2] == leaf] or known
    nearest = difflib.get_close_matches(name, pool[:2000], NEAREST_MAX, cutoff=0.5)
    expected = " or ".join(nearest) if nearest else f"one of {len(known)} names, see keys()"
    message = "the checkpoint has no tensor of this name"
    return new_error("open.name", message, path=path, tensor=name, expected=expected)


def plan_for(
    catalog: Catalog,
    targets: list[_core.Target],
    recipes: _core.Recipes | None = None,
    device: str = "cpu",
    **options: Any,
) -> _core.Plan:
    return _core.make_plan(
        catalog._core,
        targets,
        values_known=False,
        strip_prefixes=[],
        missing="error",
        unexpected="ignore",
        allow_non_finite=True,
        device_map=[("", device)],
        local_ranks=local_ranks(),
        recipes=recipes,
        knows_all_sources=recipes is not None,
        **options,
    )


def _form(info: TensorInfo) -> tuple[str, tuple[int, ...], str]:
    """Return name, shape and dtype; blocks become rows of bytes, or flat if they span rows."""
    if is_dtype(info.encoding) or info.encoding == "F4":
        return info.name, info.shape, info.encoding
    is_gguf = not info.encoding.startswith("F6")
    if is_gguf and info.shape[-1] % _core.gguf_layout(info.encoding)[0]:
        return info.name, (info.nbytes,), "U8"
    rows = math.prod(info.shape[:-1])
    return info.name, (*info.shape[:-1], info.nbytes // rows if rows else 0), "U8"


def _empty(name: str, shape: Sequence[int], dtype: str, device: str = "cpu") -> torch.Tensor:
    return devices.empty(name, element_shape(shape, dtype), dtype, device)
