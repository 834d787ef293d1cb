"""Which ModelOpt this was written for, and what is looked at before it is relied upon."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from loadstone._errors import make

TESTED = "0.47"

_PLUGIN = {
    "init_quantized_weights": ("quant_cfg", "gpu_mem_percentage", "quant_gemm"),
    "init_empty_weights": (),
    "infer_auto_device_map": ("model", "max_memory"),
    "load_checkpoint_and_dispatch": ("model", "checkpoint", "device_map"),
}
_QUANTIZER = (
    "is_enabled",
    "fake_quant",
    "num_bits",
    "axis",
    "block_sizes",
    "pre_quant_scale",
    "rotate_is_enabled",
    "is_mx_format",
    "is_nvfp4_dynamic",
    "dequantize",
)
_EXPERTS = ("_first_proj_attr", "_get_expert_idx_from_first_proj", "iter_weights_for_calibration")


@functools.cache
def require_known() -> None:
    """Raises an error that names what is not as it was in the ModelOpt tested.

    Raises:
        Error: ``plan.options``; the library's own functions are the way to load then.
    """
    import modelopt
    from modelopt.torch.quantization.nn import TensorQuantizer
    from modelopt.torch.quantization.plugins import accelerate, huggingface
    from modelopt.torch.quantization.qtensor import base_qtensor

    missing = []
    for path, wanted in _PLUGIN.items():
        function: Any = getattr(accelerate, path, None)
        known = inspect.signature(function).parameters if callable(function) else None
        if known is None:
            missing.append(path)
        else:
            missing += [f"{path}({name})" for name in wanted if name not in known]
    experts = getattr(huggingface, "_QuantFusedExperts", None)
    for owner, names in ((TensorQuantizer, _QUANTIZER), (experts, _EXPERTS)):
        missing += [name for name in names if not hasattr(owner, name)]
    if not hasattr(base_qtensor, "QTensorWrapper"):
        missing.append("QTensorWrapper")
    if missing:
        raise make(
            "plan.options",
            "this ModelOpt is not one that loadstone knows how to enter: it lacks "
            + ", ".join(missing),
            field="modelopt",
            found=modelopt.__version__,
            expected=f"{TESTED}, or one with the same functions",
        )
