"""The middle of ``from_pretrained``, done by loadstone: one object for each call under way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import set_param_for_module
from transformers.integrations.accelerate import get_device
from transformers.modeling_utils import _load_parameter_into_model
from transformers.utils.loading_report import LoadStateDictInfo

from loadstone import _core, _execute
from loadstone._audit import audit
from loadstone._catalog import Catalog
from loadstone._constructor import model_builder, parameter_values
from loadstone._errors import make
from loadstone._plan import Plan, make_plan
from loadstone._report import Report
from loadstone._sites.transformers import SITES
from loadstone._traced import Traced
from loadstone._transformers import cache
from loadstone._transformers.question import Derived, Question
from loadstone._turns import in_turn_with, slots_of

if TYPE_CHECKING:
    from loadstone._bitsandbytes.loading import Units


@dataclasses.dataclass(frozen=True)
class Options:
    """What loadstone's own function takes beside the library's arguments.

    Attributes:
        is_direct: loadstone was called by name: what it cannot do is refused. Else (under a patch)
            it is left to the library.
    """

    missing: str | Mapping[str, str] = "initialise"
    nested_offset: Mapping[str, float] | None = None
    quantize_experts: bool = False
    progress: bool | Callable[[int, int], object] = False
    threads: int | None = None
    is_direct: bool = False


class Load:
    """One call of ``from_pretrained``. For one thread."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.is_constructing = False
        self.fills_gaps = False  # also where the library reads: what is missing gets a value
        self.model: Any = None
        self.plan: Plan | None = None
        self._core: _core.Report | None = None
        self._is_finished = False
        self._fresh: set[str] = set()  # parameters without a value, to be initialised
        self._constructed: set[str] = set()  # of those, the ones no initialiser wrote to
        self._versions: dict[str, tuple[int, int]] = {}  # of buffers, before the initialisers
        self._rewritten: set[str] = set()  # buffers that an initialiser wrote to

    # --- reading the checkpoint ------------------------------------------------------------------

    def read(
        self, model: Any, files: list[str], config: Any
    ) -> tuple[LoadStateDictInfo, dict[str, Any] | None]:
        """Plans and loads; what ``_load_pretrained_model`` returns."""
        self.model = model
        self.fills_gaps = True
        catalog = Catalog(_core.open_checkpoint([str(file) for file in files], True))
        question = Question(
            model, config.dtype, config.dtype_plan, config.weight_mapping, config.hf_quantizer
        )
        derived = cache.derive(catalog, question)
        model._weight_conversions = [config.weight_mapping[index] for index in derived.used]
        info = _loading_info(model, derived)
        traced = as_traced(model, catalog, derived, config.ignore_mismatched_sizes, self.options)
        devices = _devices(model, config)
        if devices is not None and traced.units is not None:
            devices = traced.units.devices(devices)
        with in_turn_with(model):
            self.plan = make_plan(
                model,
                catalog,
                traced,
                device_map=devices,
                offload_folder=config.disk_offload_folder,
                missing=self.options.missing,
                initialises=True,
                allows_unknown_modules=True,
            )
            filled = _execute.fill(
                self.plan, model, progress=self.options.progress, threads=self.options.threads or 0
            )
        self._core = filled.core
        quantized = {} if traced.units is None else self._install_units(traced.units, filled, info)
        for target, value in zip(self.plan.targets, filled.values, strict=True):
            if target.kind not in ("parameter", "persistent_buffer") or target.name in quantized:
                continue
            if value is not None:
                _put(model, target.name, value, info, config.hf_quantizer)
            elif target.device == "disk" and target.origin == "checkpoint":
                info.missing_keys.discard(target.name)
        if traced.units is not None and devices is not None:
            from loadstone._bitsandbytes.installing import prepare_hooks

            traced.units.complete_folder(model, self.plan, filled.offload)
            prepare_hooks(model, traced.units.offsets)
        on_disk = config.device_map is not None and "disk" in config.device_map.values()
        if on_disk:
            _tie_on_disk(model, filled.offload)
        filled.offload.commit()
        return info, filled.offload.index() if on_disk else None

    def _install_units(
        self, units: Units, filled: _execute.Filled, info: LoadStateDictInfo
    ) -> set[str]:
        """Gives the model bitsandbytes' parameters; the names of all tensors that went into them.

        What the library sets beside them is set here too.
        """
        assert self.plan is not None
        made = units.parameters(self.model, self.plan, filled.values)
        from loadstone._bitsandbytes.installing import put

        for name, parameter in made.items():
            path, _, leaf = name.rpartition(".")
            module: Any = self.model.get_submodule(path)
            put(module, leaf, parameter)
            module._is_hf_initialized = True
            parameter._is_hf_initialized = True
            info.missing_keys.discard(name)
        return made.keys() | units.names()

    # --- what the checkpoint does not hold -------------------------------------------------------

    def give_memory(self, model: Any, missing: set[str], device_map: Any) -> None:
        """Memory for what is missing; buffers keep what the constructor put into them."""
        for name in missing - model.all_tied_weights_keys.keys():
            tensor = model.get_parameter_or_buffer(name)
            device = torch.device(get_device(device_map, name, valid_torch_device=True))
            if tensor.is_meta:
                value = torch.full_like(tensor, _sentinel(tensor.dtype), device=device)
                self._fresh.add(name)
            else:
                value = tensor.to(device)
            _load_parameter_into_model(model, name, value)
        for name, buffer in model.named_non_persistent_buffers():
            device = torch.device(get_device(device_map, name, valid_torch_device=True))
            if buffer.device != device and not buffer.is_meta:
                _load_parameter_into_model(model, name, buffer.to(device))
        self._versions = {
            name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()
        }

    def complete(self, model: Any) -> None:
        """After the library's initialisers: nothing is left without a value."""
        for name, buffer in model.named_buffers():
            if self._versions.get(name) != (id(buffer), buffer._version):
                self._rewritten.add(name)
        unwritten = [
            name
            for name in sorted(self._fresh)
            if _is_unwritten(model.get_parameter_or_buffer(name))
        ]
        if not unwritten:
            return
        build = model_builder(model)
        values = parameter_values(build, unwritten) if build is not None else {}
        for name in unwritten:
            tensor = model.get_parameter_or_buffer(name)
            value = values.get(name)
            if value is None or value.shape != tensor.shape:
                raise make(
                    "plan.no_initialiser",
                    "it is missing, the model's initialiser leaves it as it is, and a second "
                    "construction does not tell its value",
                    tensor=name,
                )
            with torch.no_grad():
                tensor.copy_(value)
            self._constructed.add(name)

    # --- proof -----------------------------------------------------------------------------------

    def finish(self, model: Any) -> Report | None:
        """Notes where every value came from, and proves that there is none without an origin.

        Returns:
            ``None`` where the library did the reading, or this was done before.
        """
        if self.plan is None or self._core is None or self._is_finished:
            return None
        self._is_finished = True
        with in_turn_with(model):
            return self._proved(model, self.plan, self._core)

    def _proved(self, model: Any, plan: Plan, core: _core.Report) -> Report:
        report = _execute.account(plan, model, core)
        known = report.provenance
        for slot in slots_of(model):
            item = known.get(slot.name)
            if item is None:
                continue
            if slot.tie_of is not None:
                known[slot.name] = dataclasses.replace(
                    item, origin="tie", tie_of=slot.tie_of, sources=(), reason=""
                )
            elif slot.name in self._constructed:
                reason = "missing, and the model's initialiser leaves it as the constructor made it"
                known[slot.name] = dataclasses.replace(item, origin="constructor", reason=reason)
            elif slot.name in self._rewritten and item.origin == "constructor":
                known[slot.name] = dataclasses.replace(item, origin="initialiser")
            elif item.origin == "tie":  # the library found both, and that they differ
                known[slot.name] = dataclasses.replace(item, origin="checkpoint", tie_of="")
        audit(model).require_real()
        return report


def as_traced(
    model: Any,
    catalog: Catalog,
    derived: Derived,
    ignores_mismatches: bool,
    options: Options | None = None,
) -> Traced:
    """What was derived, as a plan takes it."""
    findings = list(derived.findings)
    units = _units(model, catalog, derived, options or Options())
    for name, found, expected in derived.mismatched:
        findings.append(
            _core.Finding(
                "warning" if ignores_mismatches else "error",
                "plan.shape",
                name,
                [],
                f"'{name}' is {list(found)} in the checkpoint, the model wants {list(expected)}",
                "" if ignores_mismatches else "ignore_mismatched_sizes=True initialises it instead",
            )
        )
    failed = {finding.target for finding in derived.findings}
    return Traced(
        recipes=derived.recipes,
        dtypes=derived.dtypes,
        ties=_ties(model, derived.dtypes.keys(), failed),
        unexpected=reportable(model, derived.unexpected),
        findings=findings,
        units=units,
    )


def _units(model: Any, catalog: Catalog, derived: Derived, options: Options) -> Units | None:
    """Weights that bitsandbytes quantized, or that are to be quantized as it does."""
    if not derived.units and not derived.quantized and not options.quantize_experts:
        return None
    from loadstone._bitsandbytes import loading, stored

    found = stored.read(catalog, derived.units)
    quantize = loading.quantizations(model, derived.quantized, options.nested_offset)
    if options.quantize_experts:
        quantize |= loading.of_experts(model, derived.dtypes, quantize, options.nested_offset)
    units = loading.Units(catalog, found.units, quantize, found.broken)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    unfilled = [each for each in units.unfilled(model) if each.target not in tied]
    units.findings = [*found.findings, *units.misfits(model), *unfilled]
    return units


def reportable(model: Any, unexpected: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without those that the model's author, or the library, wants no word about."""
    info = _empty_info(unexpected)
    model._adjust_missing_and_unexpected_keys(info)
    return [(name, source) for name, source in unexpected if name in info.unexpected_keys]


def _ties(model: Any, loaded: Any, failed: set[str]) -> dict[str, str]:
    """Which targets the library will tie to which after the load: to the one that is there."""
    ties: dict[str, str] = {}
    pairs: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    groups: dict[str, list[str]] = {}
    for target, source in pairs.items():
        groups.setdefault(source, [source]).append(target)
    for source, members in groups.items():
        root = next((name for name in members if name in loaded), source)
        for name in members:
            if name not in loaded and name != root and name not in failed:
                ties[name] = root
    return ties


def _put(model: Any, name: str, value: torch.Tensor, info: Any, quantizer: Any) -> None:
    set_in_module: Any = set_param_for_module
    operation = () if SITES.is_since("5.16") else (None,)  # of a distributed load
    set_in_module(model, name, value, info, *operation, quantizer)


def _empty_info(unexpected: list[tuple[str, str]]) -> LoadStateDictInfo:
    return LoadStateDictInfo(
        missing_keys=set(),
        unexpected_keys={name for name, _ in unexpected},
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        **({"skipped_pp_keys": set()} if SITES.is_since("5.16") else {}),
    )


def _loading_info(model: Any, derived: Derived) -> LoadStateDictInfo:
    info = _empty_info(derived.unexpected)
    info.missing_keys |= set(model.state_dict())
    mismatched: set[Any] = info.mismatched_keys
    for name, found, expected in derived.mismatched:
        info.missing_keys.discard(name)
        mismatched.add((name, torch.Size(found), torch.Size(expected)))
    return info


def _devices(model: Any, config: Any) -> dict[str, Any] | None:
    """The device of every tensor, as the library tells it; ``None``: all on the cpu."""
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


def _tie_on_disk(model: Any, offload: _core.OffloadFolder) -> None:
    """What the library ties has its value under each name, also where the plan does not know."""
    index = offload.index()
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if source in index and target not in index:
            offload.tie(target, source)


def _sentinel(dtype: torch.dtype) -> float | int:
    """What memory holds that nobody wrote to."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unwritten(tensor: torch.Tensor) -> bool:
    """Whether any element is still what it was filled with."""
    if tensor.dtype == torch.bool:
        return True  # a sentinel cannot be told from a value: the constructor's is right anyway
    data = tensor.detach()
    if data.is_floating_point() or data.is_complex():
        data = data if data.element_size() > 1 else data.float()
        return bool(data.isnan().any())
    return bool((data == torch.iinfo(data.dtype).min).any())
