"""diffusers: its own loaders of single files and folders with loadstone in the middle.

>>> from diffusers import WanTransformer3DModel
>>> model = loadstone.diffusers.from_single_file(WanTransformer3DModel, "wan.gguf", config="folder")

Which key of a file becomes what is asked of the library's own converter of the class. No weight is
read or converted here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from loadstone._building import builder
from loadstone._dtypes import dtype_argument, torch_dtype

if TYPE_CHECKING:
    from loadstone._catalog import Catalog
    from loadstone._patch import Hooks
    from loadstone._traced import Traced


def from_single_file(
    cls: Any,
    pretrained_model_link_or_path: str | os.PathLike[str],
    *,
    missing: str | Mapping[str, str] = "error",
    infer_config: bool = False,
    max_memory: Mapping[Any, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    progress: bool | Callable[[int, int], object] = False,
    threads: int | None = None,
    **kwargs: Any,
) -> Any:
    """The library's ``cls.from_single_file``, planned, read and proved by loadstone.

    Args:
        cls: a model or a pipeline class.
        pretrained_model_link_or_path: a file in the original or in diffusers' own key names,
            safetensors or GGUF; with several components, too.
        missing: ``"error"``, ``"initialise"`` (the module's own initialiser) or ``"zeros"``.
        infer_config: where the config (given, or guessed by the library) does not fit the file and
            a small change of its fields does, that is made; ``config="infer"`` is the same, with
            the library's guess to begin with.
        max_memory, offload_folder: for a ``device_map``, which the library's function forgets.
        progress, threads: see :meth:`loadstone.Plan.execute`.
        kwargs: what the library's function takes (``config``, ``torch_dtype``,
            ``quantization_config``, ``device_map`` ...).

    Returns:
        What the library's function returns. Buffers and plain tensors hold the constructor's
        values, in its dtype; modules that the class keeps in float32 stay so.

    Raises:
        PlanError: something is missing, does not fit, or cannot be traced; nothing was read.
        Error: ``plan.options``: a kind of file that this version does not open.
    """
    if kwargs.get("config") == "infer":
        del kwargs["config"]
        infer_config = True
    chosen = _options(missing, progress, threads, max_memory, offload_folder, infer_config)
    return _run(chosen, cls, "from_single_file", str(pretrained_model_link_or_path), kwargs)


def from_pretrained(
    cls: Any,
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    missing: str | Mapping[str, str] = "error",
    progress: bool | Callable[[int, int], object] = False,
    threads: int | None = None,
    **kwargs: Any,
) -> Any:
    """The library's ``cls.from_pretrained``, planned, read and proved by loadstone.

    Of a pipeline every component goes through loadstone, those of transformers too.

    Args:
        missing, progress, threads: as for :func:`from_single_file`.
        kwargs: what the library's function takes. A pipeline's ``device_map`` may be a map too,
            over components and inside them, and disk and the CPU alone are heeded.
    """
    folder = kwargs.get("offload_folder")
    chosen = _options(missing, progress, threads, kwargs.get("max_memory"), folder)
    return _run(chosen, cls, "from_pretrained", pretrained_model_name_or_path, kwargs)


def patches() -> Hooks:
    """What :func:`loadstone.patch` installs for this library."""
    import diffusers.pipelines.pipeline_utils  # noqa: F401  (a pipeline may come at any time)

    from loadstone._diffusers import hooks

    return hooks.hooks()


def trace(model: Any, catalog: Catalog, *, dtype: Any = None) -> Traced:
    """What each tensor of a ``ModelMixin`` is made of, by the library's single-file converter.

    Args:
        model: may lie on meta.
        dtype: ``None``: the model's own; a torch dtype or its name. Block formats are decoded.

    Raises:
        Error: ``plan.options``: the model is not one of this library.
    """
    import diffusers

    from loadstone._diffusers.checkpoint import Checkpoint
    from loadstone._diffusers.expected import OverlookedError
    from loadstone._diffusers.load import DiffusersOptions, Load, Request, convert
    from loadstone._errors import make

    if not isinstance(model, diffusers.ModelMixin):
        found = f"{type(model).__module__}.{type(model).__qualname__}"
        raise make("plan.options", "the model is not of diffusers", field="rules", found=found)
    checkpoint = Checkpoint(catalog)
    checkpoint.decode()
    wanted = dtype if dtype in (None, "auto") else torch_dtype(dtype_argument(dtype))
    kept = getattr(type(model), "_keep_in_fp32_modules", None) or ()
    keeps = tuple(kept) if wanted in (torch.float16, torch.bfloat16) else ()
    given = None if wanted == "auto" else wanted
    lacks = None
    for _ in range(2):
        made, used, conversion = convert(model, checkpoint, lacks)
        request = Request(model, made, used, given, keeps, conversion=conversion)
        try:
            return Load(DiffusersOptions()).trace(request)
        except OverlookedError as overlooked:
            lacks = overlooked.lacks
    raise AssertionError("a converter passes over tensors again and again")


def _options(
    missing: str | Mapping[str, str],
    progress: Any,
    threads: Any,
    max_memory: Any,
    folder: Any,
    infers: bool = False,
) -> Any:
    from loadstone._diffusers.load import DiffusersOptions

    where = os.fspath(folder) if folder is not None else None
    return DiffusersOptions(missing, progress, threads, max_memory, where, infers, is_direct=True)


def _run(chosen: Any, cls: Any, function: str, source: Any, kwargs: dict[str, Any]) -> Any:
    from loadstone import transformers
    from loadstone._diffusers import hooks
    from loadstone._patch import hooked
    from loadstone._transformers import hooks as encoders
    from loadstone._transformers.gaps import TransformersOptions

    theirs = TransformersOptions(
        missing=chosen.missing, progress=chosen.progress, threads=chosen.threads
    )
    with (
        hooked(transformers.patches()),
        hooked(hooks.hooks()),
        encoders.options(theirs),
        hooks.options(chosen),
    ):
        return getattr(cls, function)(source, **kwargs)  # looked up when the hooks stand


def skeleton_builder(
    model: torch.nn.Module, dtype: torch.dtype | None = None
) -> Callable[[], torch.nn.Module]:
    """A function that builds another model of the class and configuration of a ``ModelMixin``.

    Args:
        dtype: the default dtype to build under; None: the one that ``model`` was built under.
    """
    cls: Any = type(model)
    held: Any = model.config
    config = dict(held)
    return builder(model, lambda: cls.from_config(config), dtype)
