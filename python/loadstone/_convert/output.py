"""Output files of conversions and merges, and the core's arguments for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadstone import _core
from loadstone._base import machine
from loadstone._base.errors import PlanError, count_argument, make, unknown
from loadstone._base.progress import shown
from loadstone._files.weighted import patterns_of

Quantize = str | Mapping[str, str]
STYLES = ("modelopt", "compressed-tensors")


@dataclass
class ConvertReport:
    """The result of :func:`convert`, or with ``dry_run`` the expected one.

    Attributes:
        outputs: the files that were written, the index last; empty after a dry run. With ``part``
            its shards, at their temporary paths.
        seconds: wall time.
        bytes_read, bytes_written: transposed tensors may be read more than once.
        bytes_read_ahead: bytes that the system was asked to prefetch into its page cache.
        bytes_kept: in files that earlier runs finished.
        peak_bytes: peak memory, in addition to the memory of the process before.
        findings: problems, most severe first.
        table: sources and targets as a readable table.
        files: count of files that hold tensors: one, or the shards.
        sync_seconds: part of ``seconds`` spent in syncing files to the disk.
        page_cache: ``"release"`` where pages of the files left the page cache, else ``"keep"``.
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
    page_cache: str = "keep"
    bytes_read_ahead: int = 0

    def __str__(self) -> str:
        return self.table

    def __repr__(self) -> str:
        return (
            f"ConvertReport({len(self.outputs)} files, {self.bytes_written} bytes written "
            f"in {self.seconds:.3f} s)"
        )


@dataclass(frozen=True)
class Form:
    """Files that a target's name asks for: one, shards next to each other, or a folder."""

    is_folder: bool
    arguments: dict[str, Any]


def form_of(target: str, shard_size: int | str | None, name: str | None) -> Form:
    format = _core.format_of_target(target)
    is_split = format == "gguf" and shard_size is not None
    if format is not None and shard_size is not None and not is_split:
        raise make("plan.options", "a single file has no shards: pass a folder", field="shard_size")
    arguments = {
        "format": format or "safetensors",
        "one_file": format is not None and not is_split,
        "is_split": is_split,
        "stem": Path(target).stem if is_split else name or "",
    }
    return Form(format is None, arguments)


def carry_out(
    conversion: _core.Conversion,
    target: str,
    progress: bool | Callable[[int, int], object],
    resume: bool,
    part: tuple[int, int] | None,
    finish: bool,
    receipt: str | None = None,
    page_cache: str = "auto",
) -> ConvertReport:
    try:
        conversion.require_ok()
    except PlanError as error:
        error.findings = conversion.findings
        raise
    if part is not None:
        index, count = part
        part = count_argument("part", index), count_argument("part", count)
    with shown(progress, "converting") as callback:
        report = _core.convert(
            conversion, target, callback, resume, part, finish, receipt or "", page_cache
        )
    return ConvertReport(
        outputs=[Path(each) for each in report.outputs],
        **report.numbers(),
        page_cache=report.page_cache,
        findings=report.findings,
        table=conversion.to_table(),
        files=conversion.file_count,
    )


def dry_report(conversion: _core.Conversion, target: str) -> ConvertReport:
    has_errors = any(each.severity == "error" for each in conversion.findings)
    stays = [] if has_errors else conversion.check_target(target)
    return ConvertReport(
        outputs=[],
        seconds=0.0,
        bytes_read=conversion.bytes_to_read,
        bytes_written=conversion.bytes_to_write,
        peak_bytes=conversion.peak_bytes,
        findings=[*conversion.findings, *stays],
        table=conversion.to_table(),
        files=conversion.file_count,
    )


def format_rows(quantize: Quantize | None) -> list[tuple[str, str]]:
    """Return patterns with their encodings, in order; an empty pattern matches all names."""
    if quantize is None:
        return []
    if isinstance(quantize, str):
        return [("", quantize)]
    if not isinstance(quantize, Mapping) or not all(
        isinstance(each, str) for pair in quantize.items() for each in pair
    ):
        raise make(
            "plan.options",
            "files take the name of an encoding, or a mapping of patterns to names",
            field="quantize",
            found=str(quantize),
        )
    return list(quantize.items())


def _style(style: str | None) -> str:
    if style is None:
        return ""
    if style in STYLES:
        return style
    raise unknown("style", "style", style, STYLES)


def _sizes(shard_size: int | str | None, max_memory: int | str | None) -> dict[str, Any]:
    given = {"shard_size": shard_size, "max_memory": max_memory}
    shard, memory = (
        None if size is None else machine.byte_count(size, field) for field, size in given.items()
    )
    return {"shard_bytes_max": shard, "memory_bytes_max": memory}


def folder_of(source: Any) -> str:
    """Return the source's folder; empty if the source is not a folder."""
    if not isinstance(source, str | bytes | os.PathLike):
        return ""
    path = os.fsdecode(source)
    return path if _core.is_remote(path) or Path(path).is_dir() else ""


def settings_of(given: Mapping[str, Any], source: Any, form: Form) -> dict[str, Any]:
    """Return the core's arguments that conversions and merges share."""
    same = ("mode", "allow_non_finite", "copy_code", "beyond_ggml")
    return {
        "block_dtype": str(given["block_dtype"]),
        **form.arguments,
        **_sizes(given["shard_size"], given["max_memory"]),
        "threads": count_argument("threads", given["threads"] or 0),
        "formats": format_rows(given["quantize"]),
        "include": patterns_of(given["include"]),
        "exclude": patterns_of(given["exclude"]),
        "style": _style(given["style"]),
        "imatrix": "" if given["imatrix"] is None else os.fsdecode(given["imatrix"]),
        "folder": folder_of(source),
        **{name: given[name] for name in same},
    }
