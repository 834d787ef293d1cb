"""transformers: its own ``from_pretrained``, planned and read by loadstone.

>>> from transformers import AutoModelForCausalLM
>>> model = loadstone.transformers.from_pretrained(AutoModelForCausalLM, "folder", dtype="auto")

loadstone traces recipes from the library's conversion registry. While it reads, it fuses experts,
and splits, renames and transposes tensors like the library.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from loadstone._adapters.patch import Hooks, hooked, set_variable
from loadstone._base.arguments import wrong_kind
from loadstone._base.dtypes import dtype_argument, torch_dtype
from loadstone._base.progress import Progress
from loadstone._base.vocabulary import Missing, ReceiptDigest, Tie
from loadstone._files.catalog import Catalog
from loadstone._files.lora import Weighted
from loadstone._model.modules import inside
from loadstone._plan.options import LoadOptions
from loadstone._plan.recipes import LibraryRecipes
from loadstone._skeleton.constructor import make_builder

__all__ = ["from_pretrained", "trace"]

# The adapter is imported inside functions, because it needs a supported release of transformers,
# but `skeleton_builder` must work with every release.


def from_pretrained(
    cls: type[Any],
    pretrained_model_name_or_path: str | os.PathLike[str],
    *model_args: Any,
    missing: Missing = "initialise",
    nested_offset: Mapping[str, float] | None = None,
    quantize_experts: bool = False,
    dequantize: bool | None = None,
    lora: Weighted = (),
    lora_ignore: str | Sequence[str] = (),
    tie: Tie = "split",
    progress: Progress = False,
    threads: int | None = None,
    receipt: ReceiptDigest | None = None,
    **kwargs: Any,
) -> Any:
    """Run the library's ``cls.from_pretrained``; loadstone plans, reads and audits the load.

    Args:
        cls: a ``PreTrainedModel`` or an ``AutoModel`` class.
        pretrained_model_name_or_path: a folder, or a name that the library resolves through its
            hub cache.
        missing: ``"initialise"``: missing tensors get values of the library's initialiser, or of
            the constructor if the initialiser does not write to them. For other policies see
            :func:`loadstone.plan`.
        nested_offset: with ``bnb_4bit_use_double_quant``: the offset that is subtracted from the
            scales before these are quantized, by the weight's name; default: the mean of the
            scales. The mean that bitsandbytes computes depends on the number of threads.
        quantize_experts: with a 4-bit ``BitsAndBytesConfig``: also quantize experts that the model
            keeps in one tensor; the library does not.
        dequantize: ``True``: loadstone's codecs dequantize a quantized checkpoint, to ``dtype`` or
            else the config's dtype; the model is then an ordinary one. ``False``: use the library's
            quantizer. ``None``, the default: the library's quantizer, except for ModelOpt (the
            library has none) and compressed-tensors, and if the quantizer raises because a package
            or a device is missing (with a ``UserWarning``). Pass a ``quantization_config`` of the
            checkpoint's own method to request the library's quantizer.
        lora, lora_ignore, tie, progress, threads, receipt: see :func:`loadstone.load`.
        kwargs: arguments of the library's function. The error for a misspelled keyword names the
            nearest known keyword.

    Returns:
        The result of the library's function: the model, or model and loading info.
        ``loadstone.audit(model)`` has the origin of every tensor.

    Raises:
        PlanError: a tensor is missing, does not fit, or cannot be traced; nothing was read.
        OptionError: ``plan.options``: an unsupported argument, which the error names
            (``state_dict``, ``gguf_file``, files that are not safetensors ...).
        Exceptions of the library for its arguments.
    """
    from loadstone._adapters.transformers import hooks

    options = LoadOptions.from_arguments(locals())
    with hooked(hooks.hooks()), set_variable(hooks.OPTIONS, options):
        return cls.from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)


def patches() -> Hooks:
    """Return the hooks that :func:`loadstone.patch` installs for transformers."""
    from loadstone._adapters.transformers import hooks

    return hooks.hooks()


def trace(
    model: torch.nn.Module,
    catalog: Catalog,
    *,
    dtype: torch.dtype | str | None = None,
    key_mapping: Mapping[str, str] | None = None,
) -> LibraryRecipes:
    """Trace the recipes for a ``PreTrainedModel`` from the library's conversion registry.

    Args:
        model: the model; may be on meta.
        dtype: a torch dtype or its name; ``None`` and ``"auto"``: the model's own.
        key_mapping: see ``from_pretrained`` of the library.

    Raises:
        OptionError: ``plan.options``: the model is not of this library, or the library's version is
            unsupported.
    """
    import transformers

    from loadstone._adapters.transformers import hooks

    model = inside(model)
    if not isinstance(model, transformers.PreTrainedModel):
        raise wrong_kind("model", model, "a transformers.PreTrainedModel for rules='transformers'")
    requested = None if dtype in (None, "auto") else torch_dtype(dtype_argument(dtype))
    recipes: LibraryRecipes = hooks.RELEASE.trace(model, catalog, requested, key_mapping)
    return recipes


def skeleton_builder(
    model: torch.nn.Module, dtype: torch.dtype | None = None
) -> Callable[[], torch.nn.Module]:
    """Return a function that builds another model of a ``PreTrainedModel``'s class and config.

    Args:
        dtype: the default dtype to build under; None: the dtype that ``model`` was built under.
    """
    cls: Any = type(model)
    config = copy.deepcopy(model.config)
    return make_builder(model, lambda: cls(copy.deepcopy(config)), dtype)
