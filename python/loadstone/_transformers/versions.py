"""Which transformers this was written for, and what is looked at before it is relied upon."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from loadstone._errors import make

TESTED = "5.23"

# Function and the parameters that are passed to it, or taken from it.
_RELIED_UPON = {
    "PreTrainedModel.from_pretrained": ("pretrained_model_name_or_path", "config"),
    "PreTrainedModel.get_init_context": ("dtype", "is_quantized"),
    "PreTrainedModel._load_pretrained_model": (
        "model",
        "state_dict",
        "checkpoint_files",
        "load_config",
    ),
    "PreTrainedModel._move_missing_keys_from_meta_to_device": (
        "missing_keys",
        "device_map",
        "hf_quantizer",
    ),
    "PreTrainedModel._initialize_missing_keys": ("is_quantized",),
    "PreTrainedModel.init_weights": (),
}
_CONVERSION = {
    "rename_source_key": ("source_key", "weight_renamings", "weight_converters"),
    "dot_natural_key": (),
    "build_glob_alternation": (),
    "set_param_for_module": ("model", "target_name", "param_value", "loading_info"),
}
_QUANTIZERS = {
    f"Bnb4BitHfQuantizer.{name}": parameters
    for name, parameters in {
        "validate_environment": ("kwargs",),
        "adjust_max_memory": ("max_memory",),
        "param_element_size": ("model", "param_name", "param"),
        "param_needs_quantization": ("model", "param_name"),
        "get_quantize_ops": (),
    }.items()
}


@functools.cache
def require_known() -> None:
    """Raises an error that names what is not as it was in the transformers tested.

    Raises:
        Error: ``plan.options``; the library's own function is the way to load then.
    """
    import transformers
    from transformers import core_model_loading, modeling_utils
    from transformers.quantizers import quantizer_bnb_4bit

    missing = []
    for table, owner in (
        (_RELIED_UPON, modeling_utils),
        (_CONVERSION, core_model_loading),
        (_QUANTIZERS, quantizer_bnb_4bit),
    ):
        for path, wanted in table.items():
            function: Any = owner
            for name in path.split("."):
                function = getattr(function, name, None)
            known = inspect.signature(function).parameters if callable(function) else None
            missing += (
                [path]
                if known is None
                else [f"{path}({name})" for name in wanted if name not in known]
            )
    if missing:
        raise make(
            "plan.options",
            "this transformers is not one that loadstone knows how to enter: it lacks "
            + ", ".join(missing),
            field="transformers",
            found=transformers.__version__,
            expected=f"{TESTED}, or one with the same functions",
        )
