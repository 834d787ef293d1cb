"""Find and check weights that a checkpoint stores quantized.

The checks use names, dtypes, shapes and the small state blobs, and report broken weights as
findings of the plan, before weights are allocated. They do not need bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from loadstone import _core
from loadstone._adapters.bitsandbytes.checkpoint_format import (
    NESTED,
    STATE,
    Entries,
    QuantStateMetadata,
    Shape,
    check_components,
    component_names,
    join_name,
    require_finite_scales,
    scales_name,
)
from loadstone._base.errors import Error, make
from loadstone._files.catalog import Catalog
from loadstone._model import devices, tensor_memory
from loadstone._model.targets import planned_targets

# A state blob has fewer than 200 bytes; a much larger tensor is not one.
SMALL_BYTES_MAX = 4096
# Approximate limit on the bytes of scales to check at once.
GROUP_BYTES = 16 << 20

_ORDER = "weight_format"


@dataclass(frozen=True)
class StoredWeight:
    """The tensors of one quantized weight in a checkpoint.

    Attributes:
        path: of the module in the model.
        sources: names in the checkpoint, by the names inside the module (``"weight.absmax"``).
        entries: dtype and shape of each, by the names inside the module.
        metadata: the contents of the state blob; ``None`` for an 8-bit weight.
    """

    path: str
    sources: dict[str, str]
    entries: dict[str, tuple[str, Shape]]
    metadata: QuantStateMetadata | None

    @property
    def name(self) -> str:
        return join_name(self.path, "weight")

    @property
    def shape(self) -> Shape:
        return self.metadata.shape if self.metadata is not None else self.entries["weight"][1]

    @property
    def state(self) -> str:
        """Return the state blob's name inside the module."""
        return STATE + self.metadata.quant_type if self.metadata is not None else ""

    def targets(self) -> dict[str, tuple[str, Shape]]:
        """Return dtypes and shapes by full name in the model, the weight first."""
        inside = {"weight": self.entries["weight"]} | self.entries
        return {join_name(self.path, name): entry for name, entry in inside.items()}


@dataclass
class StoredWeights:
    """The quantized weights of a checkpoint.

    Attributes:
        weights: valid weights, by path.
        broken: dtype and shape in the checkpoint by the weight's name; ``None`` if it is absent.
        findings: an error for each broken weight.
    """

    weights: dict[str, StoredWeight] = field(default_factory=dict)
    broken: dict[str, tuple[str, Shape] | None] = field(default_factory=dict)
    findings: list[_core.Finding] = field(default_factory=list)


def find_weights(catalog: Catalog, groups: Mapping[str, Mapping[str, str]]) -> StoredWeights:
    """Check the tensors of quantized weights against each other.

    ``groups``: module path -> (name inside the module -> checkpoint name).
    """
    result = StoredWeights()
    shapes = {name: (info.encoding, info.shape) for name, info in catalog.tensors.items()}
    small = [
        source
        for members in groups.values()
        for inside, source in members.items()
        if (inside.startswith(STATE) or inside == _ORDER)
        and catalog.tensors[source].nbytes <= SMALL_BYTES_MAX
    ]
    values = read_tensors(catalog, small)
    beside = _by_prefix(shapes)
    for path, members in groups.items():
        name, source = next(iter(members.items()))
        prefix = source.removesuffix(name).removesuffix(".")
        inside = {name: shapes[source] for name, source in members.items()}
        others = {name: shapes[join_name(prefix, name)] for name in beside.get(prefix, ())}
        try:
            metadata = _checked(prefix, others | inside, members, values)
        except Error as error:
            name = join_name(path, "weight")
            message, sources = str(error).removesuffix(f" [{error.code}]"), sorted(members.values())
            finding = _core.Finding("error", error.code, name, sources, message)
            result.findings.append(finding)
            result.broken[name] = inside.get("weight")
            continue
        names = component_names(metadata)
        kept = {name: entry for name, entry in inside.items() if name in names}
        named = {name: members[name] for name in kept}
        result.weights[path] = StoredWeight(path, named, kept, metadata)
    return result


def _checked(
    prefix: str,
    entries: Entries,
    members: Mapping[str, str],
    values: Mapping[str, torch.Tensor],
) -> QuantStateMetadata | None:
    state = next((name for name in members if name.startswith(STATE)), None)
    blob = values.get(members[state]) if state is not None else None
    if state is not None and blob is None:
        raise make(
            "q.quant_state",
            "the state blob is too large",
            tensor=join_name(prefix, state),
            found=str(list(entries[state][1])),
            expected=f"at most {SMALL_BYTES_MAX} bytes",
        )
    order = values.get(members.get(_ORDER, ""))
    return check_components(
        prefix,
        entries,
        blob=None if blob is None else blob.view(torch.uint8).numpy().tobytes(),
        weight_format=None if order is None or order.numel() != 1 else int(order.reshape(())),
    )


def _by_prefix(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        prefix, dot, rest = f".{name}".rpartition(".weight.")
        if dot:
            found.setdefault(prefix[1:], []).append(f"weight.{rest}")
    return found


def groups_by_path(catalog: Catalog, paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the tensors of modules with equal paths, omitting plain weights."""
    names = catalog.encodings()
    beside = _by_prefix(names)
    groups = {}
    for path in paths:
        inside = [*beside.get(path, ()), "SCB", _ORDER]
        members = {name: join_name(path, name) for name in inside if join_name(path, name) in names}
        weight = join_name(path, "weight")
        if members or names.get(weight) in ("U8", "I8"):
            groups[path] = ({"weight": weight} if weight in names else {}) | members
    return groups


def read_tensors(catalog: Catalog, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read tensors into new memory, without decoding."""
    wanted = set(names)
    if not wanted:
        return {}
    plan = _core.identity_plan(catalog._core)
    targets = planned_targets(plan)
    tensors = {
        each.name: devices.empty(each.name, each.shape, each.dtype, "cpu")
        for each in targets
        if each.name in wanted
    }
    rows = [tensor_memory.destination(tensors.get(each.name)) for each in targets]
    _core.execute(plan, rows, threads=1, partial=True)
    return tensors


def require_finite(catalog: Catalog, weights: Iterable[StoredWeight]) -> None:
    """Reject non-finite scales and wrong code tables (``q.nan``, ``q.code``); reads no codes."""
    weights = list(weights)
    tables: dict[str, Callable[[Any], None]] = {}
    for weight in weights:
        if (metadata := weight.metadata) is not None:
            check = partial(_core.bnb.check_code, metadata.quant_type)
            tables[weight.sources["weight.quant_map"]] = check
            if metadata.nested:
                tables[weight.sources[NESTED[1]]] = _core.bnb.check_nested_code
    scales = [weight.sources[scales_name(weight.metadata)] for weight in weights]
    for group in _in_groups(catalog, [*scales, *tables]):
        for name, values in read_tensors(catalog, group).items():
            if name in tables:
                _require_table(name, values, tables[name])
            else:
                require_finite_scales(name, values)


def _in_groups(catalog: Catalog, names: Iterable[str]) -> Iterator[set[str]]:
    """Group names by up to ``GROUP_BYTES``; a larger tensor is a group of its own."""
    group: set[str] = set()
    total = 0
    for name in dict.fromkeys(names):
        size = catalog.tensors[name].nbytes
        if group and total + size > GROUP_BYTES:
            yield group
            group, total = set(), 0
        group.add(name)
        total += size
    if group:
        yield group


def _require_table(name: str, table: torch.Tensor, check: Callable[[Any], None]) -> None:
    try:
        check(table.view(torch.uint8).numpy())
    except Error as error:
        raise make(error.code, "the table of codes is wrong", tensor=name) from error
