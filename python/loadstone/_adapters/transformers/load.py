"""Load a checkpoint into a model of transformers with the library's conversion."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from transformers.integrations.accelerate import get_device
from transformers.modeling_utils import _load_parameter_into_model

from loadstone import _core
from loadstone._adapters import quantized
from loadstone._adapters.transformers import cache, releases
from loadstone._adapters.transformers.conversion import ConversionInput, ConversionResult
from loadstone._adapters.transformers.from_pretrained_session import (
    DEFAULTS,
    FromPretrainedSession,
    mismatch,
)
from loadstone._base.adapters import quantized_layers_of
from loadstone._base.errors import listed, new_error
from loadstone._base.names import parent_name
from loadstone._base.warn import warn, warn_of_findings
from loadstone._execute import execute
from loadstone._execute.execute import FilledValues
from loadstone._execute.offload import add_tensor
from loadstone._files.catalog import Catalog, open_catalog
from loadstone._files.lora import MergedLoras
from loadstone._model.model_lock import model_lock, slots_of
from loadstone._model.ranks import shard_of
from loadstone._model.targets import SAVED
from loadstone._model.tensor_swap import preserve_identity
from loadstone._plan.extensions import TargetExtension
from loadstone._plan.options import LoadOptions
from loadstone._plan.placement import keep_tied_in_memory
from loadstone._plan.planned_load import PlannedLoad
from loadstone._plan.recipes import LibraryRecipes


class TransformersV5Session(FromPretrainedSession):
    def __init__(self, options: LoadOptions) -> None:
        super().__init__(options)
        self._config: Any = None  # the library's LoadStateDictConfig
        self._info: Any = None  # its LoadStateDictInfo
        self._copied: list[str] = []  # tied names in memory that hooks look up on disk

    @property
    def _is_on_disk(self) -> bool:
        device_map = self._config.device_map
        return device_map is not None and "disk" in device_map.values()

    def read(self, model: Any, files: list[str], config: Any) -> Any:
        self.initialises_missing = True
        catalog = open_catalog(files, allow_links=True)
        warn_of_findings(catalog.findings)
        self.stripped_config.check(catalog)
        keeps = releases.dtype_plan(model, config.dtype)
        mapping, quantizer = config.weight_mapping, config.hf_quantizer
        conversion = ConversionInput(model, config.dtype, keeps, mapping, quantizer)
        result = cache.derive(catalog, conversion)
        _warn_once_of(result.decoded, _DECODED)
        model._weight_conversions = [mapping[index] for index in result.used]
        self._config, self._info = config, _loading_info(model, result)
        recipes = as_recipes(model, catalog, result, config.ignore_mismatched_sizes, self.options)
        with model_lock(model):
            devices = self.devices(model, config.device_map, config.offload_buffers)
            self._copied = _tied_in_memory(model, devices, config) if devices is not None else []
            folder = config.disk_offload_folder
            self.make_plan(model, catalog, recipes, device_map=devices, offload_folder=folder)
            self.read_and_install()
        _warn_once_of(result.recut, _RECUT)
        return releases.loading_info(self._info, self.offload_index if self._is_on_disk else None)

    def install_tensors(self, plan: PlannedLoad, model: Any, filled: FilledValues) -> None:
        """Install the loaded values, marked as initialised; the library makes all other values."""
        extended = plan.extension_names()
        saved = [
            (target, value is not None)
            for target, value in zip(plan.targets, filled.values, strict=True)
            if target.kind in SAVED and target.name not in extended
        ]
        read = {target.name for target, is_read in saved if is_read}
        execute.install_tensors(plan, model, filled, read)
        for name in read:
            tensor = model.get_parameter_or_buffer(name)
            tensor._is_hf_initialized = True
            if isinstance(tensor, torch.nn.Parameter) and shard_of(tensor) is None:
                tensor.requires_grad_(tensor.is_floating_point())
        on_disk = {
            target.name
            for target, _ in saved
            if target.device == "disk" and target.origin == "checkpoint"
        }
        self._info.missing_keys.difference_update(read, on_disk)

    def install(self, filled: FilledValues) -> None:
        super().install(filled)
        assert self.plan is not None
        extended = self.plan.extension_names()
        for name, parameter in self.model.named_parameters() if extended else ():
            if name in extended:
                self.model.get_submodule(parent_name(name))._is_hf_initialized = True
                parameter._is_hf_initialized = True
                self._info.missing_keys.discard(name)
        if self._is_on_disk:
            self._complete_folder(filled.offload)

    def _complete_folder(self, folder: _core.OffloadFolder) -> None:
        """Add tied tensors, also those in memory, under the names that hooks look up."""
        index = folder.index()
        pairs = _tied_names(self.model)
        for target, source in pairs:
            if source in index and target not in index:
                folder.tie(target, source)
        for name in self._copied:
            tensors = map(self.model.get_parameter_or_buffer, (name, self._ties.get(name, name)))
            value = next((tensor for tensor in tensors if not tensor.is_meta), None)
            if value is not None:
                add_tensor(folder, name, value)
        self.offloaded = {name for pair in pairs for name in pair} & folder.index().keys()

    def give_memory(self, model: Any, missing: set[str], device_map: Any) -> None:
        """Allocate missing parameters; buffers keep the constructor's values."""
        for name in missing - model.all_tied_weights_keys.keys():
            tensor = model.get_parameter_or_buffer(name)
            device = torch.device(get_device(device_map, name, valid_torch_device=True))
            if tensor.is_meta:
                value = self.unwritten(name, tensor, device=device)
            else:
                value = tensor.to(device)
            put = functools.partial(_load_parameter_into_model, model, name, value)
            preserve_identity(model, name, put)
        for name, buffer in model.named_non_persistent_buffers():
            device = torch.device(get_device(device_map, name, valid_torch_device=True))
            if buffer.device != device and not buffer.is_meta:
                _load_parameter_into_model(model, name, buffer.to(device))
        self.note_buffers(model)


def as_recipes(
    model: Any,
    catalog: Catalog,
    result: ConversionResult,
    ignores_mismatches: bool,
    options: LoadOptions = DEFAULTS,
) -> LibraryRecipes:
    findings = list(result.findings)
    if result.unneeded:
        findings.append(quantized.unneeded_finding(result.unneeded))
    for name, found, expected in result.mismatched:
        findings.append(mismatch(name, found, expected, ignores_mismatches))
    reportable = releases.reportable(model, {name for name, _ in result.unexpected})
    failed = {finding.target for finding in result.findings} | {*result.explained}
    return LibraryRecipes(
        recipes=result.recipes,
        dtypes=result.dtypes,
        ties=_ties(model, result.dtypes.keys(), failed, options.loras),
        unexpected=[(name, key) for name, key in result.unexpected if name in reportable],
        already_reported=sorted(failed),
        findings=findings,
        extensions=_quantized_weights(model, catalog, result, options),
    )


def _quantized_weights(
    model: Any, catalog: Catalog, result: ConversionResult, options: LoadOptions
) -> list[TargetExtension]:
    """Return extensions for weights that are stored quantized or that the load quantizes."""
    if not result.stored_weights and not result.quantized and not options.quantize_experts:
        return []
    libraries = quantized_layers_of(model)
    if options.quantize_experts and not libraries:
        message = "experts are quantized as the linear layers are, which have no 4-bit encoding"
        raise new_error("plan.options", message, field="quantize_experts", found="not at all")
    return [
        layers.traced_weights(
            model,
            catalog,
            result.stored_weights,
            result.quantized,
            nested_offset=options.nested_offset,
            experts=result.dtypes if options.quantize_experts else None,
            tied=dict(_tied_names(model)),
        )
        for layers in libraries
    ]


def _ties(model: Any, loaded: Any, failed: set[str], loras: MergedLoras | None) -> dict[str, str]:
    """Map each name that the library ties after the load to the tensor that was loaded.

    A name that was loaded is not tied, unless adapters keep all ties.
    """
    keeps = loras is not None and loras.keeps_ties
    ties: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    for target, source in _tied_names(model):
        groups.setdefault(source, [source]).append(target)
    for source, members in groups.items():
        root = next((name for name in members if name in loaded), source)
        for name in members:
            if (keeps or name not in loaded) and name != root and name not in failed:
                ties[name] = root
    return ties


def untied(model: Any, loaded: Mapping[str, str]) -> dict[str, str]:
    """Return tied names with separate values in the load: the library ties only equal values.

    Paths of one module are left out, because they cannot have two values.
    """
    slots = slots_of(model)
    places = {slot.name: slot.slot_key for slot in slots}
    return {
        slot.name: slot.tie_of
        for slot in slots
        if slot.tie_of is not None and slot.tie_of in loaded and slot.name in loaded
        if slot.slot_key != places[slot.tie_of]
    }


_DECODED = (
    "the checkpoint stores it quantized, but the model's module cannot store codes: loadstone "
    "dequantizes it"
)
_RECUT = (
    "the last blocks of this weight are incomplete. loadstone decodes the weight with the config's "
    "weight_block_size; transformers derives a different block size from the number of scales, so "
    "it computes wrong values or rejects the checkpoint"
)


def _warn_once_of(names: list[str], text: str) -> None:
    if names:
        warn(f"{listed(sorted(set(names)), 1)}: {text}", UserWarning, stacklevel=2)


def _loading_info(model: Any, result: ConversionResult) -> Any:
    info = releases.empty_info(name for name, _ in result.unexpected)
    info.missing_keys |= set(model.state_dict())
    mismatched: set[Any] = info.mismatched_keys
    tied = dict(_tied_names(model))
    for name, found, expected in result.mismatched:
        # The library compares the values of tied names, but mismatched tensors have no values. It
        # ties missing names to the loaded or initialised tensor without a comparison.
        if name not in tied:
            info.missing_keys.discard(name)
        mismatched.add((name, torch.Size(found), torch.Size(expected)))
    return info


def _tied_in_memory(model: Any, devices: dict[str, Any], config: Any) -> list[str]:
    """Keep all names of a tie in memory if one of its modules is, so that the library ties them.

    Changes ``devices``, and returns the names among them whose module is on disk.
    """
    pairs = _tied_names(model)
    keep_tied_in_memory(devices, [*pairs, *((source, target) for target, source in pairs)])
    copied = sorted(
        name
        for name in {name for pair in pairs for name in pair}
        if get_device(config.device_map, name) == "disk" and devices.get(name, "disk") != "disk"
    )
    if copied and config.disk_offload_folder is None:
        message = "an offload folder is required, because a module on disk is tied to one in memory"
        raise new_error("plan.offload_folder", message, tensor=copied[0], field="offload_folder")
    return copied


def _tied_names(model: Any) -> list[tuple[str, str]]:
    return list((getattr(model, "all_tied_weights_keys", None) or {}).items())
