"""The planning and reading in ``from_pretrained``; one object for each call."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.accelerate import get_device
from transformers.modeling_utils import _load_parameter_into_model

from loadstone import _core
from loadstone._adapters.accelerate.offload import add
from loadstone._adapters.transformers import cache, quantized, releases
from loadstone._adapters.transformers.conversion import ConversionInput, ConversionResult
from loadstone._adapters.transformers.from_pretrained_call import (
    DEFAULTS,
    FromPretrainedCall,
    TransformersOptions,
    mismatch,
)
from loadstone._base.errors import listed, make
from loadstone._base.terminal import warn
from loadstone._base.warn import warn_of_findings
from loadstone._execute import execute
from loadstone._files.catalog import Catalog, inspect
from loadstone._files.weighted import Adapters
from loadstone._model.contents import keep_object
from loadstone._model.model_lock import slots_of
from loadstone._model.targets import SAVED
from loadstone._plan.placement import keep_tied_in_memory
from loadstone._plan.recipes import AdapterRecipes

if TYPE_CHECKING:
    from loadstone._adapters.bitsandbytes.loading import QuantizedWeights


class Load(FromPretrainedCall):
    """One call of ``from_pretrained``. For one thread."""

    def read(self, model: Any, files: list[str], config: Any) -> Any:
        """Plans and loads; returns the result of ``_load_pretrained_model``."""
        self.model = model
        self.fills_gaps = True
        catalog = inspect(files, allow_links=True)
        warn_of_findings(catalog.findings)
        self.claim.check(catalog)
        keeps = releases.dtype_plan(model, config.dtype)
        question = ConversionInput(
            model, config.dtype, keeps, config.weight_mapping, config.hf_quantizer
        )
        derived = cache.derive(catalog, question)
        _warn_of_decoded(derived.decoded)
        model._weight_conversions = [config.weight_mapping[index] for index in derived.used]
        info = _loading_info(model, derived)
        traced = as_traced(model, catalog, derived, config.ignore_mismatched_sizes, self.options)
        devices = _devices(model, config)
        if devices is not None and traced.units is not None:
            devices = traced.units.devices(devices)
        copied = _tied_in_memory(model, devices, config) if devices is not None else []
        filled = self.plan_and_read(model, catalog, traced, devices, config.disk_offload_folder)
        assert self.plan is not None
        installed = {} if traced.units is None else self._install_units(traced.units, filled, info)
        for target, value in zip(self.plan.targets, filled.values, strict=True):
            if target.kind not in SAVED or target.name in installed:
                continue
            if value is not None:
                releases.put(model, target.name, value, info, config.hf_quantizer)
            elif target.device == "disk" and target.origin == "checkpoint":
                info.missing_keys.discard(target.name)
        if traced.units is not None and devices is not None:
            from loadstone._adapters.bitsandbytes.installing import moves_weights, prepare_hooks

            traced.units.complete_folder(model, self.plan, filled.offload)
            if moves_weights(config.device_map):
                prepare_hooks(model, traced.units.offsets)
        on_disk = config.device_map is not None and "disk" in config.device_map.values()
        if on_disk:
            _tie_on_disk(model, filled.offload)
            for name in copied:
                _offload_copy(model, filled.offload, name, traced.ties)
            tied = {name for pair in _tied_names(model) for name in pair}
            self.offloaded = tied & filled.offload.index().keys()
        filled.offload.commit()
        _warn_of_recut(derived.recut)
        return releases.answer(info, filled.offload.index() if on_disk else None)

    def _install_units(
        self, units: QuantizedWeights, filled: execute.Filled, info: Any
    ) -> set[str]:
        """Gives the model bitsandbytes' parameters, marked as initialised.

        Returns:
            The names of all targets that went into them.
        """
        assert self.plan is not None
        made = units.parameters(self.model, self.plan, filled.values)
        from loadstone._adapters.bitsandbytes.installing import put

        for name, parameter in made.items():
            path, _, leaf = name.rpartition(".")
            module: Any = self.model.get_submodule(path)
            put(module, leaf, parameter)
            module._is_hf_initialized = True
            parameter._is_hf_initialized = True
            info.missing_keys.discard(name)
        return made.keys() | units.names()

    def give_memory(self, model: Any, missing: set[str], device_map: Any) -> None:
        """Allocates missing parameters; buffers keep the constructor's values."""
        for name in missing - model.all_tied_weights_keys.keys():
            tensor = model.get_parameter_or_buffer(name)
            device = torch.device(get_device(device_map, name, valid_torch_device=True))
            if tensor.is_meta:
                value = self.unwritten(name, tensor, device=device)
            else:
                value = tensor.to(device)
            put = functools.partial(_load_parameter_into_model, model, name, value)
            keep_object(model, name, put)
        for name, buffer in model.named_non_persistent_buffers():
            device = torch.device(get_device(device_map, name, valid_torch_device=True))
            if buffer.device != device and not buffer.is_meta:
                _load_parameter_into_model(model, name, buffer.to(device))
        self.note_buffers(model)


def as_traced(
    model: Any,
    catalog: Catalog,
    derived: ConversionResult,
    ignores_mismatches: bool,
    options: TransformersOptions = DEFAULTS,
) -> AdapterRecipes:
    """The derived recipes, with their findings, as :class:`AdapterRecipes`."""
    findings = list(derived.findings)
    if derived.unneeded:
        findings.append(quantized.unneeded_finding(derived.unneeded))
    units = _units(model, catalog, derived, options)
    for name, found, expected in derived.mismatched:
        findings.append(mismatch(name, found, expected, ignores_mismatches))
    failed = {finding.target for finding in derived.findings} | {*derived.explained}
    return AdapterRecipes(
        recipes=derived.recipes,
        dtypes=derived.dtypes,
        ties=_ties(model, derived.dtypes.keys(), failed, options.adapters),
        unexpected=reportable(model, derived.unexpected),
        reported_missing=sorted(failed),
        findings=findings,
        units=units,
    )


def _units(
    model: Any, catalog: Catalog, derived: ConversionResult, options: TransformersOptions
) -> QuantizedWeights | None:
    """Weights that bitsandbytes quantized, or that are to be quantized as it does."""
    if not derived.units and not derived.quantized and not options.quantize_experts:
        return None
    from loadstone._adapters.bitsandbytes import loading, stored

    found = stored.read(catalog, derived.units)
    quantize = loading.quantizations(model, derived.quantized, options.nested_offset)
    if options.quantize_experts:
        quantize |= loading.of_experts(model, derived.dtypes, quantize, options.nested_offset)
    units = loading.QuantizedWeights(catalog, found.units, quantize, found.broken)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    unfilled = [each for each in units.unfilled(model) if each.target not in tied]
    units.findings = [*found.findings, *units.misfits(model), *unfilled]
    return units


def reportable(model: Any, unexpected: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Unexpected names without those that the model or the library tells to ignore."""
    left = releases.reportable(model, {name for name, _ in unexpected})
    return [(name, source) for name, source in unexpected if name in left]


def _ties(model: Any, loaded: Any, failed: set[str], adapters: Adapters | None) -> dict[str, str]:
    """Ties that the library will make after the load, to the tensor that was loaded.

    Names that are loaded too are untied, unless adapters keep all ties.
    """
    keeps = adapters is not None and adapters.keeps_ties
    ties: dict[str, str] = {}
    pairs: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    groups: dict[str, list[str]] = {}
    for target, source in pairs.items():
        groups.setdefault(source, [source]).append(target)
    for source, members in groups.items():
        root = next((name for name in members if name in loaded), source)
        for name in members:
            if (keeps or name not in loaded) and name != root and name not in failed:
                ties[name] = root
    return ties


def untied(model: Any, loaded: Mapping[str, str]) -> dict[str, str]:
    """Names that the model ties, if both are loaded: the library ties equal values only.

    Two paths of one module cannot hold two values.
    """
    slots = slots_of(model)
    places = {slot.name: slot.place for slot in slots}
    return {
        slot.name: slot.tie_of
        for slot in slots
        if slot.tie_of is not None and slot.tie_of in loaded and slot.name in loaded
        if slot.place != places[slot.tie_of]
    }


def _warn_of_decoded(targets: list[str]) -> None:
    _warn_once_of(
        targets,
        "the checkpoint holds it quantized, and the model's module has no place for codes: "
        "dequantized",
    )


def _warn_of_recut(sources: list[str]) -> None:
    _warn_once_of(
        sources,
        "its last blocks are cut. It is decoded by the config's weight_block_size; transformers "
        "itself derives other blocks from the number of scales, so that its values are wrong or "
        "it refuses the checkpoint",
    )


def _warn_once_of(names: list[str], text: str) -> None:
    """One warning that names the first tensor and counts the others."""
    if names:
        warn(f"{listed(sorted(set(names)), 1)}: {text}", UserWarning, stacklevel=3)


def _loading_info(model: Any, derived: ConversionResult) -> Any:
    info = releases.empty_info(name for name, _ in derived.unexpected)
    info.missing_keys |= set(model.state_dict())
    mismatched: set[Any] = info.mismatched_keys
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, found, expected in derived.mismatched:
        # The library compares values of ties that are not missing, and these have none. Missing,
        # they are tied to what was loaded or initialised.
        if name not in tied:
            info.missing_keys.discard(name)
        mismatched.add((name, torch.Size(found), torch.Size(expected)))
    return info


def _devices(model: Any, config: Any) -> dict[str, Any] | None:
    """The device of every tensor, by the library's function; ``None``: all on the cpu."""
    if not config.device_map or set(map(str, config.device_map.values())) == {"cpu"}:
        return None
    buffers = {name for name, _ in model.named_buffers()}
    devices: dict[str, Any] = {"": "cpu"}
    for name in [*model.state_dict(), *buffers]:
        device = get_device(config.device_map, name)
        if device == "disk" and name in buffers and not config.offload_buffers:
            device = "cpu"
        devices[name] = device
    return devices


def _tied_in_memory(model: Any, devices: dict[str, Any], config: Any) -> list[str]:
    """Keeps all names of a tie in memory if one of the modules is, for the library to tie them.

    Args:
        devices: changed, by name.

    Returns:
        The names of modules on disk among them.
    """
    pairs = _tied_names(model)
    keep_tied_in_memory(devices, [*pairs, *((source, target) for target, source in pairs)])
    copied = sorted(
        name
        for name in {name for pair in pairs for name in pair}
        if get_device(config.device_map, name) == "disk" and devices.get(name, "disk") != "disk"
    )
    if copied and config.disk_offload_folder is None:
        message = "a module on disk is tied to one in memory, and its copy there has no folder"
        raise make("plan.offload_folder", message, tensor=copied[0], field="offload_folder")
    return copied


def _tied_names(model: Any) -> list[tuple[str, str]]:
    """Each tied name with the one that the library ties it to."""
    return list((getattr(model, "all_tied_weights_keys", None) or {}).items())


def _offload_copy(
    model: Any, folder: _core.OffloadFolder, name: str, ties: Mapping[str, str]
) -> None:
    """Adds the value of a tensor in memory to the folder, where the module's hook reads it."""
    tensors = map(model.get_parameter_or_buffer, (name, ties.get(name, name)))
    value = next((tensor for tensor in tensors if not tensor.is_meta), None)
    if value is not None:
        add(folder, name, value)


def _tie_on_disk(model: Any, offload: _core.OffloadFolder) -> None:
    """Adds the names of tied tensors to the offload index, for ties that the plan lacks."""
    index = offload.index()
    for target, source in _tied_names(model):
        if source in index and target not in index:
            offload.tie(target, source)
