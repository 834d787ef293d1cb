"""Present a quantized checkpoint to conversion code that knows plain tensors.

A quantized tensor appears as one key for its values; its components are hidden. The library's
converters, which stack, join and rename weights, then work as if the file contained the values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from loadstone import _core
from loadstone._base.errors import listed
from loadstone._base.names import parent_name
from loadstone._files.catalog import Catalog

# Dtypes that need no cast. Narrower floats are codes, or values that must be cast to compute.
_WIDE = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class Keys:
    """The keys of a checkpoint.

    Attributes:
        encodings: encoding of each key, in file order; ``"F32"`` for the values of quantized
            tensors.
        data: for the key of a quantized tensor, the name of the tensor with the codes.
        unneeded: scales that only a computation with codes needs.
    """

    encodings: dict[str, str]
    data: dict[str, str] = field(default_factory=dict)
    unneeded: list[str] = field(default_factory=list)


def keys_of(
    catalog: Catalog,
    is_target: Callable[[str], bool],
    leaves: set[str],
    takes_codes: Callable[[str], bool] = lambda key: False,
) -> Keys:
    """Return the keys that represent values.

    Args:
        is_target: returns whether the model has a tensor for a key. If the model has a tensor for a
            scale, it computes with codes, and its quantized tensors stay components.
        leaves: last parts of the names of the model's tensors.
        takes_codes: returns whether a key must stay components for a different reason.
    """
    encodings = catalog.encodings()
    rows = catalog._core.quantized()
    if not rows:
        return Keys(encodings)
    data: dict[str, str] = {}
    components: set[str] = set()
    kept: set[str] = set()  # modules whose tensors all remain keys
    for name, _, _, parts in rows:
        codes = parts.get("data", name)
        companions = set(parts.values()) - {codes}
        has_scales = any(key.rpartition(".")[2] in leaves and is_target(key) for key in companions)
        if has_scales or takes_codes(name):
            kept.add(parent_name(name) or name)
        else:
            data[name] = codes
            components |= companions
    hidden = {key for key in catalog._core.companions() if not _is_inside(key, kept)}
    by_codes = {codes: name for name, codes in data.items()}
    value_encodings: dict[str, str] = {}
    unneeded: list[str] = []
    for key, encoding in encodings.items():
        if key in by_codes:
            value_encodings[by_codes[key]] = "F32"
        elif key in hidden and key in components:
            continue
        elif (key in hidden or _core.is_companion_name(key)) and not is_target(key):
            # Tables and markers, which are not floats or have other names, go without a word.
            if _core.is_companion_name(key) and encoding in _WIDE:
                unneeded.append(key)
        else:
            value_encodings[key] = encoding
    for name in data.keys() - value_encodings.keys():  # codes are absent; a read reports this
        value_encodings[name] = "F32"
    return Keys(value_encodings, data, unneeded)


def digest(catalog: Catalog) -> str:
    """Return a fingerprint of all inputs of the decoding except the data."""
    builder = _core.RecipeBuilder(catalog._core)
    rows = [row for row in catalog._core.quantized() if row[2] is not None]
    for name, *_ in rows:
        builder.add(name, builder.numbers(catalog._core, name, "F32"))
    text = builder.finish().to_json(catalog._core) if rows else ""
    return hashlib.blake2b(f"{rows}{text}".encode(), digest_size=20).hexdigest()


def is_decodable(catalog: Catalog) -> bool:
    return any(row[2] is not None for row in catalog._core.quantized())


def value_dtype(catalog: Catalog) -> str:
    """Return the dtype of the first plain floating-point tensor, or BF16."""
    components = set(catalog._core.companions())
    components.update(row[3].get("data", row[0]) for row in catalog._core.quantized())
    for name, encoding in catalog.encodings().items():
        if name not in components and encoding in _WIDE:
            return encoding
    return "BF16"


def unneeded_finding(names: list[str]) -> _core.Finding:
    count = len(names)
    message = (
        f"{count} tensor{'s' if count > 1 else ''} of the checkpoint "
        f"scale{'' if count > 1 else 's'} activations or a cache of a server that computes with "
        f"codes, but loadstone dequantizes the weights here: {listed(names, 4, repr, more=' ...')}"
    )
    return _core.Finding("info", "q.scale_unused", "", names[:64], message)


def _is_inside(name: str, modules: set[str]) -> bool:
    while name and name not in modules:
        name = parent_name(name)
    return bool(name)
