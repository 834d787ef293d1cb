"""Select the weights to load quantized: by ``quantize=``, or by the model's library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import bitsandbytes as bnb
import torch

from loadstone import _core
from loadstone._adapters.bitsandbytes.checkpoint_format import FOUR_BIT, NESTED_BLOCK
from loadstone._adapters.bitsandbytes.experts import stacks
from loadstone._adapters.bitsandbytes.loading import QuantizedWeights
from loadstone._adapters.bitsandbytes.stored_weights import (
    StoredWeights,
    find_weights,
    groups_by_path,
)
from loadstone._base.errors import new_error, unknown_word_error
from loadstone._base.names import join_name, parent_name
from loadstone._files.catalog import Catalog
from loadstone._model.modules import named_modules, owner_of, saved_path, submodule
from loadstone._plan.quantization import Quantization
from loadstone._plan.recipes import LibraryRecipes, shape_mismatch

ENCODINGS = _core.bnb.ENCODINGS

# Path of the output layer in models without get_output_embeddings().
_OUTPUT = "lm_head"


def extend(
    recipes: LibraryRecipes, model: Any, catalog: Catalog, dtype: Any, quantize: Any
) -> None:
    """Add a model's quantized weights to ``recipes``; its names match the checkpoint's.

    Args:
        recipes: may already contain the weights that the model's library quantizes.
        dtype: dtype of the other floating-point tensors.
        quantize: see :func:`loadstone.plan`.

    Raises:
        OptionError: ``plan.options``: an unknown encoding, or a pattern that matches no weight.
    """
    if not isinstance(model, torch.nn.Module):
        raise _refused("quantizing needs a model, not a skeleton file")
    requested = _requested(model, quantize)
    layers = {path: module for path, module in named_modules(model) if is_quantizing(module)}
    if not requested and not layers:
        return
    for extension in recipes.extensions:
        if isinstance(extension, QuantizedWeights):
            extension.quantize |= _subtract(requested, extension.installed_targets())
            return
    paths = {parent_name(name) for name in requested} | layers.keys()
    stored = find_weights(catalog, groups_by_path(catalog, sorted(paths)))
    if stored.weights and recipes.recipes is not None:
        raise _refused_again(stored)
    blank = {join_name(path, "weight") for path, layer in layers.items() if layer.weight.is_meta}
    required = _required(model, sorted(blank - stored.names), {})
    _require_agreement(requested, required)
    quantize = _subtract(requested | required, stored.names)
    weights = QuantizedWeights(catalog, stored, quantize, dtype=dtype)
    weights.aliases = _aliases(model, stored.weights.keys() | quantize.keys())
    weights.problems = [*_wrong_shapes(model, stored), *_disagreements(stored, requested)]
    recipes.extensions.append(weights)


def _refused_again(stored: StoredWeights) -> Exception:
    encodings = ", ".join(sorted({weight.encoding for weight in stored.weights.values()}))
    return _refused(
        f"rules traced from a library dequantize the {encodings} weights of this checkpoint, and "
        "quantize= would quantize them again: leave rules out to keep their codes, or leave "
        "quantize out to dequantize them",
        found=encodings,
    )


def _subtract(quantize: dict[str, Quantization], names: set[str]) -> dict[str, Quantization]:
    return {name: quantize[name] for name in quantize if name not in names}


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
        stored: module path -> (name inside the module -> checkpoint name); or module paths, if the
            checkpoint has the same names. Layers of other libraries are left out.
        names: weights to quantize if the checkpoint has plain values.
        nested_offset: offsets of nested scales, by the weight's name.
        experts: tensors to search for expert stacks, which are quantized too.
        tied: tied weights, which the checkpoint may lack.
    """
    groups = stored if isinstance(stored, Mapping) else groups_by_path(catalog, stored)
    groups = {path: groups[path] for path in groups if is_quantizing(submodule(model, path))}
    checkpoint = find_weights(catalog, groups)
    offsets = nested_offset or {}
    quantize = _required(model, (name for name in names if name not in checkpoint.names), offsets)
    if experts is not None:
        quantize |= _required_of_experts(model, experts, quantize, offsets)
    weights = QuantizedWeights(catalog, checkpoint, quantize)
    known = {*weights.installed_targets(), *checkpoint.broken, *tied}
    weights.problems = [*_wrong_shapes(model, checkpoint), *_unfilled(model, known)]
    return weights


def quantized_bytes(model: torch.nn.Module, name: str) -> int:
    """Return the size in bytes of a weight and its scales, quantized as its module requires."""
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
    return isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)


def _requested(model: torch.nn.Module, quantize: Any) -> dict[str, Quantization]:
    if quantize is None:
        return {}
    if not isinstance(quantize, Mapping):
        return dict.fromkeys(_default_weights(model), _quantization(quantize))
    patterns, quantizations = list(quantize), [_quantization(value) for value in quantize.values()]
    linears = [join_name(path, "weight") for path, _ in _linears(model)]
    named = model.named_parameters(remove_duplicate=False)
    parameters = (saved_path(model, name) for name, _ in named)
    weights = [*linears, *stacks(model, parameters)]
    paths = [weight.removesuffix(".weight") for weight in weights]
    by_weight, by_path = (
        _core.first_matches(patterns, names, "quantize") for names in (weights, paths)
    )
    requested: dict[str, Quantization] = {}
    used = set()
    for weight, *matches in zip(weights, by_weight, by_path, strict=True):
        matching = [index for index in matches if index >= 0]
        used.update(matching)
        if matching:
            requested[weight] = quantizations[min(matching)]
    for index, pattern in enumerate(patterns):
        if index not in used:
            raise _refused("the pattern matches no weight of a linear layer", pattern)
    return requested


def _quantization(value: Any) -> Quantization:
    if isinstance(value, Quantization):
        return value
    if value not in ENCODINGS:
        raise unknown_word_error("quantize", "encoding", value, ENCODINGS)
    return Quantization(value)


def _refused(message: str, found: str = "", expected: str = "") -> Exception:
    return new_error("plan.options", message, field="quantize", found=found, expected=expected)


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield linear layers to replace; a subclass of ``Linear`` may override the forward pass."""
    for path, module in named_modules(model):
        if path and (type(module) is torch.nn.Linear or is_quantizing(module)):
            yield path, module


def _default_weights(model: torch.nn.Module) -> list[str]:
    """Return the weights of all linear layers, except the output embedding and tied weights."""
    get_output = getattr(model, "get_output_embeddings", None)
    output = get_output() if callable(get_output) else None
    owners = Counter(
        id(parameter) for module in model.modules() for parameter in module._parameters.values()
    )
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {*ties, *ties.values()}
    return [
        join_name(path, "weight")
        for path, module in _linears(model)
        if module is not output
        and path.rpartition(".")[2] != _OUTPUT
        and join_name(path, "weight") not in tied
        and owners[id(module.weight)] == 1
    ]


def _aliases(model: torch.nn.Module, names: set[str]) -> frozenset[str]:
    """Return these weights' names under other paths of their modules, which are replaced too."""
    modules = {id(owner_of(model, name)) for name in names}
    paths = {
        join_name(path, "weight")
        for path, module in named_modules(model, remove_duplicate=False)
        if id(module) in modules and "weight" in module._parameters
    }
    return frozenset(paths - names)


def _required(
    model: torch.nn.Module, names: Iterable[str], offsets: Mapping[str, float]
) -> dict[str, Quantization]:
    """Return the quantization that each weight's bitsandbytes module requires."""
    required = {}
    for name in names:
        if name.rpartition(".")[2] != "weight":
            continue
        module = owner_of(model, name)
        weight: Any = module._parameters.get("weight")
        if isinstance(module, bnb.nn.Linear4bit) and weight.quant_state is None:
            required[name] = Quantization(
                weight.quant_type,
                block_size=weight.blocksize,
                nested=weight.compress_statistics,
                nested_offset=offsets.get(name) if weight.compress_statistics else None,
            )
        elif isinstance(module, bnb.nn.Linear8bitLt) and not weight.has_fp16_weights:
            required[name] = Quantization("int8")
    return required


def _required_of_experts(
    model: torch.nn.Module,
    names: Iterable[str],
    quantize: Mapping[str, Quantization],
    offsets: Mapping[str, float],
) -> dict[str, Quantization]:
    """Return the quantization of expert stacks, which is the same as that of the model's layers.

    Raises ``plan.options`` if the layers are not quantized to 4 bits.
    """
    layer_quantization = next(iter(quantize.values()), None)
    if layer_quantization is None or layer_quantization.encoding not in FOUR_BIT:
        raise new_error(
            "plan.options",
            "quantize_experts requires that the linear layers get a 4-bit encoding",
            field="quantize_experts",
            found="not at all" if layer_quantization is None else layer_quantization.encoding,
            expected=", ".join(FOUR_BIT),
        )
    if not layer_quantization.nested:
        return dict.fromkeys(stacks(model, names), replace(layer_quantization, nested_offset=None))
    return {
        name: replace(layer_quantization, nested_offset=offsets.get(name))
        for name in stacks(model, names)
    }


def _unfilled(model: torch.nn.Module, known: set[str]) -> list[_core.Finding]:
    """Return an error for each bitsandbytes layer whose weight would stay unquantized."""
    findings = []
    for path, module in named_modules(model):
        name = join_name(path, "weight")
        if is_quantizing(module) and module.weight.is_meta and name not in known:
            message = f"'{name}' is missing, but only weights of the checkpoint can be quantized"
            findings.append(_core.Finding("error", "plan.missing", name, [], message))
    return findings


def _wrong_shapes(model: torch.nn.Module, stored: StoredWeights) -> list[_core.Finding]:
    findings = []
    for name, weight in stored.weights.items():
        module = submodule(model, weight.path)
        expected = (module.out_features, module.in_features)
        if weight.shape != expected:
            sources = sorted(weight.sources.values())
            findings.append(shape_mismatch(name, weight.shape, expected, sources))
    return findings


def _require_agreement(
    requested: Mapping[str, Quantization], required: Mapping[str, Quantization]
) -> None:
    for name, quantization in required.items():
        found = requested.get(name, quantization).encoding
        if found != quantization.encoding:
            message = f"the module of '{name}' is made for a different encoding"
            raise _refused(message, found, quantization.encoding)


def _disagreements(
    stored: StoredWeights, requested: Mapping[str, Quantization]
) -> list[_core.Finding]:
    findings = []
    for name, weight in stored.weights.items():
        encoding = requested[name].encoding if name in requested else weight.encoding
        if encoding != weight.encoding:
            message = (
                f"'{name}' is stored as {weight.encoding}, but {encoding} was requested: quantized "
                "weights are not quantized again"
            )
            sources = sorted(weight.sources.values())
            findings.append(_core.Finding("error", "plan.quantize", name, sources, message))
    return findings
