"""Convert one checkpoint to another, file to file; no whole tensor is ever in memory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from loadstone import _core
from loadstone._base.adapters import adapters_with, resolve
from loadstone._base.arguments import path_text
from loadstone._base.errors import new_error
from loadstone._base.keywords import names_keywords
from loadstone._base.lazy_torch import torch
from loadstone._base.progress import Progress, show_progress
from loadstone._base.vocabulary import Experts, Mode, PageCache, ReceiptDigest, Style, Unexpected
from loadstone._convert import cluster as _cluster
from loadstone._convert.output import ConvertReport, OutputOptions, Quantize, require_no_errors
from loadstone._files.catalog import Catalog, CheckpointPath, open_catalog
from loadstone._files.gguf_metadata import Metadata, metadata_text
from loadstone._plan import rules as _rules
from loadstone._plan.rules import RulesText, rules_or_recipes, rules_text


@runtime_checkable
class TracedRecipes(Protocol):
    """The fields of ``LibraryRecipes`` used here. This module works without torch."""

    recipes: _core.Recipes | None
    findings: list[_core.Finding]


Rules = _rules.Rules | TracedRecipes


@names_keywords
def convert(
    source: CheckpointPath | Catalog,
    target: str | os.PathLike[str],
    *,
    rules: Rules | None = None,
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
    dequantize: bool = False,
    require_lossless: bool = False,
    experts: Experts = "keep",
    metadata: Metadata | None = None,
    beyond_ggml: bool = False,
    converter: str | os.PathLike[str] | None = None,
    trust_code: bool = False,
    shard_size: int | str | None = None,
    name: str | None = None,
    max_memory: int | str | None = None,
    unexpected: Unexpected = "warn",
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
    cluster: Any = None,
    parts: int | None = None,
) -> ConvertReport:
    """Convert a checkpoint to safetensors or GGUF in bounded memory.

    >>> loadstone.convert("model.gguf", "model.safetensors", dtype="bfloat16")
    >>> loadstone.convert("wan.safetensors", "wan.gguf", metadata={"general.architecture": "wan"})

    The target gets its name only when it is complete; a failure leaves no files behind and an older
    output unchanged. loadstone never writes to the source, and replaces only files that an earlier
    conversion wrote to the same target, unless you pass ``overwrite``.

    Args:
        source: see :func:`loadstone.inspect`; or its result.
        target: ``"name.safetensors"`` or ``"name.gguf"`` for one file; else a folder for shards and
            index, which may contain other files, but not another model.
        rules: rules for names and layouts: a list as in ``docs/rules.md``, a JSON file of rules or
            of recipes (:func:`save_recipes`), or an adapter's trace for the same catalog.
            ``None``: names stay unchanged.
        dtype: dtype of floating-point tensors of 16 bits or more, of FP8 tensors without scales,
            and of block formats. ``None``: unchanged.
        block_dtype: dtype of block formats if ``dtype`` is ``None``: bfloat16, float16 or float32.
            A GGUF file keeps blocks unchanged.
        quantize: an encoding for the weights in decoder layers (``"nvfp4"``, ``"nf4:128"``
            with a block size ...; for GGUF files ``"q8_0"`` and llama.cpp's mixes such as
            ``"q4_k_m"``), or ``{pattern: encoding}``: regular expressions searched in names. The
            first match wins; ``""`` matches all names, and the encoding ``"none"`` excludes.
        include, exclude: regular expressions of additional names to quantize, or of names to
            exclude.
        style: style of names, shapes and configs: ``"modelopt"`` (the default) or
            ``"compressed-tensors"``. The encodings of bitsandbytes have their own style, and accept
            no other. Without ``quantize``, tensors that are already quantized get the style with
            unchanged values (``convert.lossy`` if that is impossible).
        mode: ``"exact"``, or ``"modelopt-compat"`` for the bytes that ModelOpt writes.
        imatrix: for GGUF files: an importance matrix from llama.cpp's ``llama-imatrix``
            (``.gguf``, or the older ``.dat``). It gives errors in important columns more weight;
            the encodings with the fewest bits need it. It stays in memory.
        allow_non_finite: quantize non-finite values (NaN, inf), and write values that are too large
            for their dtype, with a finding; default: an error.
        copy_code: also copy Python files of the source's folder.
        dequantize: dequantize tensors of the source (to ``dtype``, or bfloat16): FP8 of
            any granularity, NVFP4, MXFP4, MXFP8 and int8 with the names of DeepSeek, ModelOpt,
            compressed-tensors and GPT-OSS, bitsandbytes, and FP8 without scales. ``quantize``
            implies it.
        require_lossless: reject the conversion (``convert.lossy``) if a value would change: before
            reading if encodings and shapes determine it, otherwise when loadstone finds the first
            changed block.
        experts: ``"fused"``: all experts of a layer in one tensor, as in transformers 5;
            ``"separate"``: one tensor per expert, as in published checkpoints; ``"keep"``:
            unchanged.
        metadata: keys to add to the source's metadata, or to replace: values by key, or with their
            types as ``{"type": "u64", "value": 7}`` and ``{"type": "array", "items": "string",
            "value": [...]}``; or a JSON file of them (``docs/formats/gguf.md``). A GGUF file needs
            ``general.architecture``, from the source or from this argument.
        beyond_ggml: allow GGUF tensors with more than 4 dims and names of more than 63 bytes, which
            ggml rejects but programs for video models read.
        converter: llama.cpp's converter, see :func:`loadstone.llama_cpp.trace`. It, or with
            ``None`` loadstone's rules for the architecture, determines names, layouts and metadata
            if the source is a folder of a language model, the target is ``"name.gguf"`` and
            ``rules`` is ``None``; ``dtype`` then applies to matrices. Without ``dtype`` and
            ``quantize``, MXFP4 and NVFP4 keep their codes.
        trust_code: let the converter run Python code that the folder's configs name.
        shard_size: bytes of tensors in a shard of a folder (``int`` or ``"5GB"``, the default).
            If given for ``name.gguf``, the files are ``name-00001-of-00003.gguf`` and so on.
        name: prefix of the file names in a folder; ``None``: ``diffusion_pytorch_model`` for a
            diffusers config, else ``model``.
        max_memory: limit in bytes (``int`` or ``"8GiB"``); loadstone rejects a conversion that
            needs more.
        unexpected: ``"warn"``, ``"error"`` or ``"ignore"``, for sources that recipes do not use.
        threads: number of workers; ``None``: one per core, at most 16.
        progress: ``True`` for a bar, or a callable with arguments bytes done and total bytes.
        dry_run: plan and check the target, but write nothing.
        resume: keep the shards that an earlier run of the same conversion finished, and the shards
            of this run, even if it fails. A single file has no shards, so it starts over.
        part: ``(i, n)``: convert only this share of the shards, ``i`` from 1 to ``n``, to a folder
            next to the target. Parts may run at the same time, on machines that share the folder,
            and you may repeat them.
        finish: check the shards of all parts, and move them to the target.
        overwrite: replace a model at ``target`` even if loadstone did not write it there, or if it
            has changed since.
        receipt: ``"xxh3-128"`` or ``"sha256-tree"``: write a receipt with digests of all bytes read
            and written, next to the output; ``receipt.json`` in a folder. Must be the same for all
            parts.
        page_cache: ``"release"``: drop the files' pages from the system's page cache after use,
            except source pages that were there before. ``"keep"``: leave them. ``"auto"``: release
            if the files exceed half of the machine's memory.
        cluster: run all parts as tasks of ``"ray"`` (extra ``ray``), or of an object with
            ``submit()`` like pools of ``concurrent.futures``, Dask and MPI. Each task uses one
            thread unless ``threads`` is larger. Shards that an earlier run finished are kept.
        parts: number of parts, with ``cluster``; ``None``: one for each slot of the cluster.

    Raises:
        PlanError: the target is impossible (all ``findings`` attached), or needs more than
            ``max_memory``. ``convert.overflow``: a tensor has values that its new dtype cannot
            represent. ``convert.target``: the target is the source, or in its folder, or contains
            another model.
        FormatError: the source breaks a rule of its format. ``q.nan``: a tensor to quantize has
            non-finite values.
        LoadError: input or output failed, the disk is full, the source changed during the
            conversion. ``convert.state``: the unfinished shards belong to a different conversion;
            ``convert.locked``: a different process is working on it; ``convert.incomplete``: parts
            are missing.
    """
    arguments = locals()
    if cluster is not None:
        return _convert_in_parts(**arguments)
    if parts is not None:
        message = "parts requires cluster="
        raise new_error("plan.options", message, field="parts", found=repr(parts))
    target = path_text("target", target)
    options, conversion, findings = plan_conversion(arguments, target)
    report = options.run(conversion, target)
    report.findings = [*report.findings, *findings]
    return report


def plan_conversion(
    arguments: Mapping[str, Any], target: str
) -> tuple[OutputOptions, _core.Conversion, list[_core.Finding]]:
    """Plan a conversion to ``target`` from the arguments of :func:`convert`.

    Returns:
        The output's options, the conversion, and findings about the recipes.
    """
    options = OutputOptions.from_arguments(arguments)
    core_arguments = options.core_arguments(arguments["source"], target)
    names = ("rules", "dtype", "metadata", "converter", "trust_code", "allow_links")
    checkpoint = _open_source(arguments["source"], target, *(arguments[name] for name in names))
    decided = ("unexpected", "dequantize", "experts", "require_lossless")
    findings = checkpoint.pop("findings")
    decisions = {name: arguments[name] for name in decided} | checkpoint
    return options, _core.make_conversion(**decisions, **core_arguments), findings


def _convert_in_parts(
    *,
    cluster: Any,
    parts: int | None,
    part: tuple[int, int] | None,
    finish: bool,
    resume: bool,
    progress: Progress,
    dry_run: bool,
    **arguments: Any,
) -> ConvertReport:
    """Run the parts as tasks; keep the shards of earlier runs."""
    begin = time.perf_counter()
    if part is not None or finish or (parts is not None and parts < 1):
        raise new_error(
            "plan.options",
            "a cluster runs and finishes all parts: omit part= and finish=, and pass parts of 1 "
            "or more",
            field="cluster",
        )
    arguments |= {
        "source": _cluster.plain_source(arguments["source"]),
        "target": _absolute("target", arguments["target"]),
        "rules": _serialize_rules(arguments["rules"]),
        "dtype": None if arguments["dtype"] is None else str(arguments["dtype"]),
        "block_dtype": str(arguments["block_dtype"]),
        "imatrix": _absolute("imatrix", arguments["imatrix"]),
        "threads": arguments["threads"] or 1,
    }
    planned = convert(**arguments, resume=True, dry_run=True)
    if dry_run:
        return planned
    require_no_errors(planned.findings)
    bytes_done = 0
    with show_progress(progress, "converting") as callback:

        def show(part: _cluster.PartDone) -> None:
            nonlocal bytes_done
            bytes_done += part.sums["bytes_written"] + part.sums["bytes_kept"]
            if callback is not None:
                callback(bytes_done, planned.bytes_written)

        done = _cluster.run_parts(convert, cluster, arguments, planned.files, parts, show)
    report = _cluster.retry_while_locked(lambda: convert(**arguments, finish=True))
    report.seconds = time.perf_counter() - begin
    for name in _cluster.SUMS:
        setattr(report, name, getattr(report, name) + sum(part.sums[name] for part in done))
    report.peak_bytes = max(report.peak_bytes, *(part.peak_bytes for part in done))
    return report


def _absolute(field: str, path: str | os.PathLike[str] | None) -> str | None:
    """Return an absolute path, which is valid in another process; do not resolve links."""
    return None if path is None else os.path.abspath(path_text(field, path))  # noqa: PTH100


def _open_source(
    source: Any,
    target: str,
    rules: Rules | None,
    dtype: Any,
    metadata: Metadata | None,
    converter: str | os.PathLike[str] | None,
    trust_code: bool,
    allow_links: bool,
) -> dict[str, Any]:
    """Return recipes and metadata; llama.cpp's converter makes them for a language model."""
    traced: Any = None
    options = {"converter": converter, "trust_code": trust_code, "allow_links": allow_links}
    for adapter in adapters_with("gguf").values() if rules is None else ():
        traced = traced or resolve(adapter.gguf)(source, target, dtype=dtype, **options)
    if traced is not None:
        return {
            "catalog": traced.catalog._core,
            "recipes": traced.recipes,
            "metadata": metadata_text(traced.metadata_with(metadata)),
            "findings": traced.findings,
        } | ({"dequantize": True} if traced.decodes else {})
    for field, value in (("converter", converter), ("trust_code", trust_code)):
        if value:
            message = (
                "llama.cpp's converter writes a folder to NAME.gguf, and does not support rules"
            )
            raise new_error("plan.options", message, field=field, found=str(value))
    catalog = open_catalog(source, allow_links=allow_links)._core
    rules_json, recipes = _rules_or_recipes(rules, source, catalog)
    return {
        "catalog": catalog,
        "rules": rules_json,
        "recipes": recipes,
        "dtype": "" if dtype is None or dtype == "auto" else str(dtype),
        "metadata": "" if metadata is None else metadata_text(metadata),
        "findings": [],
    }


def _rules_or_recipes(
    rules: Rules | None, source: Any, catalog: _core.Catalog
) -> tuple[str, _core.Recipes | None]:
    """Return rules as JSON, and recipes; at most one of the two is set."""
    if rules is None:
        return "", None
    if not isinstance(rules, TracedRecipes):
        return rules_or_recipes(rules, catalog)
    if not isinstance(source, Catalog):
        message = "traced recipes require the catalog that they were traced with: pass that catalog"
        raise new_error("plan.options", message, field="source")
    require_no_errors(rules.findings)
    return "", rules.recipes


def _serialize_rules(rules: Rules | None) -> RulesText | None:
    if isinstance(rules, TracedRecipes):
        message = "cluster= requires saved rules: save them with save_recipes, and pass the file"
        raise new_error("plan.options", message, field="rules")
    if rules is None or isinstance(rules, RulesText):
        return rules
    return RulesText(rules_text(rules))
