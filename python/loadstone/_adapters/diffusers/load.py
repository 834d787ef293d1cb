"""Planning and reading for diffusers' loaders."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import big_modeling

from loadstone._adapters.diffusers.checkpoint import SymbolicCheckpoint, is_packed
from loadstone._adapters.diffusers.config_mismatch import ConfigSources, Mismatch, examine
from loadstone._adapters.diffusers.missing_keys import Conversion, MissingKeys, find_missing_keys
from loadstone._adapters.diffusers.missing_tensors import MissingTensors
from loadstone._adapters.diffusers.quantized import parts_of, quantized_weights
from loadstone._adapters.diffusers.supplements import supplement
from loadstone._base.dtypes import dtype_name, torch_dtype
from loadstone._base.errors import PlanError, make
from loadstone._execute import execute
from loadstone._execute.report import Report
from loadstone._execute.session import LoadSession
from loadstone._model.model_lock import model_lock
from loadstone._model.walk import walk
from loadstone._plan.options import LoadOptions
from loadstone._plan.placement import align_offloaded_weights
from loadstone._plan.planned_load import PlannedLoad
from loadstone._plan.recipes import AdapterRecipes, shape_mismatch
from loadstone.tracing import Symbol
from loadstone.tracing._absent_symbol import AbsentSymbol


@dataclasses.dataclass
class Request:
    """A model to load.

    Attributes:
        converted: the checkpoint's tensors by the model's names.
        dtype: for floating-point tensors; ``None``: the model's own.
        keeps: path components of modules that stay in float32.
        quantizer: diffusers' quantizer, for block formats that stay packed.
        device_map: ``None``: all on the CPU.
        conversion: ``None`` if the checkpoint has the model's names.
    """

    model: Any
    converted: Mapping[str, Any]
    checkpoint: SymbolicCheckpoint
    dtype: torch.dtype | None = None
    keeps: tuple[str, ...] = ()
    quantizer: Any = None
    device_map: Mapping[str, Any] | None = None
    conversion: Conversion | None = None


class DiffusersSession(LoadSession):
    """One call of a loader. Single-threaded.

    Attributes:
        device_map: the request, resolved by diffusers.
        keeps_blocks: keep block formats packed.
        missing_keys: names that the converter is known to request in vain.
        conversion: set while the converter runs.
        conversion_of: returns the conversion of the file for a transformers model.
        mapping: the converter and its arguments.
    """

    def __init__(self, options: LoadOptions) -> None:
        super().__init__(options)
        self.device_map: Any = None
        self.keeps_blocks = False
        self.config_sources = ConfigSources()
        self.missing_keys = MissingKeys()
        self.conversion: Conversion | None = None
        self.conversion_of: Callable[[Any], Conversion] | None = None
        self.mapping: tuple[Any, dict[str, Any]] | None = None
        self._request: Request | None = None
        self._recipes: AdapterRecipes | None = None

    def read(self, request: Request) -> None:
        self.prepare(request)
        with model_lock(self.model):
            self.plan_for(request.device_map)
            self.carry_out()

    def prepare(self, request: Request) -> None:
        self.model = request.model
        self._request = request
        self._recipes = self.trace(request)

    @property
    def is_traced(self) -> bool:
        """Return whether this load fills the model, now or later."""
        return self.plan is not None or self._recipes is not None

    def dtypes(self) -> Mapping[str, str]:
        return self._recipes.dtypes if self._recipes is not None else {}

    def plan_for(self, device_map: Mapping[str, Any] | None) -> PlannedLoad:
        assert self._request is not None and self._recipes is not None
        return self.make_plan(
            self.model,
            self._request.checkpoint.catalog,
            self._recipes,
            device_map=self.devices(self.model, device_map),
            offload_folder=self.options.offload_folder,
            missing_of=self._left_to_constructor(self.model),
            allows_unknown_modules=True,
        )

    def _left_to_constructor(self, model: Any) -> dict[str, str]:
        """Return buffers that diffusers also leaves to the constructor, under a patch only."""
        if self.options.refuses_unsupported or self.options.missing != "error":
            return {}
        saved = model.state_dict().keys()
        buffers = [name for name, tensor in model.named_buffers() if not tensor.is_meta]
        return {name: "initialise" for name in buffers if name in saved}

    def carry_out(self) -> None:
        assert self.plan is not None
        with self.reading() as filled:
            execute.initialise_and_install(self.plan, self.model, filled)
            _as_planned_on_disk(self.plan, self.model)
        self._request = self._recipes = None

    def dispatch(self) -> None:
        """Attach hooks for offloaded tensors; a no-op before the read."""
        if self._core is None or self.device_map is None:
            return
        devices = {str(device) for device in self.device_map.values()}
        folder = self.options.offload_folder if "disk" in devices else None
        dispatch: Any = big_modeling.dispatch_model
        dispatch(
            self.model,
            self.device_map,
            offload_dir=folder,
            offload_index=self.offload_index or None,
            skip_keys=skip_keys(self.model),
        )

    def complete(self, model: Any, report: Report) -> None:
        align_offloaded_weights(model)

    def _examine(self, request: Request, converted: Mapping[str, Any]) -> Mismatch | None:
        config = getattr(request.model, "config", None)
        if not isinstance(config, Mapping):
            return None
        state = {name: tuple(each.shape) for name, each in request.model.state_dict().items()}
        found = {
            name: _shape(value)
            for name, value in converted.items()
            if not isinstance(value, AbsentSymbol)
        }
        checkpoint = request.checkpoint
        return examine(
            type(request.model), dict(config), state, found, checkpoint, self.config_sources
        )

    def trace(self, request: Request) -> AdapterRecipes:
        weights = quantized_weights(request.model, request.checkpoint.catalog, request.converted)
        parts = parts_of(weights, request.converted)
        state = request.model.state_dict()
        converted = {name: value for name, value in request.converted.items() if name not in parts}
        supplement(converted, state)
        mismatch = self._examine(request, converted)
        fitting = None if mismatch is None else mismatch.fitting(dict(request.model.config))
        if mismatch is not None and fitting is not None:
            if self.options.infer_config:
                raise WrongConfigError(fitting)
            return AdapterRecipes(
                recipes=request.checkpoint.trace.finish(),
                already_reported=list(state),
                findings=[mismatch.finding()],
            )
        trace = request.checkpoint.trace
        numbers = DecodedTargets(request)
        known = converted | {name: request.converted[name] for name in parts}
        lacking = MissingTensors(
            request.model, known, self.options.missing, self._left_to_constructor(request.model)
        )
        keys: dict[str, str] = {}
        recipes = AdapterRecipes(recipes=None, extensions=[] if weights is None else [weights])
        for unit in weights.stored.values() if weights is not None else ():
            for name, (dtype, _) in unit.targets().items():
                trace.add(name, request.converted[name])
                recipes.dtypes[name] = dtype
        for name, value in converted.items():
            if isinstance(value, AbsentSymbol):
                continue
            if name not in state:
                recipes.unexpected.append((name, _source(value)))
                continue
            symbol = _as_wanted(request, numbers, name, value, state[name])
            if symbol.shape != state[name].shape and not is_packed(symbol):
                shapes = (symbol.shape, state[name].shape)
                recipes.findings.append(shape_mismatch(name, *shapes, [_source(symbol)]))
                recipes.already_reported.append(name)
                continue
            if is_packed(symbol):
                _make_room(request.model, name, symbol)
            trace.add(name, symbol)
            keys[name] = _source(value)
            recipes.dtypes[name] = dtype_name(symbol.dtype)
        recipes.dtypes |= {
            name: dtype_name(_dtype(request, name, state[name].dtype)) for name in lacking.names
        }
        lacking.report(recipes, request.checkpoint, keys, request.conversion)
        lacking.pair(recipes, {name: _shape(converted[name]) for name, _ in recipes.unexpected})
        if mismatch is not None:
            recipes.findings.append(mismatch.finding())
        recipes.recipes = trace.finish()
        return recipes


def skip_keys(model: Any) -> Any:
    """Return the arguments that hooks must not copy, because the model writes into them."""
    return getattr(model, "_skip_keys", None)


# A number in a tensor name may always be this large; converters count up to it.
NUMBERS_MIN = 10_000

_DIGITS_MAX = 18
_NUMBERS = re.compile(r"(?<![^._])[0-9]+(?![^._])")


class WrongConfigError(Exception):
    """A different config fits the file; the caller must rebuild the model with it."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config


def convert(
    model: Any, checkpoint: SymbolicCheckpoint, missing: MissingKeys | None = None
) -> tuple[Mapping[str, Any], SymbolicCheckpoint, Conversion | None]:
    """Return the checkpoint by the model's names, its owner, and the conversion if there was one.

    ``checkpoint`` has not been converted; its block formats are decoded.
    """
    from diffusers.loaders import single_file_model

    library: Any = single_file_model

    kind = library._get_single_file_loadable_mapping_class(type(model))
    if has_own_names(model.state_dict(), checkpoint) or kind is None:
        return checkpoint, checkpoint, None
    function = library.SINGLE_FILE_LOADABLE_CLASSES[kind]["checkpoint_mapping_fn"]
    conversion = conversion_of(model, checkpoint, function, {})
    try:
        if missing is not None:
            checkpoint = conversion.open(missing)
        made = function(checkpoint=checkpoint, **conversion.arguments)
    except (PlanError, KeyError):
        found = find_missing_keys(conversion, missing)
        if not found:
            raise
        checkpoint = conversion.open(found)
        made = function(checkpoint=checkpoint, **conversion.arguments)
    converted = {name: value for name, value in made.items() if value is not None}
    return converted, checkpoint, conversion


def has_own_names(state: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> bool:
    """Return whether a file, complete or partial, already has the model's names."""
    return checkpoint.keys() <= state.keys() or state.keys() <= checkpoint.keys()


def require_series(checkpoint: SymbolicCheckpoint) -> None:
    """Raise ``plan.conversion`` for a number beyond any series; converters count up to it."""
    limit = max(NUMBERS_MIN, len(checkpoint.catalog.tensors))
    for name in checkpoint.catalog.tensors:
        for digits in _NUMBERS.findall(name):
            if len(digits) > _DIGITS_MAX or int(digits) > limit:
                raise make(
                    "plan.conversion",
                    "the library's converter counts up to the numbers in names, which exceed the "
                    "count of tensors: the series has gaps",
                    tensor=name,
                    found=digits[:_DIGITS_MAX],
                    expected=f"at most {limit}",
                )


def conversion_of(
    model: Any, checkpoint: SymbolicCheckpoint, function: Any, arguments: Mapping[str, Any]
) -> Conversion:
    require_series(checkpoint)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {"config": dict(model.config), **arguments}
    return Conversion(checkpoint.catalog, function, given, wanted, checkpoint.decoded)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.quant_shape if is_packed(value) else value.shape)


class DecodedTargets:
    """Decoder for targets that diffusers dequantizes in a quantized model. Valid for one trace.

    Only whole tensors of the file can be decoded. If a converter splits or joins blocks, it runs
    again on decoded tensors.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._converted: Mapping[str, Any] | None = None

    def of(self, name: str, value: Any, dtype: torch.dtype) -> Any:
        conversion = self._request.conversion
        if value.source or conversion is None:
            return value.decoded("gguf_half", dtype)
        if self._converted is None:
            numbers = self._request.checkpoint.as_numbers()
            self._converted = conversion.function(checkpoint=numbers, **conversion.arguments)
        return self._converted[name].to(dtype)


def _as_wanted(
    request: Request, numbers: DecodedTargets, name: str, value: Any, target: torch.Tensor
) -> Any:
    if is_packed(value):
        excluded = getattr(request.quantizer, "modules_to_not_convert", None) or ()
        parts = name.split(".")
        if not any(each in parts for each in excluded):
            return value
        keeps_float32 = any(each in parts for each in request.keeps)
        wanted = torch.float32 if keeps_float32 else request.quantizer.compute_dtype
        return numbers.of(name, value, wanted)
    if not value.is_floating_point():
        return value if request.dtype is not None else value.to(target.dtype)
    own = target.dtype if request.dtype is None else value.dtype
    return value.to(_dtype(request, name, own))


def _dtype(request: Request, name: str, own: torch.dtype) -> torch.dtype:
    if request.dtype is None or not own.is_floating_point:
        return own
    keeps_float32 = any(each in name.split(".") for each in request.keeps)
    return torch.float32 if keeps_float32 else request.dtype


def _make_room(model: Any, name: str, symbol: Any) -> None:
    """Install a packed parameter on meta in place of the plain one."""
    from diffusers.quantizers.gguf.utils import GGUFParameter

    path, _, leaf = name.rpartition(".")
    if tuple(symbol.quant_shape) != tuple(model.get_parameter(name).shape):
        found, expected = list(symbol.quant_shape), list(model.get_parameter(name).shape)
        message = "the blocks decode to another shape"
        raise make("plan.shape", message, tensor=name, found=str(found), expected=str(expected))
    blank = torch.empty(symbol.shape, dtype=torch.uint8, device="meta")
    module = model.get_submodule(path)
    module._parameters[leaf] = GGUFParameter(  # type: ignore[no-untyped-call]
        blank, quant_type=symbol.quant_type
    )


def _as_planned_on_disk(plan: PlannedLoad, model: torch.nn.Module) -> None:
    """Give meta tensors of offloaded values the planned dtype, to which hooks cast."""
    extended = plan.extension_names()
    planned = {
        target.name: target.dtype
        for target in plan.targets
        if target.device == "disk" and target.name not in extended
    }
    for slot in walk(model) if planned else ():
        if slot.tensor.is_meta and slot.name in planned and slot.tie_of is None:
            dtype = torch_dtype(planned[slot.name])
            if hasattr(slot.tensor, "quant_type"):
                from loadstone._adapters.diffusers.packed import offloaded

                slot.replace(offloaded(slot.tensor))
            elif slot.tensor.dtype != dtype:
                slot.replace(slot.tensor.detach().to(dtype))


def _source(value: Any) -> str:
    while isinstance(value, Symbol) and not value.source and value.parents:
        value = value.parents[0]
    return value.source if isinstance(value, Symbol) else ""
