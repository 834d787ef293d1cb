"""Plan and read in ``from_pretrained`` of release 4.57, which converts no values.

Each tensor of the checkpoint becomes one tensor of the model, with the name and dtype that
functions of the library return. The library's own ``_load_pretrained_model`` finds missing,
unexpected and mismatched names, initialises and warns.
:meth:`TransformersV4Session.read` replaces its reading.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, modeling_utils

from loadstone._adapters import quantized
from loadstone._adapters.patch import Hooks
from loadstone._adapters.transformers import stripped_config
from loadstone._adapters.transformers.conversion import PLAIN_FLOATS
from loadstone._adapters.transformers.from_pretrained_session import (
    FromPretrainedSession,
    HookedFunction,
    hooks_in_calls,
    mismatch,
    reason_against,
    unsupported,
)
from loadstone._base.dtypes import dtype_name
from loadstone._base.warn import warn, warn_of_findings
from loadstone._files.catalog import Catalog, open_catalog
from loadstone._model.model_lock import model_lock
from loadstone._model.targets import SAVED
from loadstone._model.tensor_swap import preserve_identity
from loadstone._model.walk import TensorSlot, walk
from loadstone._plan.recipes import LibraryRecipes
from loadstone._skeleton.skeleton import skeleton
from loadstone.tracing import Trace

MAKES_DTENSORS = False

# Maps names of the model's tensors to names in the checkpoint, or the reverse.
_Names = dict[str, str]


class TransformersV4Session(FromPretrainedSession):
    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.names: _Names = {}  # the model's names, by name in the checkpoint

    def give_memory(self, model: Any, missing: list[str], dtype: torch.dtype | None) -> None:
        state = model.state_dict()
        for name in missing:
            if state[name].is_meta:
                value = self.unwritten(name, state[name], device="cpu", dtype=dtype)
                put = modeling_utils._load_parameter_into_model
                preserve_identity(model, name, functools.partial(put, model, name, value))
        self.note_buffers(model)

    def read(
        self,
        model: Any,
        files: list[str],
        arguments: dict[str, Any],
        unexpected: list[str],
        mismatched: set[str],
    ) -> Any:
        """Read the files, and return the index of the offload folder.

        ``arguments`` are the arguments of ``_load_pretrained_model``, by name.
        """
        catalog = open_catalog(files, allow_links=True)
        warn_of_findings(catalog.findings)
        if quantized.is_decodable(catalog):
            _require_own_names(catalog)
            stripped_config.strip(model.config)
        keys = {name: key for key, name in self.names.items()}
        own_values = _tied_with_own_values(model, keys)
        for slot in own_values:  # as the library's load does before it ties them again
            slot.replace(torch.empty_like(slot.tensor))
        fp32_names = arguments.get("keep_in_fp32_regex")
        recipes = as_recipes(model, catalog, _sources(model, keys), fp32_names, mismatched)
        if self.options.loras is not None and self.options.loras.keeps_ties:
            recipes.ties = {slot.name: slot.tie_of or "" for slot in own_values}
        recipes.unexpected = [(name, keys.get(name, name)) for name in unexpected]
        device_map, folder = arguments.get("device_map"), arguments.get("disk_offload_folder")
        with model_lock(model):
            devices = self.devices(model, device_map)
            self.make_plan(model, catalog, recipes, device_map=devices, offload_folder=folder)
            self.read_and_install()
        return self.offload_index if "disk" in (device_map or {}).values() else None


Session = TransformersV4Session


def as_recipes(
    model: Any,
    catalog: Catalog,
    sources: _Names,
    keep_in_fp32: Any,
    mismatched: set[str],
    requested: torch.dtype | None = None,
) -> LibraryRecipes:
    """Map one tensor of the checkpoint to each tensor of the model, as the library does.

    ``sources`` maps the model's names to the checkpoint's. The caller asked to ignore the
    ``mismatched`` shapes. ``requested`` overrides the dtypes of the construction.
    """
    dtype_of: Any = modeling_utils._infer_parameter_dtype  # type: ignore[attr-defined]
    trace = Trace(catalog)
    recipes = LibraryRecipes(None)
    state = model.state_dict()
    decoded = {row[0] for row in catalog._core.quantized()}
    for name, source in sources.items():
        symbol: torch.Tensor
        final = None
        if requested is not None and state[name].dtype in PLAIN_FLOATS:
            is_kept = keep_in_fp32 is not None and keep_in_fp32.search(name)
            final = torch.float32 if is_kept else requested
        if source in decoded:
            symbol = trace.decoded(source, final or state[name].dtype)
        else:
            symbol = trace.source(source)
        shape, expected = tuple(symbol.shape), tuple(state[name].shape)
        if shape != expected:
            recipes.findings.append(mismatch(name, shape, expected, name in mismatched))
            continue
        dtype = final or dtype_of(model, name, symbol, keep_in_fp32)[1]
        if dtype is not None and symbol.dtype != dtype:
            symbol = trace.cast(symbol, dtype, state[name].dtype)
        trace.add(name, symbol)
        recipes.dtypes[name] = dtype_name(symbol.dtype)
    recipes.recipes = trace.finish()
    return recipes


def _require_own_names(catalog: Catalog) -> None:
    """Reject codes with other names, because the library looks only for ``X.weight`` in files."""
    for name, _, _, components in catalog._core.quantized():
        if components.get("data", name) != name:
            raise unsupported(f"{components['data']} (codes, with transformers before 5.0)")


def _tied_with_own_values(model: Any, keys: _Names) -> list[TensorSlot]:
    """Return the tied tensors for which the checkpoint has two values."""
    return [slot for slot in walk(model) if slot.tie_of in keys and slot.name in keys]


def _sources(model: Any, keys: _Names) -> _Names:
    """Map the model's tensors to the checkpoint's; tied names use the first name that it has."""
    sources: _Names = {}
    for slot in walk(model):
        if slot.is_registered and slot.kind in SAVED and slot.name in keys:
            sources.setdefault(slot.tie_of or slot.name, keys[slot.name])
    return sources


def trace(
    model: Any,
    catalog: Catalog,
    requested: torch.dtype | None,
    key_mapping: Mapping[str, str] | None,
) -> LibraryRecipes:
    """See :func:`loadstone.transformers.trace`."""
    keys, prefix = list(catalog.encodings()), model.base_model_prefix
    has_prefix = bool(prefix) and any(key.startswith(prefix) for key in keys)
    has_base_model = bool(prefix) and hasattr(model, prefix)
    names: _Names = model._get_key_renaming_mapping(
        keys, key_mapping, has_prefix and not has_base_model, has_base_model and not has_prefix
    )
    sources = _sources(model, {name: key for key, name in names.items()})
    fp32_names = _fp32_names(model, requested)
    recipes = as_recipes(model, catalog, sources, fp32_names, set(), requested)
    state = model.state_dict()
    recipes.unexpected = [(names.get(key, key), key) for key in keys if names.get(key) not in state]
    return recipes


def _fp32_names(model: Any, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    names: list[str] = []
    if dtype == torch.float16:
        names += model._keep_in_fp32_modules or ()
    if dtype in (torch.float16, torch.bfloat16):
        names += model._keep_in_fp32_modules_strict or ()
    return re.compile("|".join(rf"(?:^|\.){name}(?:$|\.)" for name in names)) if names else None


# --- the functions of the library ----------------------------------------------------------------


def hooks() -> Hooks:
    functions: list[HookedFunction] = [
        (modeling_utils, "init_empty_weights", _init_empty_weights),
        (modeling_utils, "_load_state_dict_into_meta_model", _load_state_dict),
        (PreTrainedModel, "_load_pretrained_model", _load_pretrained_model),
        (PreTrainedModel, "_get_key_renaming_mapping", _get_key_renaming_mapping),
        (PreTrainedModel, "_move_missing_keys_from_meta_to_cpu", _move_missing_keys),
        (PreTrainedModel, "_load_from_tf", _load_from_another),
        (PreTrainedModel, "_load_from_flax", _load_from_another),
        (modeling_utils, "load_shard_files_with_threadpool", _load_shards),
    ]
    return Hooks(hooks_in_calls(functions), "transformers")


@contextlib.contextmanager
def _init_empty_weights(
    session: TransformersV4Session, original: Any, *args: Any, **kwargs: Any
) -> Iterator[None]:
    with skeleton(), session.constructing():
        yield


def _load_pretrained_model(
    session: TransformersV4Session,
    original: Any,
    cls: Any,
    model: Any,
    state_dict: Any,
    checkpoint_files: list[str] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if session.model is not None:
        return original(cls, model, state_dict, checkpoint_files, *args, **kwargs)
    reason = reason_against(model, state_dict, checkpoint_files, kwargs.get("device_mesh"))
    names = map(str, checkpoint_files or ())
    other_file = next((name for name in names if not name.endswith(".safetensors")), None)
    if reason is None and other_file is not None:
        reason = f"files that are not safetensors ({other_file}; of transformers before 5.0)"
    if reason is None and kwargs.get("hf_quantizer") is not None:
        reason = "quantization_config (of transformers before 5.0)"
    if reason is not None and session.options.refuses_unsupported:
        raise unsupported(reason)
    session.initialises_missing = kwargs.get("hf_quantizer") is None
    if not session.initialises_missing:
        warn(f"{reason}: the library loads it on its own", UserWarning, stacklevel=2)
    session.model = model if reason is None else None
    result = original(cls, model, state_dict, checkpoint_files, *args, **kwargs)
    if session.model is None or checkpoint_files is None:
        return result
    *before, unexpected, mismatched, _, errors = result
    index = session.read(model, checkpoint_files, kwargs, unexpected, set(mismatched))
    return *before, unexpected, mismatched, index, errors


def _get_key_renaming_mapping(
    session: TransformersV4Session, original: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    names = original(model, *args, **kwargs)
    if session.model is model and not session.names:
        session.names = dict(names)
    return names


def _move_missing_keys(
    session: TransformersV4Session, original: Any, model: Any, missing: Any, dtype: Any, *args: Any
) -> Any:
    if not session.initialises_missing:
        return original(model, missing, dtype, *args)
    return session.give_memory(model, missing, dtype)


def _load_state_dict(
    session: TransformersV4Session, original: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    # Do not read the session's model here. The result is the index of the offload folder.
    return None if session.model is model else original(model, *args, **kwargs)


def _load_shards(session: TransformersV4Session, original: Any, shards: Any) -> Any:
    """Read in this thread, because the library's threads do not inherit the context variable."""
    load_shard: Any = modeling_utils.load_shard_file  # type: ignore[attr-defined]
    results = [load_shard(shard) for shard in shards]
    return [], *results[-1][1:]


def _load_from_another(
    session: TransformersV4Session, original: Any, *args: Any, **kwargs: Any
) -> Any:
    if session.options.refuses_unsupported:
        raise unsupported("from_tf or from_flax")
    return original(*args, **kwargs)
