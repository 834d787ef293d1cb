"""Hooks on diffusers' pipelines.

For folders, a hook replaces diffusers' device map, and each component's class loads the component.
For combined files, loadstone defers the reads until diffusers has built all components and all
plans are valid.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch

from loadstone._adapters.diffusers import local_configs
from loadstone._adapters.diffusers.arguments import convert_dtypes
from loadstone._adapters.diffusers.checkpoint import SymbolicCheckpoint, is_readable, shapes_of
from loadstone._adapters.diffusers.conversion import Conversion
from loadstone._adapters.diffusers.load import OPTIONS, DiffusersSession, loading
from loadstone._adapters.diffusers.pipeline_device_map import (
    PipelineDeviceMap,
    accelerate_hooks,
)
from loadstone._adapters.diffusers.recipes import is_inside
from loadstone._adapters.patch import Hook, set_variable, wrap_if_active
from loadstone._adapters.saving import save_offloaded_values
from loadstone._adapters.sites import is_supported_or_warn
from loadstone._adapters.sites.diffusers import SITES
from loadstone._base.dtypes import torch_dtype
from loadstone._base.errors import PlanError, new_error
from loadstone._base.torch_modes import ordinary_tensors
from loadstone._execute.audit import last_report
from loadstone._files.hub import resolve_hub_id
from loadstone._model.modules import parts_of
from loadstone._plan.placement import expanded

# The device map of the pipeline that is being loaded from a folder.
_device_map: ContextVar[PipelineDeviceMap | None] = ContextVar(
    "loadstone_diffusers_device_map", default=None
)
# Receives the converted tensors of a text encoder. A hook ends its load after the conversion.
CONVERTED: ContextVar[dict[str, Any] | None] = ContextVar(
    "loadstone_diffusers_converted", default=None
)
# Sessions of a file's traced components, whose reads are deferred, by name; "" if not named yet.
# ``None`` means that components are read immediately.
DEFERRED: ContextVar[dict[str, DiffusersSession] | None] = ContextVar(
    "loadstone_diffusers_deferred", default=None
)

_MODULE = "diffusers.pipelines.pipeline_utils"


def late_hooks() -> tuple[Hook, ...]:
    """Return the hooks only if pipelines are already imported, because the import is slow."""
    is_there = hasattr(sys.modules.get(_MODULE), "DiffusionPipeline")
    return _hooks() if is_there and is_supported_or_warn("diffusers") else ()


@functools.cache
def _hooks() -> tuple[Hook, ...]:
    from diffusers.loaders import single_file
    from diffusers.pipelines import pipeline_loading_utils, pipeline_utils

    replacements: list[tuple[Any, str, Any]] = [
        (pipeline_utils.DiffusionPipeline, "from_pretrained", _from_pretrained),
        (pipeline_utils, "_get_final_device_map", _get_final_device_map),
        (pipeline_utils, "load_sub_model", _load_sub_model),
        (pipeline_loading_utils, "remove_hook_from_module", _skip_move),
        (pipeline_loading_utils, "dispatch_model", _skip_move),
        (single_file.FromSingleFileMixin, "from_single_file", _from_single_file),
        (single_file, "create_diffusers_clip_model_from_ldm", _text_encoder),
        (single_file, "create_diffusers_t5_model_from_checkpoint", _text_encoder),
        (single_file, "_download_diffusers_model_config_from_hub", _download_configs),
        (single_file, "load_single_file_sub_model", _load_single_file_sub_model),
    ]
    return tuple(
        Hook(owner, name, wrap_if_active("diffusers", replacement))
        for owner, name, replacement in replacements
    )


# --- folders -------------------------------------------------------------------------------------


def _from_pretrained(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    convert_dtypes(kwargs, OPTIONS.get().refuses_unsupported)
    _require_map(kwargs.get("device_map"), kwargs.get("max_memory"))
    if not _is_computed_here(kwargs.get("device_map")):
        return original(cls, *args, **kwargs)
    memory, folder = kwargs.pop("max_memory", None), kwargs.pop("offload_folder", None)
    device_map = PipelineDeviceMap(kwargs["device_map"], memory, folder)
    kwargs["device_map"] = "balanced"  # a placeholder; _get_final_device_map returns the real one
    # The map of the pipeline already accounts for the limits.
    options = dataclasses.replace(OPTIONS.get(), max_memory=None)
    with (
        ordinary_tensors(),
        set_variable(_device_map, device_map),
        set_variable(OPTIONS, options),
    ):
        pipe = original(cls, *args, **kwargs)
        device_map.add_missing_hooks(pipe)
    return pipe


def _require_map(device_map: Any, max_memory: Any) -> None:
    """Reject limits without a map, because each component would be compared with them alone."""
    if max_memory is not None and device_map is None:
        message = "max_memory limits the device map of a pipeline: pass device_map too"
        expected = 'for example device_map="auto"'
        raise new_error("plan.options", message, field="max_memory", expected=expected)


def _is_computed_here(device_map: Any) -> bool:
    """Return whether loadstone computes the map, because diffusers cannot or finds no GPU."""
    from diffusers.pipelines import pipeline_utils
    from diffusers.utils import torch_utils

    if device_map is None:
        return False
    is_known = isinstance(device_map, str) and device_map in pipeline_utils.SUPPORTED_DEVICE_MAP
    get_device: Any = torch_utils.get_device
    return not is_known or (device_map == "balanced" and get_device() == "cpu")


def _get_final_device_map(original: Any, **kwargs: Any) -> Any:
    """Place all components as soon as diffusers knows their classes."""
    device_map = _device_map.get()
    if device_map is None:
        return original(**kwargs)
    passed = kwargs["passed_class_obj"]
    others = {name: "it was passed in, so it is not loaded" for name in passed}
    names = []
    for name, (library, class_name) in kwargs["init_dict"].items():
        if name in passed:
            continue
        cls = _class_of(name, library, class_name, kwargs["cached_folder"])
        if isinstance(cls, type) and issubclass(cls, torch.nn.Module):
            names.append(name)
        else:
            others[name] = "it is not a model"
    empty = {name: _empty_model(name, **kwargs) for name in names if device_map.needs_sizes(name)}
    dtypes = {
        f"{component}.{name}": torch.float32
        for component, model in empty.items()
        for name, parameter in model.named_parameters()
        if is_inside(name, getattr(model, "_keep_in_fp32_modules", None) or ())
        and parameter.is_floating_point()
    }
    device_map.resolve(names, others, empty, dtypes)
    return device_map.reported


def _class_of(name: str, library: str, class_name: str, folder: Any) -> Any:
    from diffusers import pipelines
    from diffusers.pipelines import pipeline_loading_utils

    cls: Any = pipeline_loading_utils.get_class_obj_and_candidates(
        library,
        class_name,
        pipeline_loading_utils.ALL_IMPORTABLE_CLASSES,
        pipelines,
        hasattr(pipelines, library),
        component_name=name,
        cache_dir=folder,
    )[0]
    return cls


def _empty_model(name: str, *, init_dict: Any, **kwargs: Any) -> Any:
    """Build diffusers' own model on meta, in its final dtype."""
    from diffusers import pipelines
    from diffusers.pipelines import pipeline_loading_utils

    keyword = "dtype" if SITES.is_since("0.40") else "torch_dtype"
    if isinstance(kwargs[keyword], dict):
        kwargs[keyword] = kwargs[keyword].get(name, kwargs[keyword].get("default", torch.float32))
    library, class_name = init_dict[name]
    load_empty_model: Any = pipeline_loading_utils._load_empty_model
    return load_empty_model(
        library_name=library,
        class_name=class_name,
        importable_classes=pipeline_loading_utils.ALL_IMPORTABLE_CLASSES,
        pipelines=pipelines,
        is_pipeline_module=hasattr(pipelines, library),
        name=name,
        **kwargs,
    )


def _load_sub_model(original: Any, *args: Any, **kwargs: Any) -> Any:
    device_map = _device_map.get()
    if device_map is not None:
        name = kwargs["name"]
        kwargs["device_map"] = device_map.components.get(name)
        kwargs["max_memory"], kwargs["offload_folder"] = None, device_map.folder_of(name)
    model = original(*args, **kwargs)
    if not isinstance(model, torch.nn.Module):
        return model
    save_offloaded_values(model)
    is_placed_later = device_map is None and isinstance(kwargs.get("device_map"), dict)
    report = last_report(model) if is_placed_later else None
    if report is not None:
        accelerate_hooks().note_moved(model, report)
    return model


def _skip_move(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Skip the move of a component that its own loader placed."""
    return original(*args, **kwargs) if _device_map.get() is None else None


# --- single files --------------------------------------------------------------------------------


def _from_single_file(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    source = args[0] if args else kwargs.get("pretrained_model_link_or_path")
    convert_dtypes(kwargs, OPTIONS.get().refuses_unsupported)
    if not is_readable([str(source)]):
        return original(cls, *args, **kwargs)
    options = OPTIONS.get()
    memory = kwargs.pop("max_memory", None) or options.max_memory
    folder = kwargs.pop("offload_folder", None) or options.offload_folder
    device_map = kwargs.pop("device_map", None)
    _require_map(device_map, memory)
    if device_map is not None:
        device_map = PipelineDeviceMap(device_map, memory, folder)
    with ordinary_tensors():
        options = dataclasses.replace(options, max_memory=None)
        with set_variable(OPTIONS, options), set_variable(DEFERRED, {}) as sessions:
            pipe = original(cls, *args, **kwargs)
        _read_components(pipe, sessions, device_map, kwargs)
    return pipe


def _download_configs(original: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    if not kwargs.get("local_files_only") and resolve_hub_id(name) == name:
        local_configs.warn_of_request(name)
    return original(name, *args, **kwargs)


def _load_single_file_sub_model(original: Any, *args: Any, **kwargs: Any) -> Any:
    component, sessions = original(*args, **kwargs), DEFERRED.get()
    if sessions is not None and "" in sessions:
        sessions[kwargs["name"]] = sessions.pop("")
    return component


def _text_encoder(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Load a transformers component from the pipeline's file."""
    source = kwargs.pop("checkpoint", None)
    build = functools.partial(original, cls, *args, **kwargs)
    if not isinstance(source, SymbolicCheckpoint):
        return build(checkpoint=source)

    def convert(checkpoint: Any) -> Mapping[str, Any]:
        """Convert without loading, by a hook that ends diffusers' load after the conversion."""
        with set_variable(CONVERTED, {}) as converted:
            build(checkpoint=checkpoint)
        return converted  # type: ignore[no-any-return]

    with loading() as session:
        session.encoder_conversion = lambda model: Conversion(
            source, convert, {}, shapes_of(model.state_dict())
        )
        model = build(checkpoint=source.fresh())
        session.report_and_audit(model.eval())  # diffusers omits eval() for T5
    return model


def _read_components(
    pipe: Any,
    sessions: Mapping[str, DiffusersSession],
    device_map: PipelineDeviceMap | None,
    passed: Mapping[str, Any],
) -> None:
    """Plan all components of a file before reading any."""
    if device_map is not None:
        models = {name: model for name, model in parts_of(pipe).items() if name not in passed}
        others = {name: "it is not a loaded model" for name in pipe.components}
        dtypes = {
            f"{name}.{target}": torch_dtype(dtype)
            for name, session in sessions.items()
            if session.recipes is not None
            for target, dtype in session.recipes.dtypes.items()
        }
        device_map.resolve(list(models), others, models, dtypes)
        for name, session in sessions.items():
            session.options = dataclasses.replace(
                session.options, offload_folder=device_map.folder_of(name)
            )
            if name in device_map.components:
                session.device_map = expanded(session.model, device_map.components[name])
    failures: dict[str, PlanError] = {}
    for name, session in sessions.items():
        try:
            session.plan_for(session.device_map).require_ok()
        except PlanError as failure:
            failures[name] = failure
    if failures:
        raise _joined(failures)
    for session in sessions.values():
        session.read_and_install()
        session.dispatch()
        session.report_and_audit(session.model)
    if device_map is not None:
        device_map.dispatch_others(pipe, sessions)
        device_map.add_missing_hooks(pipe)
        pipe.hf_device_map = device_map.reported


def _joined(failures: Mapping[str, PlanError]) -> PlanError:
    first = next(iter(failures.values()))
    if len(failures) == 1:
        return first
    text = "\n".join(f"{name}: {failure}" for name, failure in failures.items())
    joined = PlanError(text, first.code, first.message, tensor=first.tensor)
    joined.findings = [finding for failure in failures.values() for finding in failure.findings]
    return joined
