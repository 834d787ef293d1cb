"""Select the weights to load quantized: by ``quantize=``, or by the model's library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import bitsandbytes as bnb
import torch

from loadstone import _core
from loadstone._adapters.bitsandbytes.checkpoint_format import join_name
from loadstone._adapters.bitsandbytes.experts import stacks
from loadstone._adapters.bitsandbytes.loading import (
    NESTED_BLOCK,
    QuantizedWeights,
    of_experts,
    quantizations,
)
from loadstone._adapters.bitsandbytes.stored_weights import find_weights, groups_by_path
from loadstone._base.errors import make, unknown
from loadstone._files.catalog import Catalog
from loadstone._model.modules import named_modules, owner_of, saved_path
from loadstone._plan.quantization import Quantization
from loadstone._plan.recipes import AdapterRecipes

ENCODINGS = _core.bnb.ENCODINGS

# The output layer in models without get_output_embeddings().
_OUTPUT = "lm_head"


def extend(
    recipes: AdapterRecipes, model: Any, catalog: Catalog, dtype: Any, quantize: Any
) -> None:
    """Add the quantized weights of a model whose names match the checkpoint.

    Args:
        recipes: may already contain the weights that the model's library quantizes.
        dtype: of the other floating-point tensors.
        quantize: see :func:`loadstone.plan`.

    Raises:
        Error: ``plan.options``: an unknown encoding, or a pattern that matches no weight.
    """
    if not isinstance(model, torch.nn.Module):
        raise _refused("quantizing needs a model, not a skeleton file")
    wanted = _wanted(model, quantize)
    known = {path: module for path, module in named_modules(model) if is_quantizing(module)}
    if not wanted and not known:
        return
    for traced in recipes.extensions:
        if isinstance(traced, QuantizedWeights):
            names = traced.installed_targets()
            traced.quantize |= {name: how for name, how in wanted.items() if name not in names}
            return
    paths = {name.rpartition(".")[0] for name in wanted} | known.keys()
    found = find_weights(catalog, groups_by_path(catalog, sorted(paths)))
    stored = {each.name for each in found.weights.values()} | found.broken.keys()
    free = {join_name(path, "weight") for path, module in known.items() if _is_free(module)}
    own = quantizations(model, sorted(free - stored))
    _require_agreement(wanted, own)
    quantized = {name: how for name, how in (wanted | own).items() if name not in stored}
    weights = QuantizedWeights(catalog, found.weights, quantized, found.broken, dtype=dtype)
    weights.aliases = _aliases(model, weights.weights())
    weights.problems = [*found.findings, *weights.misfits(model), *_disagreements(weights, wanted)]
    recipes.extensions.append(weights)


def traced_weights(
    model: Any,
    catalog: Catalog,
    stored: Mapping[str, Mapping[str, str]] | Iterable[str],
    names: Iterable[str],
    *,
    nested_offset: Mapping[str, float] | None = None,
    experts: Iterable[str] | None = None,
    tied: Iterable[str] = (),
) -> QuantizedWeights:
    """Return the quantized weights of a model that already has bitsandbytes layers.

    Args:
        stored: module path -> (name inside the module -> checkpoint name), or paths of modules with
            the same names in the checkpoint.
        names: weights to quantize if the checkpoint has plain values.
        nested_offset: offsets of nested scales, by the weight's name.
        experts: tensors to search for expert stacks, which are quantized too.
        tied: weights that may be missing.
    """
    groups = stored if isinstance(stored, Mapping) else groups_by_path(catalog, stored)
    found = find_weights(catalog, groups)
    taken = {each.name for each in found.weights.values()} | found.broken.keys()
    quantize = quantizations(model, (name for name in names if name not in taken), nested_offset)
    if experts is not None:
        quantize |= of_experts(model, experts, quantize, nested_offset)
    weights = QuantizedWeights(catalog, found.weights, quantize, found.broken)
    unfilled = [each for each in weights.unfilled(model) if each.target not in tied]
    weights.problems = [*found.findings, *weights.misfits(model), *unfilled]
    return weights


def quantized_bytes(model: torch.nn.Module, name: str) -> int:
    """Return the bytes of a weight and its scales, quantized as its module requires."""
    module = owner_of(model, name)
    count = module.out_features * module.in_features
    if not isinstance(module, bnb.nn.Linear4bit):
        return int(count + 4 * module.out_features)
    weight: Any = module.weight
    blocks = -(-count // weight.blocksize)
    size = -(-count // 2) + 4 * 16
    if not weight.compress_statistics:
        return int(size + 4 * blocks)
    return int(size + blocks + 4 * -(-blocks // NESTED_BLOCK) + 4 * 256 + 4)


def is_quantizing(module: torch.nn.Module) -> bool:
    """Return whether a module is a bitsandbytes layer, without importing bitsandbytes."""
    return any(
        base.__module__.startswith("bitsandbytes.") and base.__name__ in _CLASSES
        for base in type(module).__mro__
    )


_CLASSES = ("Linear4bit", "Linear8bitLt")


def _is_free(module: Any) -> bool:
    return bool(module.weight.is_meta)


def _wanted(model: torch.nn.Module, quantize: Any) -> dict[str, Quantization]:
    if quantize is None:
        return {}
    if not isinstance(quantize, Mapping):
        how = _how(quantize)
        return dict.fromkeys(_usual(model), how)
    patterns, hows = list(quantize), [_how(value) for value in quantize.values()]
    linears = [join_name(path, "weight") for path, _ in _linears(model)]
    named = model.named_parameters(remove_duplicate=False)
    parameters = (saved_path(model, name) for name, _ in named)
    weights = [*linears, *stacks(model, parameters)]
    paths = [weight.removesuffix(".weight") for weight in weights]
    by_weight, by_path = (
        _core.first_matches(patterns, names, "quantize") for names in (weights, paths)
    )
    found: dict[str, Quantization] = {}
    used = set()
    for weight, *matches in zip(weights, by_weight, by_path, strict=True):
        matching = [index for index in matches if index >= 0]
        used.update(matching)
        if matching:
            found[weight] = hows[min(matching)]
    for index, pattern in enumerate(patterns):
        if index not in used:
            raise _refused("the pattern matches no weight of a linear layer", pattern)
    return found


def _how(value: Any) -> Quantization:
    if isinstance(value, Quantization):
        return value
    if value not in ENCODINGS:
        raise unknown("quantize", "encoding", value, ENCODINGS)
    return Quantization(value)


def _refused(message: str, found: str = "", expected: str = "") -> Exception:
    return make("plan.options", message, field="quantize", found=found, expected=expected)


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield replaceable linear layers; subclasses of ``Linear`` may override the forward pass."""
    for path, module in named_modules(model):
        if path and (type(module) is torch.nn.Linear or is_quantizing(module)):
            yield path, module


def _usual(model: torch.nn.Module) -> list[str]:
    """Return the weights of all linear layers, except the output embedding and tied weights."""
    asked = getattr(model, "get_output_embeddings", None)
    output = asked() if callable(asked) else None
    owners = Counter(
        id(parameter) for module in model.modules() for parameter in module._parameters.values()
    )
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    untied = {*tied, *tied.values()}
    return [
        join_name(path, "weight")
        for path, module in _linears(model)
        if module is not output
        and path.rpartition(".")[2] != _OUTPUT
        and join_name(path, "weight") not in untied
        and owners[id(module.weight)] == 1
    ]


def _aliases(model: torch.nn.Module, names: set[str]) -> frozenset[str]:
    """Return other names of these weights, because a module is replaced at all its paths."""
    modules = {id(owner_of(model, name)) for name in names}
    found = {
        join_name(path, leaf)
        for path, module in named_modules(model, remove_duplicate=False)
        if id(module) in modules
        for leaf in module._parameters
        if leaf == "weight"
    }
    return frozenset(found - names)


def _require_agreement(wanted: Mapping[str, Quantization], own: Mapping[str, Quantization]) -> None:
    for name, how in own.items():
        if name in wanted and wanted[name].encoding != how.encoding:
            raise _refused(
                f"the module of '{name}' is made for another encoding",
                wanted[name].encoding,
                how.encoding,
            )


def _disagreements(
    weights: QuantizedWeights, wanted: Mapping[str, Quantization]
) -> list[_core.Finding]:
    findings = []
    for stored in weights.stored.values():
        encoding = stored.metadata.quant_type if stored.metadata is not None else "int8"
        if stored.name in wanted and wanted[stored.name].encoding != encoding:
            message = (
                f"'{stored.name}' is stored as {encoding}, but {wanted[stored.name].encoding} was "
                "requested: quantized weights are not quantized again"
            )
            sources = sorted(stored.sources.values())
            findings.append(_core.Finding("error", "plan.quantize", stored.name, sources, message))
    return findings
