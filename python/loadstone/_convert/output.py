"""Output files of conversions and merges, and the core's arguments for them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from loadstone import _core
from loadstone._base import machine
from loadstone._base.arguments import count_argument, optional_path, string_list, wrong_kind
from loadstone._base.errors import PlanError, new_error, unknown_word_error
from loadstone._base.lazy_torch import torch
from loadstone._base.progress import Progress, show_progress
from loadstone._base.vocabulary import Style

Quantize = str | Mapping[str, str]
STYLES = get_args(Style)


@dataclass(frozen=True)
class Requantized:
    """The tensors of one encoding that were quantized in the source, too.

    Attributes:
        encoding: the new encoding.
        tensors: number of tensors.
        blocks: number of blocks: values with their own scale.
        exact_blocks: number of blocks that decode to the same values as in the source.
        largest_error: the largest error, relative to the largest magnitude of its block.
    """

    encoding: str
    tensors: int
    blocks: int
    exact_blocks: int
    largest_error: float


@dataclass
class ConvertReport:
    """The result of :func:`convert`, or with ``dry_run`` the expected result.

    Attributes:
        outputs: the files that were written, the index last; empty after a dry run. With ``part``
            the shards of that part, at their temporary paths.
        seconds: wall time.
        bytes_read, bytes_written: totals; for a dry run, of the work that is left. Transposed
            tensors may be read more than once.
        bytes_read_ahead: bytes that the run asked the system to prefetch into its page cache.
        bytes_kept: bytes of files that earlier runs finished.
        bytes_checked: bytes read to check these files; not included in ``bytes_read``.
        peak_bytes: peak memory, in addition to the memory that the process had before.
        findings: problems, most severe first.
        table: sources and targets as a readable table.
        files: number of files with tensors: one, or the number of shards.
        sync_seconds: part of ``seconds`` spent flushing files to disk.
        page_cache: ``"release"`` if the conversion dropped the files' pages from the page cache,
            else ``"keep"``.
        requantized: the loss of tensors that were quantized in the source, by encoding.
    """

    outputs: list[Path]
    seconds: float
    bytes_read: int
    bytes_written: int
    peak_bytes: int
    findings: list[_core.Finding] = field(default_factory=list)
    table: str = ""
    bytes_kept: int = 0
    bytes_checked: int = 0
    files: int = 0
    sync_seconds: float = 0.0
    page_cache: str = "keep"
    bytes_read_ahead: int = 0
    requantized: list[Requantized] = field(default_factory=list)

    def __str__(self) -> str:
        return self.table

    def __repr__(self) -> str:
        return (
            f"ConvertReport({len(self.outputs)} files, {self.bytes_written} bytes written "
            f"in {self.seconds:.3f} s)"
        )


@dataclass(frozen=True)
class OutputOptions:
    """The keywords that :func:`convert` and :func:`merge` share, see :func:`convert`."""

    block_dtype: torch.dtype | str
    quantize: Quantize | None
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    style: str | None
    mode: str
    imatrix: str | os.PathLike[str] | None
    allow_non_finite: bool
    copy_code: bool
    beyond_ggml: bool
    shard_size: int | str | None
    name: str | None
    max_memory: int | str | None
    threads: int | None
    progress: Progress
    dry_run: bool
    resume: bool
    part: tuple[int, int] | None
    finish: bool
    overwrite: bool
    receipt: str | None
    page_cache: str

    @classmethod
    def from_arguments(cls, keywords: Mapping[str, Any]) -> OutputOptions:
        """Select the options among all keywords of a call."""
        return cls(**{option.name: keywords[option.name] for option in fields(cls)})

    def core_arguments(self, source: Any, target: str) -> dict[str, Any]:
        """Return the core's arguments. The target's name selects one file, shards or a folder."""
        format = _core.format_of_target(target)
        is_split = format == "gguf" and self.shard_size is not None
        if format is not None and self.shard_size is not None and not is_split:
            message = "shard_size requires several files: pass a folder"
            raise new_error("plan.options", message, field="shard_size")
        if self.style is not None and self.style not in STYLES:
            raise unknown_word_error("style", "style", self.style, STYLES)
        return {
            "format": format or "safetensors",
            "one_file": format is not None and not is_split,
            "is_split": is_split,
            "stem": Path(target).stem if is_split else self.name or "",
            "block_dtype": str(self.block_dtype),
            "shard_bytes_max": _byte_count("shard_size", self.shard_size),
            "memory_bytes_max": _byte_count("max_memory", self.max_memory),
            "threads": count_argument("threads", self.threads or 0),
            "formats": format_rows(self.quantize),
            "include": string_list("include", self.include),
            "exclude": string_list("exclude", self.exclude),
            "style": self.style or "",
            "imatrix": optional_path("imatrix", self.imatrix),
            "folder": folder_of(source),
            "mode": self.mode,
            "allow_non_finite": self.allow_non_finite,
            "copy_code": self.copy_code,
            "beyond_ggml": self.beyond_ggml,
        }

    def run(self, conversion: _core.Conversion, target: str) -> ConvertReport:
        """Write the target; for a dry run, only report the planned output."""
        part = self.part
        if part is not None:
            if not isinstance(part, Sequence) or len(part) != 2:
                raise wrong_kind("part", part, "two integers: (1, 4)")
            index, count = part
            part = count_argument("part", index), count_argument("part", count)
        run = _core.ConvertRun(
            resume=self.resume,
            part=part,
            finish=self.finish,
            overwrite=self.overwrite,
            receipt=self.receipt or "",
            page_cache=self.page_cache,
        )
        if self.dry_run:
            return _predict(conversion, target, run)
        require_ok(conversion)
        with show_progress(self.progress, "converting") as callback:
            report = _core.convert(conversion, target, callback, run)
        return ConvertReport(
            outputs=[Path(path) for path in report.outputs],
            **report.numbers(),
            page_cache=report.page_cache,
            findings=report.findings,
            table=conversion.to_table() + report.requantized_text,
            files=conversion.file_count,
            requantized=[Requantized(*row) for row in report.requantized],
        )


def require_ok(conversion: _core.Conversion) -> None:
    """Raise the first error of a conversion, with all findings."""
    try:
        conversion.require_ok()
    except PlanError as error:
        error.findings = conversion.findings
        raise


def _predict(conversion: _core.Conversion, target: str, run: _core.ConvertRun) -> ConvertReport:
    is_possible = all(finding.severity != "error" for finding in conversion.findings)
    target_findings = []
    bytes_read, bytes_written = conversion.bytes_to_read, conversion.bytes_to_write
    if is_possible:
        target_findings = conversion.check_target(target, run)
    if is_possible and all(finding.severity != "error" for finding in target_findings):
        bytes_read, bytes_written = conversion.work_left(target, run, target_findings)
    return ConvertReport(
        outputs=[],
        seconds=0.0,
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        peak_bytes=conversion.peak_bytes,
        findings=[*conversion.findings, *target_findings],
        table=conversion.to_table(),
        files=conversion.file_count,
    )


def require_no_errors(findings: list[_core.Finding]) -> None:
    """Raise the first error among the findings, with all findings attached."""
    for finding in findings:
        if finding.severity == "error":
            error = new_error(finding.code, finding.message)
            error.findings = findings
            raise error


def _byte_count(field: str, size: int | str | None) -> int | None:
    return None if size is None else machine.byte_count(size, field)


def format_rows(quantize: Quantize | None) -> list[tuple[str, str]]:
    """Return patterns with their encodings, in order; an empty pattern matches all names."""
    if quantize is None:
        return []
    if isinstance(quantize, str):
        return [("", quantize)]
    if not isinstance(quantize, Mapping) or not all(
        isinstance(text, str) for pair in quantize.items() for text in pair
    ):
        raise new_error(
            "plan.options",
            "quantize must be the name of an encoding or a mapping of patterns to names",
            field="quantize",
            found=str(quantize),
        )
    return list(quantize.items())


def folder_of(source: Any) -> str:
    """Return the path whose companion files the core looks for; empty if there is no such path."""
    return os.fsdecode(source) if isinstance(source, str | bytes | os.PathLike) else ""
