"""Recipes for a model's tensors, from the symbols that diffusers' converter returned."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from loadstone._adapters.diffusers.checkpoint import (
    SymbolicCheckpoint,
    checkpoint_of,
    is_packed,
    shape_of,
    source_name,
)
from loadstone._adapters.diffusers.config_mismatch import find_mismatch
from loadstone._adapters.diffusers.conversion import (
    Conversion,
    IgnoredTensorsError,
    conversion_of,
    convert,
    has_own_names,
)
from loadstone._adapters.diffusers.local_configs import ConfigSources
from loadstone._adapters.diffusers.missing_targets import MissingTargets
from loadstone._adapters.diffusers.quantizers import (
    component_names,
    has_quantizing_layers,
    quantized_weights,
)
from loadstone._base.dtypes import dtype_name
from loadstone._base.errors import new_error
from loadstone._files.catalog import Catalog
from loadstone._plan.options import LoadOptions
from loadstone._plan.recipes import LibraryRecipes, shape_mismatch
from loadstone.tracing._absent_symbol import AbsentSymbol


@dataclasses.dataclass
class ModelRequest:
    """A model to load.

    Attributes:
        converted: the checkpoint's tensors by the model's names.
        dtype: dtype of floating-point tensors; ``None`` keeps the model's own.
        float32_modules: path components of modules that stay in float32.
        quantizer: diffusers' quantizer, for block formats that stay packed.
        device_map: ``None`` places all tensors on the CPU.
        conversion: ``None`` if the checkpoint has the model's names.
        config_sources: sources of configs that may fit the file better than the model's config;
            ``None`` if the caller built the model, perhaps with fewer blocks on purpose.
    """

    model: Any
    converted: Mapping[str, Any]
    checkpoint: SymbolicCheckpoint
    dtype: torch.dtype | None = None
    float32_modules: tuple[str, ...] = ()
    quantizer: Any = None
    device_map: Mapping[str, Any] | None = None
    conversion: Conversion | None = None
    config_sources: ConfigSources | None = None

    def converted_by(self, conversion: Conversion, tensors: Mapping[str, Any]) -> ModelRequest:
        checkpoint = checkpoint_of(tensors) or self.checkpoint
        return dataclasses.replace(
            self, converted=tensors, checkpoint=checkpoint, conversion=conversion
        )

    @functools.cached_property
    def half_converted(self) -> Mapping[str, Any]:
        """``converted``, but dequantized in diffusers' half precision before the conversion."""
        assert self.conversion is not None
        old = self.checkpoint
        return self.conversion.run_on(
            SymbolicCheckpoint(old.catalog, old.missing_keys, "gguf_half", old.trace)
        )

    def dtype_of(self, name: str, current_dtype: torch.dtype) -> torch.dtype:
        """Return the final dtype of a tensor that has the dtype ``current_dtype``."""
        if self.dtype is None or not current_dtype.is_floating_point:
            return current_dtype
        return torch.float32 if is_inside(name, self.float32_modules) else self.dtype


@dataclasses.dataclass(eq=False)
class WrongConfigError(Exception):
    """A different config fits the file; the caller must rebuild the model with it.

    ``is_local``: it is a local config, not the old config with changed fields.
    """

    config: dict[str, Any]
    description: str
    is_local: bool


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Return whether a tensor is inside a module of one of these names."""
    parts = name.split(".")
    return any(module in parts for module in modules)


def float32_modules(model: Any, dtype: Any) -> tuple[str, ...]:
    """Return the modules that ``from_pretrained`` keeps in float32.

    If diffusers loads a single file, it casts these modules. transformers keeps its models' modules
    in float32 only if the dtype is float16.
    """
    names = getattr(type(model), "_keep_in_fp32_modules", None)
    is_own = hasattr(type(model), "_fix_state_dict_keys_on_load")
    if names is None or dtype not in (torch.float16, torch.bfloat16 if is_own else None):
        return ()
    return tuple(names) if isinstance(names, list | tuple | set) else (names,)


def trace_model(model: Any, catalog: Catalog, dtype: torch.dtype | None) -> LibraryRecipes:
    """Run the converter of a model's class on a file, and return the recipes."""
    from diffusers.loaders import single_file_model

    library: Any = single_file_model
    state = model.state_dict()
    name = library._get_single_file_loadable_mapping_class(type(model))
    keeps_codes = has_quantizing_layers(model)
    checkpoint = SymbolicCheckpoint(catalog, kernel="gguf", keeps_codes=keeps_codes)
    request = ModelRequest(model, checkpoint, checkpoint, dtype, float32_modules(model, dtype))
    if name is not None and not has_own_names(state, checkpoint):
        function = library.SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"]
        conversion = conversion_of(model, checkpoint, function, {})
        request = request.converted_by(conversion, convert(conversion, checkpoint))
    return trace(request, LoadOptions())


def trace(
    request: ModelRequest, options: LoadOptions, missing_of: Mapping[str, str] | None = None
) -> LibraryRecipes:
    """Return the recipes of a request, with findings about missing and unexpected tensors.

    ``missing_of`` has the policies of single targets.

    Raises:
        WrongConfigError: a different config fits, and ``options.infer_config`` is set.
    """
    try:
        return _traced(request, options, missing_of or {})
    except IgnoredTensorsError as error:
        conversion = error.conversion
        tensors = conversion.run(error.missing_keys, conversion.kernel)
        request = request.converted_by(conversion, tensors)
        return _traced(request, options, missing_of or {})


def _traced(
    request: ModelRequest, options: LoadOptions, missing_of: Mapping[str, str]
) -> LibraryRecipes:
    model, symbols = request.model, request.checkpoint.trace
    weights = quantized_weights(model, request.checkpoint.catalog, request.converted)
    components = component_names(weights, request.converted)
    state = model.state_dict()
    present = {
        name: value
        for name, value in request.converted.items()
        if name not in components and not isinstance(value, AbsentSymbol)
    }
    shapes = {name: shape_of(value) for name, value in present.items()}
    sources = request.config_sources
    needs_all_blocks = sources is not None and options.refuses_unsupported
    mismatch = find_mismatch(
        model, shapes, request.checkpoint, sources or ConfigSources(), needs_all_blocks
    )
    if mismatch is not None and mismatch.fitting is not None:
        if options.infer_config:
            fitting = mismatch.fitting
            is_local = fitting is not mismatch.edited
            raise WrongConfigError(dict(fitting.config), fitting.description, is_local)
        return LibraryRecipes(
            symbols.finish(), already_reported=list(state), findings=[mismatch.finding()]
        )
    missing = MissingTargets(model, request.converted, options.missing, missing_of)
    recipes = LibraryRecipes(recipes=None, extensions=[*weights])
    for stored in itertools.chain(*(library.stored.values() for library in weights)):
        for name, (dtype, _) in stored.targets().items():
            symbols.add(name, request.converted[name])
            recipes.dtypes[name] = dtype
    keys: dict[str, str] = {}
    packed: dict[str, Any] = {}
    for name, value in present.items():
        if name not in state:
            recipes.unexpected.append((name, source_name(value)))
            continue
        symbol, shape = _final(request, name, value, state[name]), state[name].shape
        if is_packed(symbol):
            packed[name] = symbol
        elif symbol.shape != shape:
            finding = shape_mismatch(name, symbol.shape, shape, [source_name(symbol)])
            recipes.findings.append(finding)
            recipes.already_reported.append(name)
            continue
        symbols.add(name, symbol)
        keys[name] = source_name(value)
        recipes.dtypes[name] = dtype_name(symbol.dtype)
    for name in missing.names:
        recipes.dtypes[name] = dtype_name(request.dtype_of(name, state[name].dtype))
    missing.report(recipes, request.checkpoint, keys, request.conversion)
    for name, symbol in packed.items():  # only now, because `missing.report` may restart the trace
        _replace_parameter(model, name, symbol)
    missing.pair(recipes, {name: shapes[name] for name, _ in recipes.unexpected})
    if mismatch is not None:
        recipes.findings.append(mismatch.finding())
    recipes.recipes = symbols.finish()
    return recipes


def _final(request: ModelRequest, name: str, value: Any, target: torch.Tensor) -> Any:
    """Convert a symbol to the dtype or the block format that the loaded model has."""
    if is_packed(value):
        unquantized = getattr(request.quantizer, "modules_to_not_convert", None) or ()
        if not is_inside(name, unquantized):
            return value
        is_float32 = is_inside(name, request.float32_modules)
        dtype = torch.float32 if is_float32 else request.quantizer.compute_dtype
        if value.source or request.conversion is None:  # a whole tensor of the file
            return value.decoded("gguf_half", dtype)
        return request.half_converted[name].to(dtype)
    if not value.is_floating_point():
        return value if request.dtype is not None else value.to(target.dtype)
    current_dtype = target.dtype if request.dtype is None else value.dtype
    return value.to(request.dtype_of(name, current_dtype))


def _replace_parameter(model: Any, name: str, symbol: Any) -> None:
    """Install a packed parameter on meta in place of the plain one."""
    from diffusers.quantizers.gguf.utils import GGUFParameter

    path, _, leaf = name.rpartition(".")
    found, expected = list(symbol.quant_shape), list(model.get_parameter(name).shape)
    if found != expected:
        message = "the blocks decode to a different shape"
        raise new_error(
            "plan.shape", message, tensor=name, found=str(found), expected=str(expected)
        )
    blank = torch.empty(symbol.shape, dtype=torch.uint8, device="meta")
    module = model.get_submodule(path)
    module._parameters[leaf] = GGUFParameter(  # type: ignore[no-untyped-call]
        blank, quant_type=symbol.quant_type
    )
