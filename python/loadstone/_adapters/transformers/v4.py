"""Plans and reads in ``from_pretrained`` of release 4.57, which converts no values.

Each tensor of the checkpoint becomes one tensor of the model, with the name and dtype that
functions of the library return. The library's own ``_load_pretrained_model`` finds missing,
unexpected and mismatched names, initialises and warns. :meth:`V4Call.read` replaces its reading.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, modeling_utils

from loadstone._adapters.patch import Hooks
from loadstone._adapters.transformers import quantized, stripped_config
from loadstone._adapters.transformers.call import (
    Place,
    constructing_in,
    hooks_of_loads,
    reason_against,
    refused,
)
from loadstone._adapters.transformers.conversion import PLAIN_FLOATS
from loadstone._adapters.transformers.from_pretrained_call import FromPretrainedCall, mismatch
from loadstone._base.dtypes import dtype_argument, dtype_name, torch_dtype
from loadstone._base.terminal import warn
from loadstone._base.warn import warn_of_findings
from loadstone._execute import execute
from loadstone._files.catalog import Catalog, inspect
from loadstone._model.model_lock import model_lock
from loadstone._model.targets import SAVED
from loadstone._model.tensor_swap import preserve_identity
from loadstone._model.walk import walk
from loadstone._plan.recipes import AdapterRecipes
from loadstone._skeleton.skeleton import skeleton
from loadstone.tracing import Trace

MAKES_DTENSORS = False

_Names = dict[str, str]


class V4Call(FromPretrainedCall):
    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.names: _Names = {}  # the library's names by those in the checkpoint

    def give_memory(self, model: Any, missing: list[str], dtype: torch.dtype | None) -> None:
        state = model.state_dict()
        for name in missing:
            if state[name].is_meta:
                value = self.unwritten(name, state[name], device="cpu", dtype=dtype)
                put = modeling_utils._load_parameter_into_model
                preserve_identity(model, name, functools.partial(put, model, name, value))
        self.note_buffers(model)

    def read(self, model: Any, files: list[str], given: dict[str, Any], result: Any) -> Any:
        """Return the index of the offload folder."""
        catalog = inspect(files, allow_links=True)
        warn_of_findings(catalog.findings)
        if quantized.is_decodable(catalog):
            _require_own_names(catalog)
            stripped_config.take_off(model.config)
        _, _, unexpected, mismatched, _, _ = result
        keeps = self.options.adapters is not None and self.options.adapters.keeps_ties
        ties = _both_held(model, self.names) if keeps else {}
        sources = source_of_each(model, self.names, unties=True)
        kept = given.get("keep_in_fp32_regex")
        recipes = as_recipes(model, catalog, sources, kept, set(mismatched))
        recipes.ties = ties
        known = {name: key for key, name in self.names.items()}
        recipes.unexpected = [(name, known.get(name, name)) for name in unexpected]
        device_map = given.get("device_map")
        devices, folder = self.devices(model, device_map), given.get("disk_offload_folder")
        with model_lock(model):
            arguments = {"device_map": devices, "offload_folder": folder}
            plan = self.make_plan(model, catalog, recipes, **arguments)
            with self.reading() as filled:
                execute.install(plan, model, filled)
        return self.offload_index if "disk" in (device_map or {}).values() else None


def as_recipes(
    model: Any,
    catalog: Catalog,
    sources: _Names,
    keep_in_fp32: Any,
    mismatched: set[str],
    asked: torch.dtype | None = None,
) -> AdapterRecipes:
    """Map one tensor of the checkpoint to each of the model's, as the library reads it.

    ``sources`` maps the model's names to the checkpoint's. The caller asked to ignore the
    ``mismatched`` shapes. ``asked`` overrides the dtypes of the construction.
    """
    dtype_of: Any = modeling_utils._infer_parameter_dtype  # type: ignore[attr-defined]
    trace = Trace(catalog)
    recipes = AdapterRecipes(None)
    state = model.state_dict()
    decoded = {row[0] for row in catalog._core.quantized()}
    for name, source in sources.items():
        symbol: torch.Tensor
        final = None
        if asked is not None and state[name].dtype in PLAIN_FLOATS:
            is_kept = keep_in_fp32 is not None and keep_in_fp32.search(name)
            final = torch.float32 if is_kept else asked
        if source in decoded:
            symbol = trace.decoded(source, final or state[name].dtype)
        else:
            symbol = trace.source(source)
        found, expected = tuple(symbol.shape), tuple(state[name].shape)
        if found != expected:
            recipes.findings.append(mismatch(name, found, expected, name in mismatched))
            continue
        dtype = final or dtype_of(model, name, symbol, keep_in_fp32)[1]
        if dtype is not None and symbol.dtype != dtype:
            symbol = trace.cast(symbol, dtype, state[name].dtype)
        trace.add(name, symbol)
        recipes.dtypes[name] = dtype_name(symbol.dtype)
    recipes.recipes = trace.finish()
    return recipes


def _require_own_names(catalog: Catalog) -> None:
    """Reject codes with other names: the library looks only for ``X.weight`` in the files."""
    for name, _, _, components in catalog._core.quantized():
        if components.get("data", name) != name:
            raise refused(f"{components['data']} (codes, with transformers before 5.0)")


def _both_held(model: Any, names: _Names) -> dict[str, str]:
    """Return tied names that have their own sources, with the root of each."""
    known = set(names.values())
    return {
        slot.name: slot.tie_of
        for slot in walk(model)
        if slot.tie_of in known and slot.name in known and slot.tie_of is not None
    }


def source_of_each(model: Any, names: _Names, unties: bool = False) -> _Names:
    """Map the model's names to the checkpoint's; tied tensors use the first.

    ``names`` maps the other way; the last of duplicates counts. With ``unties``, untie a tied
    tensor that has its own source, as the library's load does before it ties again.
    """
    known = {name: source for source, name in names.items()}
    if unties:
        for slot in walk(model):
            if slot.tie_of in known and slot.name in known:
                slot.replace(torch.empty_like(slot.tensor))
    found: _Names = {}
    for slot in walk(model):
        if slot.is_registered and slot.kind in SAVED and slot.name in known:
            found.setdefault(slot.tie_of or slot.name, known[slot.name])
    return found


def trace(
    model: Any,
    catalog: Catalog,
    dtype: torch.dtype | str | None,
    key_mapping: Mapping[str, str] | None,
) -> AdapterRecipes:
    """See :func:`loadstone.transformers.trace`."""
    keys, prefix = list(catalog.encodings()), model.base_model_prefix
    has = bool(prefix) and any(key.startswith(prefix) for key in keys)
    expects = bool(prefix) and hasattr(model, prefix)
    names = model._get_key_renaming_mapping(
        keys, key_mapping, has and not expects, expects and not has
    )
    sources = source_of_each(model, names)
    asked = None if dtype in (None, "auto") else torch_dtype(dtype_argument(dtype))
    recipes = as_recipes(model, catalog, sources, _kept_in_fp32(model, asked), set(), asked)
    state = model.state_dict()
    recipes.unexpected = [(names.get(key, key), key) for key in keys if names.get(key) not in state]
    return recipes


def _kept_in_fp32(model: Any, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    names: list[str] = []
    if dtype == torch.float16:
        names += model._keep_in_fp32_modules or ()
    if dtype in (torch.float16, torch.bfloat16):
        names += model._keep_in_fp32_modules_strict or ()
    return re.compile("|".join(rf"(?:^|\.){name}(?:$|\.)" for name in names)) if names else None


# --- the functions of the library ----------------------------------------------------------------


def hooks() -> Hooks:
    places: list[Place] = [
        (modeling_utils, "init_empty_weights", _init_empty_weights),
        (modeling_utils, "_load_state_dict_into_meta_model", _load_state_dict),
        (PreTrainedModel, "_load_pretrained_model", _load_pretrained_model),
        (PreTrainedModel, "_get_key_renaming_mapping", _get_key_renaming_mapping),
        (PreTrainedModel, "_move_missing_keys_from_meta_to_cpu", _move_missing_keys),
        (PreTrainedModel, "_load_from_tf", _load_from_another),
        (PreTrainedModel, "_load_from_flax", _load_from_another),
        (modeling_utils, "load_shard_files_with_threadpool", _in_this_thread),
    ]
    return Hooks(hooks_of_loads(places), "transformers")


@contextlib.contextmanager
def _init_empty_weights(load: V4Call, original: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    with skeleton(), constructing_in(load):
        yield


def _load_pretrained_model(
    load: V4Call,
    original: Any,
    cls: Any,
    model: Any,
    state_dict: Any,
    checkpoint_files: list[str] | None,
    *args: Any,
    **given: Any,
) -> Any:
    if load.model is not None:
        return original(cls, model, state_dict, checkpoint_files, *args, **given)
    reason = reason_against(model, state_dict, checkpoint_files, given.get("device_mesh"))
    names = map(str, checkpoint_files or ())
    other = next((name for name in names if not name.endswith(".safetensors")), None)
    if reason is None and other is not None:
        reason = f"files that are not safetensors ({other}; of transformers before 5.0)"
    if reason is None and given.get("hf_quantizer") is not None:
        reason = "quantization_config (of transformers before 5.0)"
    if reason is not None and load.options.refuses_unsupported:
        raise refused(reason)
    load.initialises_missing = given.get("hf_quantizer") is None
    if not load.initialises_missing:
        warn(f"{reason}: the library loads it by itself", UserWarning, stacklevel=2)
    load.model = model if reason is None else None
    result = original(cls, model, state_dict, checkpoint_files, *args, **given)
    if load.model is None or checkpoint_files is None:
        return result
    *before, _, errors = result
    return *before, load.read(model, checkpoint_files, given, result), errors


def _get_key_renaming_mapping(
    load: V4Call, original: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    names = original(model, *args, **kwargs)
    if load.model is model and not load.names:
        load.names = dict(names)
    return names


def _move_missing_keys(
    load: V4Call, original: Any, model: Any, missing: Any, dtype: Any, *args: Any
) -> Any:
    if not load.initialises_missing:
        return original(model, missing, dtype, *args)
    return load.give_memory(model, missing, dtype)


def _load_state_dict(load: V4Call, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    # The library expects the index of the offload folder.
    return None if load.model is model else original(model, *args, **kwargs)


def _in_this_thread(load: V4Call, original: Any, shards: Any) -> Any:
    """Read in this thread: the library's threads do not inherit the context variable."""
    load_one: Any = modeling_utils.load_shard_file  # type: ignore[attr-defined]
    results = [load_one(each) for each in shards]
    return [], *results[-1][1:]


def _load_from_another(load: V4Call, original: Any, *args: Any, **kwargs: Any) -> Any:
    if load.options.refuses_unsupported:
        raise refused("from_tf or from_flax")
    return original(*args, **kwargs)
