"""Merge models and adapters into one model, file to file; no whole tensor is ever in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from loadstone import _core
from loadstone._base.arguments import count_argument, path_text
from loadstone._base.errors import new_error
from loadstone._base.keywords import names_keywords
from loadstone._base.lazy_torch import torch
from loadstone._base.progress import Progress
from loadstone._base.vocabulary import MergeMethod, Mode, PageCache, ReceiptDigest, Style, Tie
from loadstone._convert.output import ConvertReport, OutputOptions, Quantize
from loadstone._files.catalog import open_catalog
from loadstone._files.gguf_metadata import Metadata, metadata_text
from loadstone._files.lora import (
    Weighted,
    adapter_rows,
    join_catalogs,
    parse_weights,
    tie_argument,
)


@names_keywords
def merge(
    models: Weighted,
    target: str | os.PathLike[str],
    *,
    lora: Weighted = (),
    lora_ignore: str | Sequence[str] = (),
    tie: Tie = "split",
    method: MergeMethod = "linear",
    normalise: bool | None = None,
    scale: float | None = None,
    density: float | None = None,
    seed: int | None = None,
    dtype: torch.dtype | str | None = None,
    block_dtype: torch.dtype | str = "bfloat16",
    quantize: Quantize | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    style: Style | None = None,
    mode: Mode = "exact",
    imatrix: str | os.PathLike[str] | None = None,
    allow_non_finite: bool = False,
    copy_code: bool = False,
    metadata: Metadata | None = None,
    beyond_ggml: bool = False,
    shard_size: int | str | None = None,
    name: str | None = None,
    max_memory: int | str | None = None,
    threads: int | None = None,
    progress: Progress = False,
    dry_run: bool = False,
    allow_links: bool = False,
    resume: bool = False,
    part: tuple[int, int] | None = None,
    finish: bool = False,
    overwrite: bool = False,
    receipt: ReceiptDigest | None = None,
    page_cache: PageCache = "auto",
) -> ConvertReport:
    """Merge adapters into a model, or several models into one, and write the result.

    >>> loadstone.merge("base/", "merged/", lora={"adapter/": 0.8})
    >>> loadstone.merge(["base/", ("a/", 1.0), ("b/", 1.0)], "m/", method="ties", density=0.2)

    loadstone computes in F32 and rounds once. Names, shapes and dtypes are those of the first
    model; quantized tensors are dequantized. See ``docs/merge.md``.

    Args:
        models: a checkpoint, or several with a weight each: a mapping, or a sequence of pairs. The
            default weight is 1; a first model that is the method's base has no weight.
        target: ``"name.safetensors"`` or ``"name.gguf"`` for one file; else a folder.
        lora: adapters with the tensor names of peft, diffusers or kohya, each with a factor, in the
            same forms as ``models``.
        lora_ignore: regular expressions of adapters' tensors to leave out, such as tensors for a
            different model of a pipeline. Any other unused tensor is an error.
        tie: for an embedding that an adapter changes and the config ties to the head:
            ``"split"`` writes the head as a separate tensor with the base's value, and a config
            with ``tie_word_embeddings: false``; ``"keep"`` changes both.
        method: ``"linear"``: the weighted sum of all models. ``"slerp"``: the arc from the
            first model (0) to the second (1), at the second's weight. ``"task-arithmetic"``: the
            first model plus the weighted differences of the others from it. ``"ties"``,
            ``"dare-linear"`` and ``"dare-ties"`` prune these differences.
        normalise: divide by the sum of the weights. ``None``: true for ``"ties"`` and
            ``"dare-ties"``.
        scale: a factor for the sum of differences; default 1. loadstone rejects ``scale``,
            ``density`` and ``seed`` if the method does not use them.
        density: the fraction of each difference that pruning methods keep; default 1.
        seed: seed of the random draws of ``"dare-linear"`` and ``"dare-ties"``; default 0.

    All other arguments are those of :func:`loadstone.convert`. Without ``dtype``, quantized sources
    get ``block_dtype``.

    Raises:
        PlanError: the checkpoints do not fit each other (``merge.adapter``, ``merge.models``,
            ``merge.unused``; all ``findings`` attached), or need more than ``max_memory``.
        FormatError, LoadError: see :func:`loadstone.convert`.
    """
    options = OutputOptions.from_arguments(locals())
    sources, adapters = parse_weights(models, "models"), parse_weights(lora, "lora")
    target = path_text("target", target)
    if not sources:
        raise new_error(
            "plan.options", "the first checkpoint of a merge must be a model", field="models"
        )
    core_arguments = options.core_arguments(sources[0][0], target)
    merge_options = _core.merge_options(
        [weight for _, weight in sources],
        adapter_rows(adapters, lora_ignore),
        method,
        normalise,
        scale,
        density,
        None if seed is None else count_argument("seed", seed, 2**64 - 1),
        tie_argument(tie),
    )
    catalogs = [open_catalog(path, allow_links=allow_links) for path, _ in (*sources, *adapters)]
    conversion = _core.make_conversion(
        join_catalogs(catalogs),
        dtype="" if dtype is None or dtype == "auto" else str(dtype),
        **core_arguments,
        metadata="" if metadata is None else metadata_text(metadata),
        merge=merge_options,
    )
    return options.run(conversion, target)
