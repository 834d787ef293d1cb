"""Hooks on diffusers' pipelines.

Folders: a hook replaces diffusers' device map, and each class loads its component. Combined files:
loadstone defers the reads until diffusers has built all components and all plans are valid.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from loadstone._adapters.diffusers.call import OPTIONS, loading
from loadstone._adapters.diffusers.checkpoint import SymbolicCheckpoint, is_readable
from loadstone._adapters.diffusers.components import Placement, accelerate_hooks, models_of
from loadstone._adapters.diffusers.expected_keys import RetryError
from loadstone._adapters.diffusers.load import DiffusersSession
from loadstone._adapters.diffusers.missing_keys import Conversion, MissingKeys
from loadstone._adapters.patch import Hook, set_variable, wrap_if_active
from loadstone._adapters.sites import is_known
from loadstone._adapters.sites.diffusers import SITES
from loadstone._base.dtypes import torch_dtype
from loadstone._base.errors import PlanError
from loadstone._base.torch_modes import ordinary_tensors
from loadstone._execute.audit import last_report
from loadstone._plan.placement import expanded

_placing: ContextVar[Placement | None] = ContextVar("loadstone_diffusers_placing", default=None)
# Stop after the conversion of the state dict, without building a model?
CONVERTING: ContextVar[bool] = ContextVar("loadstone_diffusers_converting", default=False)
# The components with deferred reads; None: read immediately.
DEFERRED: ContextVar[Deferred | None] = ContextVar("loadstone_diffusers_deferred", default=None)

_MODULE = "diffusers.pipelines.pipeline_utils"


@dataclasses.dataclass
class Deferred:
    """The components of one file, traced but not read; ``name`` is the next one to load."""

    name: str = ""
    loads: dict[str, DiffusersSession] = dataclasses.field(default_factory=dict)


def late_hooks() -> tuple[Hook, ...]:
    """Return the hooks only if pipelines are already imported, because the import is slow."""
    is_there = hasattr(sys.modules.get(_MODULE), "DiffusionPipeline")
    return _hooks() if is_there and is_known("diffusers") else ()


@functools.cache
def _hooks() -> tuple[Hook, ...]:
    from diffusers.loaders import single_file
    from diffusers.pipelines import pipeline_loading_utils, pipeline_utils

    places: list[tuple[Any, str, Any]] = [
        (pipeline_utils.DiffusionPipeline, "from_pretrained", _from_pretrained),
        (pipeline_utils, "_get_final_device_map", _final_device_map),
        (pipeline_utils, "load_sub_model", _load_component),
        (pipeline_loading_utils, "remove_hook_from_module", _unless_placing),
        (pipeline_loading_utils, "dispatch_model", _unless_placing),
        (single_file.FromSingleFileMixin, "from_single_file", _from_single_file),
        (single_file, "create_diffusers_clip_model_from_ldm", _text_encoder),
        (single_file, "create_diffusers_t5_model_from_checkpoint", _text_encoder),
        (single_file, "load_single_file_sub_model", _load_sub_model),
    ]
    return tuple(
        Hook(owner, name, wrap_if_active("diffusers", each)) for owner, name, each in places
    )


# --- folders -------------------------------------------------------------------------------------


def _from_pretrained(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_ours(kwargs.get("device_map")):
        return original(cls, *args, **kwargs)
    memory, folder = kwargs.pop("max_memory", None), kwargs.pop("offload_folder", None)
    placing = Placement(kwargs["device_map"], memory, folder)
    kwargs["device_map"] = "balanced"  # a placeholder; _final_device_map returns the real one
    with ordinary_tensors(), set_variable(_placing, placing):
        pipe = original(cls, *args, **kwargs)
        placing.add_missing_hooks(pipe)
    return pipe


# --- single files --------------------------------------------------------------------------------


def _from_single_file(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    source = args[0] if args else kwargs.get("pretrained_model_link_or_path")
    if not is_readable([str(source)]):
        return original(cls, *args, **kwargs)
    chosen = OPTIONS.get()
    memory = kwargs.pop("max_memory", None) or chosen.max_memory
    folder = kwargs.pop("offload_folder", None) or chosen.offload_folder
    device_map = kwargs.pop("device_map", None)
    placing = Placement(device_map, memory, folder) if device_map is not None else None
    with ordinary_tensors():
        with set_variable(DEFERRED, Deferred()) as components:
            pipe = original(cls, *args, **kwargs)
        _finish(pipe, components, placing, kwargs)
    return pipe


def _text_encoder(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Load a transformers component from the pipeline's file."""
    source = kwargs.pop("checkpoint", None)
    build = functools.partial(original, cls, *args, **kwargs)
    if not isinstance(source, SymbolicCheckpoint):
        return build(checkpoint=source)
    try:
        return _load_encoder(build, source, MissingKeys())
    except RetryError as retry:
        return _load_encoder(build, source, retry.missing_keys)


def _load_encoder(
    build: Callable[..., Any], source: SymbolicCheckpoint, missing: MissingKeys
) -> Any:
    def convert(checkpoint: Any) -> Mapping[str, Any]:
        """Convert only; diffusers has no function for that, so an exception stops its load."""
        with set_variable(CONVERTING, True):
            try:
                build(checkpoint=checkpoint)
            except ConvertedError as done:
                return done.state
        return {}

    def conversion(model: Any) -> Conversion:
        wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        return Conversion(source.catalog, convert, {}, wanted, source.decoded)

    with loading() as load:
        load.missing_keys, load.conversion_of = missing, conversion
        model = build(checkpoint=source.decoded(missing)).eval()  # diffusers omits eval() for T5
        load.finish(model)
    return model


class ConvertedError(Exception):
    """Stops a load after the conversion of its file."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__()
        self.state = {name: value for name, value in state.items() if value is not None}


def _load_sub_model(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Give each component of a combined file all of its tensors."""
    checkpoint, components = kwargs.get("checkpoint"), DEFERRED.get()
    if components is not None:
        components.name = kwargs["name"]
    if isinstance(checkpoint, SymbolicCheckpoint):
        kwargs["checkpoint"] = checkpoint.fresh()
    return original(*args, **kwargs)


def _is_ours(device_map: Any) -> bool:
    """Return whether loadstone computes the map, because diffusers cannot or has only a CPU."""
    from diffusers.pipelines import pipeline_utils
    from diffusers.utils import torch_utils

    if device_map is None:
        return False
    is_known = isinstance(device_map, str) and device_map in pipeline_utils.SUPPORTED_DEVICE_MAP
    get_device: Any = torch_utils.get_device
    return not is_known or (device_map == "balanced" and get_device() == "cpu")


def _final_device_map(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Place all components as soon as diffusers knows their classes."""
    placing = _placing.get()
    if placing is None:
        return original(*args, **kwargs)
    passed = kwargs["passed_class_obj"]
    others = {name: "it is not loaded: it was given" for name in passed}
    classes: dict[str, tuple[str, str]] = {}
    for name, (library, class_name) in kwargs["init_dict"].items():
        if name in passed:
            continue
        cls = _class_of(name, library, class_name, kwargs["cached_folder"])
        if isinstance(cls, type) and issubclass(cls, torch.nn.Module):
            classes[name] = (library, class_name)
        else:
            others[name] = "it is not a model"
    empty = {
        name: _empty(name, library, class_name, kwargs)
        for name, (library, class_name) in classes.items()
        if placing.needs_sizes(name)
    }
    placing.resolve(list(classes), others, empty, _kept_in_float32(empty))
    return placing.reported


def _kept_in_float32(models: Mapping[str, Any]) -> dict[str, torch.dtype]:
    return {
        f"{component}.{name}": torch.float32
        for component, model in models.items()
        for name, parameter in model.named_parameters()
        if set(name.split(".")) & set(getattr(model, "_keep_in_fp32_modules", None) or ())
        and parameter.is_floating_point()
    }


def _class_of(name: str, library: str, class_name: str, folder: Any) -> Any:
    from diffusers import pipelines
    from diffusers.pipelines import pipeline_loading_utils

    found: Any = pipeline_loading_utils.get_class_obj_and_candidates(
        library,
        class_name,
        pipeline_loading_utils.ALL_IMPORTABLE_CLASSES,
        pipelines,
        hasattr(pipelines, library),
        component_name=name,
        cache_dir=folder,
    )
    return found[0]


def _empty(name: str, library: str, class_name: str, known: Mapping[str, Any]) -> Any:
    """Build diffusers' own model on meta, in its final dtype."""
    from diffusers import pipelines
    from diffusers.pipelines import pipeline_loading_utils

    keyword = "dtype" if SITES.is_since("0.40") else "torch_dtype"
    dtype = known[keyword]
    if isinstance(dtype, dict):
        dtype = dtype.get(name, dtype.get("default", torch.float32))
    handed_on = ("force_download", "proxies", "local_files_only", "token", "revision")
    make_empty: Any = pipeline_loading_utils._load_empty_model
    return make_empty(
        library_name=library,
        class_name=class_name,
        importable_classes=pipeline_loading_utils.ALL_IMPORTABLE_CLASSES,
        pipelines=pipelines,
        is_pipeline_module=hasattr(pipelines, library),
        pipeline_class=known["pipeline_class"],
        name=name,
        cached_folder=known["cached_folder"],
        **{keyword: dtype},
        **{each: known.get(each) for each in handed_on},
    )


def _load_component(original: Any, *args: Any, **kwargs: Any) -> Any:
    placing = _placing.get()
    if placing is None:
        model = original(*args, **kwargs)
        if isinstance(kwargs.get("device_map"), dict):
            _note_moved(model)
        return model
    name = kwargs["name"]
    kwargs["device_map"] = placing.components.get(name)
    kwargs["max_memory"], kwargs["offload_folder"] = None, placing.folder_of(name)
    return original(*args, **kwargs)


def _note_moved(model: Any) -> None:
    """Update the report: diffusers moved the component after its load."""
    report = last_report(model) if isinstance(model, torch.nn.Module) else None
    if report is not None:
        accelerate_hooks().note_moved(model, report)


def _unless_placing(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Skip the move of a component that its own loader placed."""
    return None if _placing.get() is not None else original(*args, **kwargs)


# --- deferred reads ------------------------------------------------------------------------------


def _finish(
    pipe: Any, components: Deferred, placing: Placement | None, kwargs: Mapping[str, Any]
) -> None:
    """Plan all components of a file before reading any."""
    loads = components.loads
    if placing is not None:
        models = {name: each for name, each in models_of(pipe).items() if name not in kwargs}
        others = {name: "it is not a loaded model" for name in pipe.components}
        dtypes = {path: dtype for name in loads for path, dtype in _dtypes(name, loads[name])}
        placing.resolve(list(models), others, models, dtypes)
    failures: dict[str, PlanError] = {}
    for name, load in loads.items():
        places = placing.components.get(name) if placing is not None else None
        if placing is not None:
            load.options = dataclasses.replace(load.options, offload_folder=placing.folder_of(name))
        if places is not None:
            load.device_map = expanded(load.model, places)
        try:
            load.plan_for(load.device_map).require_ok()
        except PlanError as failure:
            failures[name] = failure
    if failures:
        raise _joined(failures)
    for load in loads.values():
        load.carry_out()
        load.dispatch()
        load.finish(load.model)
    if placing is not None:
        placing.place_others(pipe, loads)
        placing.add_missing_hooks(pipe)
        pipe.hf_device_map = placing.reported


def _dtypes(name: str, load: DiffusersSession) -> Iterator[tuple[str, torch.dtype]]:
    for target, dtype in load.dtypes().items():
        yield f"{name}.{target}", torch_dtype(dtype)


def _joined(failures: Mapping[str, PlanError]) -> PlanError:
    if len(failures) == 1:
        return next(iter(failures.values()))
    first = next(iter(failures.values()))
    texts = [f"{name}: {failure}" for name, failure in failures.items()]
    joined = PlanError("\n".join(texts), first.code, first.message, tensor=first.tensor)
    joined.findings = [finding for failure in failures.values() for finding in failure.findings]
    return joined
