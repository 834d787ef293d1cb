"""Find and check weights that a checkpoint stores quantized.

The checks use names, dtypes, shapes and the small state blobs, and report broken weights as
findings of the plan, before weights are allocated. They do not need bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

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
    require_finite_scales,
)
from loadstone._base.errors import Error, new_error
from loadstone._base.names import join_name
from loadstone._files.catalog import Catalog
from loadstone._files.read import TensorReader
from loadstone._model.tensor_memory import bytes_of

# Approximate limit on the bytes of scales to check at once.
GROUP_BYTES = 16 << 20


@dataclass(frozen=True)
class StoredWeight:
    """The tensors of one quantized weight in a checkpoint.

    Attributes:
        path: path of the module in the model.
        sources: names in the checkpoint by component (``"weight.absmax"``).
        entries: dtype and shape by component.
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
    def encoding(self) -> str:
        return self.metadata.quant_type if self.metadata is not None else "int8"

    @property
    def scales(self) -> str:
        """Return the name of the float32 scales inside the module."""
        if self.metadata is None:
            return "SCB"
        return NESTED[0] if self.metadata.nested else "weight.absmax"

    @property
    def state(self) -> str:
        """Return the state blob's name inside the module."""
        return STATE + self.metadata.quant_type if self.metadata is not None else ""

    def targets(self) -> dict[str, tuple[str, Shape]]:
        """Return dtypes and shapes by full name in the model, the weight first."""
        weight_first = {"weight": self.entries["weight"]} | self.entries
        return {join_name(self.path, name): entry for name, entry in weight_first.items()}


@dataclass
class StoredWeights:
    """The quantized weights of a checkpoint.

    Attributes:
        weights: valid weights, by name.
        broken: by name, the dtype and shape of each broken weight in the checkpoint; ``None`` if
            the checkpoint lacks its codes.
        findings: an error for each broken weight.
    """

    weights: dict[str, StoredWeight] = field(default_factory=dict)
    broken: dict[str, tuple[str, Shape] | None] = field(default_factory=dict)
    findings: list[_core.Finding] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        return self.weights.keys() | self.broken.keys()


def find_weights(catalog: Catalog, groups: Mapping[str, Mapping[str, str]]) -> StoredWeights:
    """Check the tensors of quantized weights against each other.

    ``groups`` maps: module path -> (name inside the module -> checkpoint name).
    """
    result = StoredWeights()
    entries = {name: (info.encoding, info.shape) for name, info in catalog.tensors.items()}
    small = [
        source
        for sources in groups.values()
        for inside, source in sources.items()
        if (inside.startswith(STATE) or inside == "weight_format")
        and catalog.tensors[source].nbytes <= _core.bnb.STATE_BYTES_MAX
    ]
    values = _read(catalog, small)
    components = _components_by_path(entries)
    wrong_tables = {
        finding.target: finding
        for finding in catalog.findings
        if finding.code in ("q.code", "q.nan")
    }
    for path, sources in groups.items():
        inside, source = next(iter(sources.items()))
        prefix = source.removesuffix(inside).removesuffix(".")
        group_entries = {name: entries[source] for name, source in sources.items()}
        others = {name: entries[join_name(prefix, name)] for name in components.get(prefix, ())}
        try:
            metadata = _check(prefix, others | group_entries, sources, values)
            if defect := wrong_tables.get(join_name(prefix, "weight")):
                raise new_error(defect.code, defect.message)
        except Error as error:
            name = join_name(path, "weight")
            message = str(error).removesuffix(f" [{error.code}]")
            finding = _core.Finding("error", error.code, name, sorted(sources.values()), message)
            result.findings.append(finding)
            result.broken[name] = group_entries.get("weight")
            continue
        kept = {
            name: group_entries[name] for name in group_entries if name in component_names(metadata)
        }
        kept_sources = {name: sources[name] for name in kept}
        weight = StoredWeight(path, kept_sources, kept, metadata)
        result.weights[weight.name] = weight
    return result


def _check(
    prefix: str,
    entries: Entries,
    sources: Mapping[str, str],
    values: Mapping[str, torch.Tensor],
) -> QuantStateMetadata | None:
    state = next((name for name in sources if name.startswith(STATE)), None)
    if state is not None and sources[state] not in values:
        raise new_error(
            "q.quant_state",
            "the state blob is too large",
            tensor=join_name(prefix, state),
            found=str(list(entries[state][1])),
            expected=f"at most {_core.bnb.STATE_BYTES_MAX} bytes",
        )
    layout = values.get(sources.get("weight_format", ""))
    return check_components(
        prefix,
        entries,
        blob=None if state is None else bytes_of(values[sources[state]]).numpy().tobytes(),
        weight_format=None if layout is None or layout.numel() != 1 else int(layout),
    )


def _components_by_path(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names such as ``path.weight.absmax`` by the path of their module."""
    components: dict[str, list[str]] = {}
    for name in names:
        path, dot, component = f".{name}".rpartition(".weight.")
        if dot:
            components.setdefault(path[1:], []).append(f"weight.{component}")
    return components


def groups_by_path(catalog: Catalog, paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the components of the quantized modules at these paths; omit plain weights."""
    encodings = catalog.encodings()
    components = _components_by_path(encodings)
    others = {
        name
        for name, encoding, *_ in catalog._core.quantized()
        if encoding not in _core.bnb.ENCODINGS
    }
    groups = {}
    for path in paths:
        names = ["weight", *components.get(path, ()), "SCB", "weight_format"]
        sources = {name: join_name(path, name) for name in names}
        present = {name: source for name, source in sources.items() if source in encodings}
        has_codes = encodings.get(sources["weight"]) in ("U8", "I8")
        if present.keys() - {"weight"} or (has_codes and sources["weight"] not in others):
            groups[path] = present
    return groups


def require_finite(catalog: Catalog, weights: Iterable[StoredWeight]) -> None:
    """Reject non-finite scales (``q.nan``); reads no codes."""
    names = [weight.sources[weight.scales] for weight in weights]
    for group in _groups_by_size(catalog, names):
        for name, scales in _read(catalog, group).items():
            require_finite_scales(name, scales)


def _read(catalog: Catalog, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read tensors into new memory, without decoding."""
    dtypes = {name: catalog.tensors[name].encoding for name in names}
    if not dtypes:
        return {}
    return TensorReader(catalog, decodes=False).read_all(dtypes, "cpu", threads=1)


def _groups_by_size(catalog: Catalog, names: Iterable[str]) -> Iterator[list[str]]:
    """Yield groups of names of up to ``GROUP_BYTES``; a larger tensor gets its own group."""
    group: list[str] = []
    total = 0
    for name in names:
        nbytes = catalog.tensors[name].nbytes
        if group and total + nbytes > GROUP_BYTES:
            yield group
            group, total = [], 0
        group.append(name)
        total += nbytes
    yield group
