"""diffusers: its own loaders of single files and folders, planned and read by loadstone.

>>> from diffusers import WanTransformer3DModel
>>> model = loadstone.diffusers.from_single_file(WanTransformer3DModel, "wan.gguf", config="folder")

loadstone traces the recipes from the library's own converter of the class.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from loadstone._adapters.patch import Hooks, hooked, set_variable
from loadstone._base.arguments import wrong_kind
from loadstone._base.dtypes import dtype_argument, torch_dtype
from loadstone._base.errors import new_error
from loadstone._base.keywords import refuse_misspelled
from loadstone._base.progress import Progress
from loadstone._base.vocabulary import MaxMemory, Missing, ReceiptDigest, Tie
from loadstone._execute.plan import Plan
from loadstone._files.catalog import Catalog
from loadstone._files.lora import Weighted
from loadstone._plan.options import LoadOptions
from loadstone._plan.recipes import LibraryRecipes
from loadstone._skeleton.constructor import make_builder

__all__ = ["from_pretrained", "from_single_file", "trace"]

# Modules of the adapter that need a supported release of diffusers are imported inside functions,
# because `skeleton_builder` must work with every release.


def from_single_file(
    cls: type[Any],
    pretrained_model_link_or_path: str | os.PathLike[str],
    *,
    missing: Missing = "error",
    infer_config: bool = False,
    max_memory: MaxMemory | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    lora: Weighted = (),
    lora_ignore: str | Sequence[str] = (),
    tie: Tie = "split",
    progress: Progress = False,
    threads: int | None = None,
    receipt: ReceiptDigest | None = None,
    dry_run: bool = False,
    **kwargs: Any,
) -> Any:
    """Call the library's ``cls.from_single_file``; loadstone plans, reads and audits the load.

    Args:
        cls: a model or a pipeline class.
        pretrained_model_link_or_path: a safetensors or GGUF file with original key names or with
            those of diffusers; it may contain several components.
        missing: see :func:`loadstone.plan`.
        infer_config: replace a config that does not fit the file; ``config="infer"`` is the same,
            starting with the ``config.json`` next to the file, other local configs, or the
            library's guess. A warning names the config.
        max_memory, offload_folder: options for a ``device_map``, which the library's function
            lacks: bytes or a size such as ``"6GiB"`` by device, and a folder, which is created.
            The ``max_memory`` of a pipeline needs a ``device_map``.
        lora, lora_ignore, tie: adapters that are merged into a model, see :func:`loadstone.plan`.
            For a pipeline, pass each model with its own adapters.
        progress, threads, receipt: see :meth:`loadstone.Plan.execute`.
        dry_run: for a model: return the :class:`loadstone.Plan` of this load, to look at; no data
            is read.
        kwargs: arguments of the library's function (``config``, ``torch_dtype``,
            ``quantization_config``, ``device_map`` ...).

    Returns:
        The result of the library's function. Buffers and plain tensors have the constructor's
        values and dtype; modules that the class keeps in float32 stay in float32.

    Raises:
        PlanError: a tensor is missing, does not fit, or cannot be traced; nothing was read.
        OptionError: ``plan.options``: an unsupported file type or release of the library, or a
            keyword that no function accepts.
        FormatError, LoadError: a wrong path or a broken config; the error names the cause.
    """
    if kwargs.get("config") == "infer":
        del kwargs["config"]
        infer_config = True
    options = LoadOptions.from_arguments(locals())
    return _run(options, cls, "from_single_file", str(pretrained_model_link_or_path), kwargs)


def from_pretrained(
    cls: type[Any],
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    missing: Missing = "error",
    lora: Weighted = (),
    lora_ignore: str | Sequence[str] = (),
    tie: Tie = "split",
    progress: Progress = False,
    threads: int | None = None,
    receipt: ReceiptDigest | None = None,
    dry_run: bool = False,
    **kwargs: Any,
) -> Any:
    """Call the library's ``cls.from_pretrained``; loadstone plans, reads and audits the load.

    loadstone loads every component of a pipeline, including models of transformers.

    Args:
        cls: a model or a pipeline class.
        pretrained_model_name_or_path: a folder, or a name that the library resolves through its
            hub cache.
        missing, lora, lora_ignore, tie: see :func:`from_single_file`.
        progress, threads, receipt, dry_run: see :func:`from_single_file`.
        kwargs: arguments of the library's function. A pipeline's ``device_map`` may also map
            components and modules inside them, including to disk and the CPU.

    Returns:
        The result of the library's function, see :func:`from_single_file`.

    Raises:
        PlanError, OptionError: see :func:`from_single_file`.
    """
    pipeline_options = {name: kwargs.get(name) for name in ("max_memory", "offload_folder")}
    options = LoadOptions.from_arguments(locals() | pipeline_options)
    return _run(options, cls, "from_pretrained", pretrained_model_name_or_path, kwargs)


def patches() -> Hooks:
    """Return the hooks that :func:`loadstone.patch` installs for diffusers.

    Raises:
        OptionError: ``plan.options``: an unsupported release of the library.
    """
    import diffusers.pipelines.pipeline_utils  # noqa: F401  (a pipeline may come at any time)

    from loadstone._adapters.diffusers import hooks

    return hooks.hooks()


def trace(
    model: torch.nn.Module, catalog: Catalog, *, dtype: torch.dtype | str | None = None
) -> LibraryRecipes:
    """Return recipes for a ``ModelMixin``, traced from the library's single-file converter.

    Args:
        model: the model; may be on meta.
        catalog: the tensors of a file with original key names or with those of diffusers.
        dtype: dtype of floating-point targets; ``None``, ``"auto"``: the model's own. Block formats
            are decoded.

    Raises:
        OptionError: ``plan.options``: the model is not of this library.
    """
    import diffusers

    from loadstone._adapters.diffusers import recipes

    if not isinstance(model, diffusers.ModelMixin):
        raise wrong_kind("model", model, "a diffusers.ModelMixin for rules='diffusers'")
    target_dtype = None if dtype in (None, "auto") else torch_dtype(dtype_argument(dtype))
    return recipes.trace_model(model, catalog, target_dtype)


def _config_fields(cls: Any, source: Any, subfolder: str | None) -> Iterable[str]:
    """Yield the fields of a folder's config: components of a pipeline, arguments of a model."""
    with contextlib.suppress(Exception):  # a file; for other sources the library raises later
        return [*cls.load_config(source, subfolder=subfolder)]
    return ()


def _refuse_pipeline(options: LoadOptions, name: str) -> None:
    if options.loras is not None and options.loras.catalogs:
        message = "a pipeline has several models: load one of them with lora=, and pass it on"
        raise new_error("plan.options", message, field="lora", found=name)
    if options.dry_run:
        message = "a pipeline has several models: call the function of each model's own class"
        raise new_error("plan.options", message, field="dry_run", found=name)


def _run(options: LoadOptions, cls: Any, function: str, source: Any, kwargs: dict[str, Any]) -> Any:
    import diffusers

    from loadstone._adapters.diffusers import arguments, failures, hooks, load
    from loadstone._adapters.transformers import hooks as encoders

    arguments.check(cls, function, kwargs, options)
    if kwargs.get("custom_pipeline") is None:  # the keywords of a custom pipeline are unknown
        accepted = inspect.signature(globals()[function]).parameters
        library = [getattr(owner, function, cls) for owner in (cls, diffusers.DiffusionPipeline)]
        fields = functools.partial(_config_fields, cls, source, kwargs.get("subfolder"))
        refuse_misspelled(kwargs, accepted, (*library, cls), fields=fields)
    if arguments.is_pipeline(cls):
        _refuse_pipeline(options, cls.__name__)
        arguments.check_components(kwargs, _config_fields(cls, source, kwargs.get("subfolder")))
    encoder_options = LoadOptions(
        options.missing, options.progress, options.threads, options.receipt
    )
    with (
        hooked(encoders.hooks()),
        hooked(hooks.hooks()),
        set_variable(encoders.OPTIONS, encoder_options),
        set_variable(load.OPTIONS, options),
    ):
        try:
            # The function is looked up after the hooks are installed.
            return getattr(cls, function)(source, **kwargs)
        except load.DryRun as done:
            return Plan(done.plan)
        except failures.EXPLAINED as failure:
            cause = failures.explain(cls, function, source, kwargs, failure)
            if cause is None:
                raise
            raise cause from failure


def skeleton_builder(
    model: torch.nn.Module, dtype: torch.dtype | None = None
) -> Callable[[], torch.nn.Module]:
    """Return a function that builds another model like a ``ModelMixin``.

    Args:
        model: has the class and the configuration.
        dtype: the default dtype to build under; None: the dtype that ``model`` was built under.
    """
    cls: Any = type(model)
    model_config: Any = model.config
    config = dict(model_config)
    return make_builder(model, lambda: cls.from_config(config), dtype)
