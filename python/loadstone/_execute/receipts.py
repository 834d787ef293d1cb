"""Digests of tensors in memory: complete the receipts of loads, and compare with receipts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from loadstone._base.dtypes import dtype_name
from loadstone._files.receipt import Receipt, digest_of, read_components


def add_components(
    receipt: Receipt, model_slots: Sequence[Any], provenance: Mapping[str, Any]
) -> Receipt:
    """Add digests of the model's quantized tensors, right after the load.

    In the model, a library's quantized tensor has different components than in the core (a table
    next to codes, scales in a different unit), and later checks can read only the model.
    """
    document = json.loads(receipt.to_json())
    for slot in model_slots:
        item = provenance.get(slot.name)
        if item is None or item.origin != "checkpoint" or slot.tensor.is_meta:
            continue
        entries = {entry.get("component", "") for entry in receipt.targets.get(slot.name, [])}
        components = read_components(slot.tensor)
        if not entries:
            components[""] = slot.tensor
        sources = [source.tensor for source in item.sources]
        for role in components.keys() - entries:
            entry = held_entry(receipt.digest, slot.name, components[role], sources)
            document["targets"].append(entry | ({"component": role} if role else {}))
    return Receipt(json.dumps(document))


def held_entry(digest: str, name: str, tensor: Any, sources: list[str]) -> dict[str, Any]:
    """Return a receipt's entry for a tensor in the form that the model holds."""
    return {
        "name": name,
        "encoding": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "begin": 0,
        "end": tensor.nbytes,
        "digest": digest_of(digest, tensor),
        "recipe": "held",
        "sources": sources,
    }


def compare(result: Any, slots: list[Any], receipt: Receipt) -> None:
    """Add to an audit which tensors have the bytes of the receipt, and which do not."""
    for slot in slots:
        entry = result.provenance.get(slot.name)
        if slot.tensor.is_meta:
            continue
        name = entry.tie_of if entry is not None and entry.origin == "tie" else slot.name
        is_same = receipt.matches(name or slot.name, slot.tensor)
        if is_same:
            is_same = receipt.components_match(name or slot.name, slot.tensor)
        if is_same:
            result.proved.append(slot.name)
        elif is_same is None:
            root = result.provenance.get(name or slot.name)
            if root is not None and root.origin == "checkpoint":
                result.unlisted.append(slot.name)
        elif slot.name not in result.changed:
            result.changed.append(slot.name)
