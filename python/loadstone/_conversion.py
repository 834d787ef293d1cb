"""One checkpoint made into another, file to file; no tensor is ever whole in memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadstone import _cluster, _core, _machine
from loadstone._catalog import Catalog, Checkpoint, inspect
from loadstone._errors import PlanError, make
from loadstone._progress import shown
from loadstone._rules import rules_text
from loadstone._text import read_text
from loadstone._traced import Traced

# Files of video models hold patch embeddings of five dims, one more than ggml knows.
_RANK_MAX = 8


@dataclass(frozen=True)
class RulesText:
    """Rules or recipes as JSON, which can be passed to another process."""

    text: str


Rules = (
    Sequence[Mapping[str, Any]] | Mapping[str, str] | str | os.PathLike[str] | Traced | RulesText
)
Quantize = str | Mapping[str, str]


@dataclass
class ConvertReport:
    """The result of :func:`convert`, or with ``dry_run`` the expected one.

    Attributes:
        outputs: the files that were written, the index last; empty after a dry run. With ``part``
            its shards, at their temporary paths.
        seconds: wall time.
        bytes_read, bytes_written: transposed tensors may be read more than once.
        bytes_kept: in files that earlier runs finished.
        peak_bytes: of memory, in addition to what the process had before.
        findings: problems, most severe first.
        table: sources and targets as a readable table.
        files: count of files that hold tensors: one, or the shards.
        sync_seconds: part of ``seconds`` spent in syncing files to the disk.
    """

    outputs: list[Path]
    seconds: float
    bytes_read: int
    bytes_written: int
    peak_bytes: int
    findings: list[_core.Finding] = field(default_factory=list)
    table: str = ""
    bytes_kept: int = 0
    files: int = 0
    sync_seconds: float = 0.0

    def __str__(self) -> str:
        return self.table

    def __repr__(self) -> str:
        return (
            f"ConvertReport({len(self.outputs)} files, {self.bytes_written} bytes written "
            f"in {self.seconds:.3f} s)"
        )


def convert(
    source: Checkpoint | Catalog,
    target: str | os.PathLike[str],
    *,
    rules: Rules | None = None,
    dtype: Any = None,
    block_dtype: Any = "bfloat16",
    quantize: Quantize | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    style: str | None = None,
    mode: str = "exact",
    allow_non_finite: bool = False,
    copy_code: bool = False,
    dequantize: bool = False,
    experts: str = "keep",
    shard_size: int | str | None = None,
    name: str = "model",
    max_memory: int | str | None = None,
    unexpected: str = "warn",
    threads: int | None = None,
    progress: bool | Callable[[int, int], object] = False,
    dry_run: bool = False,
    allow_links: bool = False,
    resume: bool = False,
    part: tuple[int, int] | None = None,
    finish: bool = False,
    cluster: Any = None,
    parts: int | None = None,
) -> ConvertReport:
    """Converts a checkpoint to safetensors, in memory that does not grow with its size.

    >>> loadstone.convert("model.gguf", "model.safetensors", dtype="bfloat16")

    The target appears under its name only when it is complete; a failure leaves nothing behind and
    an older file unchanged. The source is never written.

    Args:
        source: see :func:`loadstone.inspect`; or its result.
        target: ``"name.safetensors"`` for one file; else a folder for shards and index, which may
            hold other files but no model.
        rules: for names and layouts: a list as in ``docs/rules.md``, a JSON file of one or of
            recipes (:func:`save_recipes`), or the trace of an adapter for this very catalog.
            ``None``: names stay unchanged.
        dtype: of floating tensors of 16 bits and more, and of block formats. ``None``: unchanged.
        block_dtype: of block formats without ``dtype``: bfloat16, float16 or float32.
        quantize: an encoding for the weights inside decoder layers (``"nvfp4"``, ``"nf4:128"``
            with a block size ...), or ``{pattern: encoding}``: regular expressions searched in
            names, of which the first match wins; ``""`` matches all, ``"none"`` excludes.
        include, exclude: regular expressions of names to quantize too, or not at all.
        style: of names, shapes and configs: ``"modelopt"`` (the default) or
            ``"compressed-tensors"``. Encodings of bitsandbytes have a style of their own, and take
            no other.
        mode: ``"exact"``, or ``"modelopt-compat"`` for the bytes that ModelOpt makes.
        allow_non_finite: quantize non-finite values (NaN, inf) with a finding; default: an error.
        copy_code: also copy Python files of the source's folder.
        dequantize: dequantize (to ``dtype``, or bfloat16) tensors of the source: FP8 of
            any granularity, NVFP4, MXFP4, MXFP8 and int8 in the names of DeepSeek, ModelOpt,
            compressed-tensors and GPT-OSS, and bitsandbytes. ``quantize`` does that by itself.
        experts: ``"fused"``: all experts of a layer in one tensor, as transformers 5 has them;
            ``"separate"``: each by itself, as checkpoints are published; ``"keep"``.
        shard_size: bytes of tensors in a shard of a folder (``int`` or ``"5GB"``, the default).
        name: of files in a folder; diffusers looks for ``diffusion_pytorch_model``.
        max_memory: limit in bytes (``int`` or ``"8GiB"``); a conversion that needs more is refused.
        unexpected: ``"warn"``, ``"error"`` or ``"ignore"``: sources that recipes do not use.
        threads: workers; ``None``: one per core, at most a few.
        progress: ``True`` for a bar, or a callable that gets bytes done and bytes in all.
        dry_run: plan only, and write nothing.
        resume: keep the shards that an earlier run of the same conversion finished, and those of
            this one however it ends. A single file has no shards, and is written from the start.
        part: ``(i, n)``: convert this share of the shards only, ``i`` from 1 to ``n``, to a folder
            beside the target. Parts may run at the same time, on machines that share the folder,
            and may be repeated.
        finish: check the shards of all parts, and move them to the target.
        cluster: runs all parts as tasks: ``"ray"`` (extra ``ray``), or an object with
            ``submit()`` as ``concurrent.futures``, Dask and MPI pools have. Each uses one thread
            unless ``threads`` says more. Shards that an earlier run finished are kept.
        parts: count of parts, with ``cluster``; ``None``: one for each of its slots.

    Raises:
        PlanError: a target cannot be made (all ``findings`` attached), or not in ``max_memory``.
        FormatError: the source breaks a rule of its format.
        LoadError: input or output failed, the disk is full, the source changed meanwhile.
        Error: ``q.nan``: a tensor to quantize has non-finite values. ``convert.target``: the target
            is the source, or in its folder, or is a folder with another model.
            ``convert.state``: the unfinished shards are of another conversion;
            ``convert.locked``: another process works on it; ``convert.incomplete``: parts are
            missing.
    """
    if cluster is not None:
        return _divided(**locals())
    catalog = source._core if isinstance(source, Catalog) else _open(source, allow_links)._core
    where = os.fsdecode(target)
    _core.check_target_name(where)
    one_file = where.endswith(".safetensors")
    if one_file and shard_size is not None:
        raise make("plan.options", "a single file has no shards: pass a folder", field="shard_size")
    listed, recipes = _chosen(rules, source, catalog)
    conversion = _core.make_conversion(
        catalog,
        rules=listed,
        recipes=recipes,
        dtype="" if dtype is None or dtype == "auto" else str(dtype),
        block_dtype=str(block_dtype),
        unexpected=unexpected,
        one_file=one_file,
        stem=name,
        shard_bytes_max=None if shard_size is None else _machine.byte_count(shard_size),
        memory_bytes_max=None if max_memory is None else _machine.byte_count(max_memory),
        threads=threads or 0,
        formats=_formats(quantize),
        mode=mode,
        include=_listed(include),
        exclude=_listed(exclude),
        style=_style(style),
        allow_non_finite=allow_non_finite,
        folder="" if one_file else _folder(source),
        copy_code=copy_code,
        dequantize=dequantize,
        experts=experts,
    )
    if dry_run:
        return _planned(conversion)
    return _written(conversion, where, progress, resume, part, finish)


def _written(
    conversion: _core.Conversion,
    target: str,
    progress: bool | Callable[[int, int], object],
    resume: bool,
    part: tuple[int, int] | None,
    finish: bool,
) -> ConvertReport:
    try:
        conversion.require_ok()
    except PlanError as error:
        error.findings = conversion.findings
        raise
    with shown(progress, "converting") as callback:
        report = _core.convert(conversion, target, callback, resume, part, finish)
    return ConvertReport(
        outputs=[Path(each) for each in report.outputs],
        **report.work(),
        bytes_kept=report.bytes_kept,
        peak_bytes=report.peak_bytes,
        findings=report.findings,
        table=conversion.to_table(),
        files=conversion.file_count,
    )


def _divided(
    *,
    cluster: Any,
    parts: int | None,
    part: tuple[int, int] | None,
    finish: bool,
    resume: bool,
    progress: bool | Callable[[int, int], object],
    dry_run: bool,
    **arguments: Any,
) -> ConvertReport:
    """A conversion whose parts are tasks; keeps the shards of earlier runs."""
    begin = time.perf_counter()
    if part is not None or finish or (parts is not None and parts < 1):
        raise make(
            "plan.options",
            "a cluster runs and finishes all parts: pass no part=, finish= or parts below 1",
            field="cluster",
        )
    arguments |= {
        "source": _cluster.plain_source(arguments["source"]),
        "target": os.path.abspath(os.fsdecode(arguments["target"])),  # noqa: PTH100  (links stay)
        "rules": _as_text(arguments["rules"]),
        "dtype": None if arguments["dtype"] is None else str(arguments["dtype"]),
        "block_dtype": str(arguments["block_dtype"]),
        "threads": arguments["threads"] or 1,
    }
    planned = convert(**arguments, dry_run=True)
    if dry_run:
        return planned
    errors = [finding for finding in planned.findings if finding.severity == "error"]
    if errors:
        error = make(errors[0].code, errors[0].message)
        error.findings = planned.findings
        raise error
    bytes_done = 0
    with shown(progress, "converting") as callback:

        def show(done: _cluster.PartDone) -> None:
            nonlocal bytes_done
            bytes_done += done.sums["bytes_written"] + done.sums["bytes_kept"]
            if callback is not None:
                callback(bytes_done, planned.bytes_written)

        done = _cluster.run_parts(cluster, arguments, planned.files, parts, show)
    report = _cluster.patiently(lambda: convert(**arguments, finish=True))
    report.seconds = time.perf_counter() - begin
    for name in _cluster.SUMS:
        total = getattr(report, name) + sum(each.sums[name] for each in done)
        setattr(report, name, total)
    report.peak_bytes = max(report.peak_bytes, *(each.peak_bytes for each in done))
    return report


def save_recipes(
    model: Any,
    checkpoint: Checkpoint | Catalog,
    path: str | os.PathLike[str],
    *,
    rules: str = "diffusers",
    dtype: Any = None,
    allow_links: bool = False,
) -> None:
    """Saves the recipes of a library's own conversion, for ``loadstone convert``.

    >>> loadstone.save_recipes(model, "wan.gguf", "recipes.json", rules="diffusers")

    Args:
        model: of that library; may lie on meta.
        checkpoint: the one to be converted, or one with the same names, encodings and shapes.
        path: of the JSON file; it has names of tensors, and no values but small constants.
        rules: the library: ``"diffusers"`` or ``"transformers"``.
        dtype: ``None``: the model's own. Modules that the class keeps in float32 stay so.

    Raises:
        PlanError: the checkpoint does not make the whole model; ``findings`` say what is missing.
    """
    from loadstone._adapters import trace
    from loadstone._plan import make_plan

    catalog = checkpoint if isinstance(checkpoint, Catalog) else _open(checkpoint, allow_links)
    traced = trace(rules, model, catalog, dtype)
    make_plan(model, catalog, traced).require_ok()
    if traced.recipes is None:
        raise make(
            "plan.options", "names match unchanged, so there are no recipes to save", field="rules"
        )
    Path(path).write_text(traced.recipes.to_json(catalog._core), encoding="utf-8")


def _formats(quantize: Quantize | None) -> list[tuple[str, str]]:
    """Patterns and their encodings, in order; an empty pattern is for all."""
    if quantize is None:
        return []
    if isinstance(quantize, str):
        return [("", quantize)]
    return [(pattern, encoding) for pattern, encoding in quantize.items()]


def _style(style: str | None) -> str:
    if style is None:
        return ""
    if style in ("modelopt", "compressed-tensors"):
        return style
    raise make("plan.options", "unknown style", field="style", found=str(style))


def _listed(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _folder(source: Any) -> str:
    """The folder that the source is; empty where it is something else."""
    if isinstance(source, str | bytes | os.PathLike) and Path(os.fsdecode(source)).is_dir():
        return os.fsdecode(source)
    return ""


def _open(path: Checkpoint, allow_links: bool) -> Catalog:
    return inspect(path, allow_links=allow_links, gguf_rank_max=_RANK_MAX)


def _chosen(
    rules: Rules | None, source: Any, catalog: _core.Catalog
) -> tuple[str, _core.Recipes | None]:
    """Rules as JSON, and recipes; at most one of them is there."""
    if rules is None:
        return "", None
    if isinstance(rules, Traced):
        if not isinstance(source, Catalog):
            message = "traced recipes belong to the catalog that they were traced with: pass that"
            raise make("plan.options", message, field="source")
        errors = [finding for finding in rules.findings if finding.severity == "error"]
        if errors:
            error = make(errors[0].code, errors[0].message)
            error.findings = rules.findings
            raise error
        return "", rules.recipes
    if isinstance(rules, RulesText):
        return _read(rules.text, catalog)
    if not isinstance(rules, str | os.PathLike):
        return rules_text(rules), None
    return _read(read_text(rules), catalog)


def _as_text(rules: Rules | None) -> RulesText | None:
    """Rules in a form that can be passed to another process."""
    if isinstance(rules, Traced):
        message = "tasks take no traced rules: save them with save_recipes, and pass the file"
        raise make("plan.options", message, field="rules")
    if rules is None or isinstance(rules, RulesText):
        return rules
    if isinstance(rules, str | os.PathLike):
        return RulesText(read_text(rules))
    return RulesText(rules_text(rules))


def _read(text: str, catalog: _core.Catalog) -> tuple[str, _core.Recipes | None]:
    if _core.is_rules_json(text):
        return text, None
    return "", _core.Recipes.from_json(catalog, text)


def _planned(conversion: _core.Conversion) -> ConvertReport:
    return ConvertReport(
        outputs=[],
        seconds=0.0,
        bytes_read=conversion.bytes_to_read,
        bytes_written=conversion.bytes_to_write,
        peak_bytes=conversion.peak_bytes,
        findings=conversion.findings,
        table=conversion.to_table(),
        files=conversion.file_count,
    )
