"""NVIDIA ModelOpt: models whose weights loadstone packs while it reads them.

>>> with loadstone.modelopt.init_quantized_weights(mtq.NVFP4_DEFAULT_CFG):
...     model = AutoModelForCausalLM.from_pretrained("folder")

ModelOpt's own ``low_memory_mode`` looks up the model's names in the checkpoint unchanged, so it
fails for every model of transformers 5 whose experts are one tensor. With this module ModelOpt
places its quantizers itself, and loadstone renames, fuses and packs weights while reading,
including experts. See ``docs/modelopt.md``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from loadstone._adapters.modelopt import building, hooks, loading
from loadstone._adapters.modelopt.experts import PackedExperts as PackedExperts
from loadstone._adapters.patch import Hooks
from loadstone._base.keywords import names_keywords
from loadstone._base.progress import Progress
from loadstone._base.vocabulary import MaxMemory, Missing, ModelOptMode, ReceiptDigest
from loadstone._files.catalog import open_catalog
from loadstone._plan.options import LoadOptions
from loadstone._plan.placement import DeviceMap

__all__ = ["init_quantized_weights", "load"]


@names_keywords
def init_quantized_weights(
    quant_cfg: Mapping[str, object],
    gpu_mem_percentage: float = 0.8,
    quant_gemm: bool = False,
    *,
    mode: ModelOptMode = "modelopt-compat",
    missing: Missing = "error",
    progress: Progress = False,
    threads: int | None = None,
    receipt: ReceiptDigest | None = None,
) -> AbstractContextManager[None]:
    """Run ModelOpt's context manager of this name, with loads by loadstone.

    Inside it, ``AutoModelForCausalLM.from_pretrained`` returns a quantized and compressed model,
    and accepts ``device_map``, ``max_memory`` and ``attn_implementation``.

    Args:
        quant_cfg, gpu_mem_percentage, quant_gemm: see ModelOpt's function.
        mode: ``"modelopt-compat"``: bytes and scales equal those of the resident model that
            ModelOpt compresses; ``"modelopt-export"``: those of ModelOpt's export of a resident
            model; ``"exact"``: scales in f32, one rounding, and layers that servers fuse (q/k/v,
            gate/up) share one scale.
        missing: policy for missing tensors, see :func:`loadstone.plan`.
        progress, threads, receipt: see :meth:`loadstone.Plan.execute`.

    Raises:
        PlanError: in ``from_pretrained``: a tensor is missing or does not fit; nothing was read.
        PlanError: ``plan.quantize``: the config requests an unsupported format, which the error
            names.

    Not thread-safe: ModelOpt replaces ``from_pretrained`` for the whole process.
    """
    options = LoadOptions.from_arguments(locals())
    return hooks.quantizing(options, quant_cfg, gpu_mem_percentage, quant_gemm)


@names_keywords
def load(
    model: type | torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    quant_cfg: Mapping[str, object],
    *,
    config: building.Config | None = None,
    dtype: torch.dtype | str | None = None,
    quant_gemm: bool = False,
    mode: ModelOptMode = "modelopt-compat",
    missing: Missing = "error",
    device_map: DeviceMap | str | int | torch.device | None = None,
    max_memory: MaxMemory | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = False,
    threads: int | None = None,
    receipt: ReceiptDigest | None = None,
) -> torch.nn.Module:
    """Load a model, quantized and compressed according to one of ModelOpt's configs.

    >>> model = loadstone.modelopt.load(AutoModelForCausalLM, "folder", mtq.FP8_DEFAULT_CFG)

    Args:
        model: a class of transformers (``AutoModelForCausalLM``, ``Qwen3MoeForCausalLM``), or a
            module without memory (see :func:`loadstone.skeleton`), which is changed in place.
        checkpoint: a folder, or a name in the hub.
        quant_cfg: see ``mtq.quantize``.
        config, dtype, attn_implementation, trust_remote_code: arguments to build the model, if
            ``model`` is a class.
        device_map, max_memory: see :func:`loadstone.plan`; not with ``"disk"``.
        quant_gemm, mode, missing, progress, threads, receipt: see :func:`init_quantized_weights`.

    Returns:
        The model. ``loadstone.audit(model)`` has the origin of every tensor.

    Raises:
        PlanError: a tensor is missing or does not fit; nothing was read, and the model is
            unchanged. ``plan.quantize``: the config requests an unsupported format, which the error
            names.
        OptionError: ``plan.options``: the model already has memory.
    """
    options = LoadOptions.from_arguments(locals())
    folder = loading.resolved(checkpoint)
    if isinstance(model, type):
        model = building.skeleton_of(model, folder, config, dtype, trust_remote_code)
        building.require_blank(model)
    else:  # check before quantizers are placed, so that a failed load does not change the model
        building.require_blank(model)
        loading.check(model, open_catalog(folder, allow_links=True), options)
    building.place_quantizers(model, quant_cfg, quant_gemm)
    loading.load_into(model, folder, options)
    return model.eval()


def patches() -> Hooks:
    """Return the hooks that :func:`loadstone.patch` installs for ModelOpt."""
    return hooks.hooks()
