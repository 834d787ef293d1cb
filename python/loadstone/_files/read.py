"""Read tensors of a checkpoint, whole, in boxes or all in one pass."""

from __future__ import annotations

import difflib
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from loadstone import _core
from loadstone._base import collector
from loadstone._base.dtypes import element_shape, is_dtype, is_floating
from loadstone._base.errors import Error, make
from loadstone._base.indexing import Selection, whole
from loadstone._base.late import torch
from loadstone._base.progress import ProgressCallback
from loadstone._base.warn import warn_of_overflows
from loadstone._files.catalog import Catalog, TensorInfo
from loadstone._model import devices
from loadstone._model.ranks import local_ranks

# Smaller reads use one thread.
ONE_THREAD_BYTES = 8 << 20
NEAREST_MAX = 3


class Entry(NamedTuple):
    """One tensor as callers see it: decoded, or unchanged.

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


class TensorReader:
    """Reads the tensors of one catalog. Thread-safe.

    Args:
        decodes: decode quantized tensors and hide their components; else each tensor of the file
            is an entry, unchanged (block formats are always decoded).
    """

    @collector.paused()
    def __init__(self, catalog: Catalog, *, decodes: bool, receipt: str = "") -> None:
        self.catalog = catalog
        self.receipts: list[str] = []  # one per read, as JSON, if requested
        self._digest = receipt
        self._quantized = {row[3].get("data", row[0]): row for row in catalog._core.quantized()}
        self.entries = {entry.name: entry for entry in self._entries(decodes)}
        rows = () if decodes else self._quantized.values()
        self._components = {name for row in rows for name in row[3].values()}
        self._components |= set() if decodes else set(catalog._core.companions())
        self._lock = threading.Lock()
        self.bytes_read = 0

    def entry(self, name: str) -> Entry:
        """Return the entry of a name, or raise ``open.name``."""
        try:
            return self.entries[name]
        except (KeyError, TypeError):
            shards = self.catalog.shards
            path = shards[0] if len(shards) == 1 else self.catalog._core.root
            for codes, row in self._quantized.items():
                if name in row[3].values():
                    message = f"the tensor belongs to the codes of {codes!r} and is read with them"
                    raise make("open.name", message, path=path, tensor=name) from None
            raise _unknown(str(name), self.entries, path) from None

    def read(
        self, entry: Entry, dtype: str, selection: Selection | None = None, device: str = "cpu"
    ) -> torch.Tensor:
        """Read a tensor, or a box of it, into new memory."""
        selection = selection or whole(entry.shape)
        if selection.numel == 0 and not entry.is_decoded:
            return _empty(entry.name, selection.shape, dtype, device)
        builder = _core.RecipeBuilder(self.catalog._core)
        value = self._value(builder, entry, dtype)
        for dim, (begin, count, step) in enumerate(selection.ranges):
            if (begin, count, step) != (0, entry.shape[dim], 1):
                value = builder.slice(value, dim, begin, count, step)
        tensor = _empty(entry.name, builder.shape(value), dtype, device)
        builder.add(entry.name, value)
        targets = [_core.Target(entry.name, builder.shape(value), dtype)]
        for companion in self.beside([] if entry.is_decoded else [entry.name]):
            builder.add(companion.name, builder.source(companion.name))
            targets.append(companion)
        plan = plan_for(self.catalog, targets, builder.finish(), device)
        tensors = [tensor, *[None] * (len(targets) - 1)]
        self.execute(plan, tensors, [dtype] * len(targets), device)
        return tensor.view(element_shape(selection.shape, dtype))

    @collector.paused()
    def read_all(self, dtypes: Mapping[str, str], device: str, threads: int) -> dict[str, Any]:
        tensors = {}
        for name, dtype in dtypes.items():
            entry = self.entry(name)
            tensors[name] = _empty(entry.name, entry.shape, dtype, device)
        self.read_into(tensors, dtypes, threads, device)
        return tensors

    def read_into(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, str],
        threads: int,
        device: str = "cpu",
    ) -> None:
        """Read into the given tensors: contiguous, on the device, of the entries' shapes."""
        entries = [self.entry(name) for name in tensors]
        for entry in entries:
            if entry.is_decoded and not entry.shape:  # missing codes have no shape
                _core.RecipeBuilder(self.catalog._core).numbers(
                    self.catalog._core, entry.name, "F32"
                )
        targets = [_core.Target(entry.name, entry.shape, dtypes[entry.name]) for entry in entries]
        beside = self.beside(entry.name for entry in entries if not entry.is_decoded)
        targets += beside
        plan = plan_for(self.catalog, targets, device=device)
        places = [*tensors.values(), *[None] * len(beside)]
        wanted = [*(dtypes[name] for name in tensors), *["U8"] * len(beside)]
        self.execute(plan, places, wanted, device, threads)

    def components(self, entry: Entry) -> dict[str, Any]:
        """Read a tensor's components unchanged, by role; blocks are bytes of rows."""
        shapes = {}
        for name in entry.components.values():
            info = self.catalog.tensors[name]
            blocks = not is_dtype(info.encoding) and info.encoding != "F4"
            shapes[name] = (_block_shape(info), "U8") if blocks else (info.shape, info.encoding)
        plan = plan_for(
            self.catalog, [_core.Target(name, *shape) for name, shape in shapes.items()]
        )
        made = {name: _empty(name, *shape) for name, shape in shapes.items()}
        self.execute(plan, list(made.values()), [dtype for _, dtype in shapes.values()])
        return {role: made[name] for role, name in entry.components.items()}

    def _entries(self, decodes: bool) -> Iterator[Entry]:
        tensors = self.catalog.tensors
        hidden = set(self.catalog._core.companions())
        if not decodes:  # blocks are always decoded, including their scales
            hidden = {name for row in self._quantized.values() for name in self._of_blocks(row)}
        for name, info in tensors.items():
            row = self._quantized.get(name) if decodes else None
            if row is not None:
                yield self._quantized_entry(row, info.shape)
            elif name not in hidden:
                blocks = not is_dtype(info.encoding) and not info.encoding.startswith(("F4", "F6"))
                dtype = "F32" if blocks else info.encoding
                yield Entry(
                    name, info.encoding, info.shape, dtype, blocks, {"data": name}, info.nbytes
                )
        if decodes:
            for row in self._quantized.values():
                if "data" not in row[3]:
                    yield self._quantized_entry(row, ())

    def _of_blocks(self, row: tuple[Any, ...]) -> set[str]:
        data = row[3].get("data", row[0])
        blocks = data in self.catalog.tensors and not is_dtype(self.catalog.tensors[data].encoding)
        return set(row[3].values()) - {data} if blocks else set()

    def _quantized_entry(self, row: tuple[Any, ...], shape: tuple[int, ...]) -> Entry:
        name, encoding, numbers_shape, components = row
        stored = sum(self.catalog.tensors[each].nbytes for each in components.values())
        shape = shape if numbers_shape is None else numbers_shape
        return Entry(name, encoding or "unknown", shape, "F32", True, components, stored)

    def _value(self, builder: _core.RecipeBuilder, entry: Entry, dtype: str) -> int:
        try:
            if entry.is_decoded:
                return builder.numbers(self.catalog._core, entry.name, dtype)
            source = builder.source(entry.name)
            return source if dtype == entry.dtype else builder.cast(source, dtype)
        except Error as error:
            if error.code != "plan.recipe":
                raise
            message = "there is no such cast"
            found = entry.dtype if not entry.is_decoded else f"numbers of {entry.encoding}"
            raise make(
                "plan.dtype", message, tensor=entry.name, found=found, expected=dtype
            ) from error

    def is_component(self, name: str) -> bool:
        """Return whether a tensor is a component of a quantized one: codes, scales ..."""
        return name in self._components

    def beside(self, names: Iterable[str]) -> list[_core.Target]:
        """Return the other components of codes: the core reads codes only together with them."""
        given = set(names)
        rows = (self._quantized[name] for name in given if name in self._quantized)
        others = {name for row in rows for name in row[3].values()} - given
        return [_core.Target(name, *self._form(name)) for name in others]

    def _form(self, name: str) -> tuple[tuple[int, ...], str]:
        info = self.catalog.tensors[name]
        return info.shape, info.encoding

    def execute(
        self,
        plan: _core.Plan,
        tensors: Sequence[Any],
        dtypes: Sequence[str],
        device: str = "cpu",
        threads: int = 0,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Execute a plan of :func:`plan_for`; skip targets whose tensor is ``None``."""
        plan.require_ok()
        values = ((device, tensor) for tensor in tensors if tensor is not None)
        with devices.Copier(values) as copier:
            places = [
                _destination(tensor, dtype, copier)
                for tensor, dtype in zip(tensors, dtypes, strict=True)
            ]
            if threads == 0 and sum(size for _, size, _ in places) < ONE_THREAD_BYTES:
                threads = 1
            is_partial = any(tensor is None for tensor in tensors)
            report = _core.execute(
                plan,
                places,
                threads,
                progress,
                partial=is_partial,
                receipt=self._digest,
                device=copier.core,
            )
        warn_of_overflows(report.findings)
        receipt = report.receipt_json()
        with self._lock:
            self.bytes_read += report.numbers()["bytes_read"]
            self.receipts += [receipt] if receipt else []


def wanted_dtype(entry: Entry, dtype: str | None) -> str:
    return dtype if dtype and is_floating(entry.dtype) else entry.dtype


def device_argument(device: Any) -> str:
    """Return a device's name in torch; ``plan.options`` if torch lacks it, or for ``"meta"``."""
    if str(device) == "cpu":
        return "cpu"
    try:
        made = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as reason:
        text = str(reason).partition("\n")[0]
        raise make(
            "plan.options", f"no such device: {text}", field="device", found=str(device)
        ) from None
    if made.type == "meta":
        raise make(
            "plan.options",
            "tensors on meta hold no values; shapes and dtypes are those of the lazy tensors",
            field="device",
            found="meta",
        )
    return "cpu" if made.type == "cpu" else str(made)


def _unknown(name: str, names: Iterable[str], path: str) -> Error:
    leaf = name.rpartition(".")[2]
    known = list(names)
    pool = [each for each in known if each.rpartition(".")[2] == leaf] or known
    nearest = difflib.get_close_matches(name, pool[:2000], NEAREST_MAX, cutoff=0.5)
    expected = " or ".join(nearest) if nearest else f"one of {len(known)} names, see keys()"
    message = "the checkpoint has no tensor of this name"
    return make("open.name", message, path=path, tensor=name, expected=expected)


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


def _block_shape(info: TensorInfo) -> tuple[int, ...]:
    """Return the shape in bytes: of rows, or flat if rows are not whole blocks."""
    is_dtype_of_bits = info.encoding.startswith("F6")
    if not is_dtype_of_bits and info.shape[-1] % _core.gguf_layout(info.encoding)[0]:
        return (info.nbytes,)
    rows = math.prod(info.shape[:-1])
    return (*info.shape[:-1], info.nbytes // rows if rows else 0)


def _empty(name: str, shape: Sequence[int], dtype: str, device: str = "cpu") -> torch.Tensor:
    return devices.empty(name, element_shape(shape, dtype), dtype, device)


def _destination(tensor: Any, dtype: str, copier: devices.Copier) -> tuple[int, int, str]:
    if tensor is None:
        return 0, 0, "U8"
    return copier.address(tensor), tensor.nbytes, dtype
