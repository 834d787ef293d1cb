"""Compare a checkpoint with the output of a conversion, without writing the output again."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadstone import _core
from loadstone._base.errors import new_error
from loadstone._base.keywords import names_keywords
from loadstone._base.lazy_torch import torch
from loadstone._base.progress import Progress, show_progress
from loadstone._base.vocabulary import Experts, Mode, Style
from loadstone._convert.convert import Rules, convert, plan_conversion
from loadstone._convert.output import Quantize, require_ok
from loadstone._files.catalog import Catalog, CheckpointPath, open_catalog
from loadstone._files.gguf_metadata import Metadata

_DEFAULTS = {name: each.default for name, each in inspect.signature(convert).parameters.items()}
# Bytes of tensors that the comparison makes at once.
_PART = "256MiB"


@dataclass
class VerifyReport:
    """The result of :func:`verify`.

    Attributes:
        ok: true if ``differences`` is empty and no finding is a warning or an error.
        differences: ``name``, ``kind``, ``found`` and ``expected`` of each difference, as
            ``loadstone verify --json`` lists them.
        bytes_read: bytes of the source and of the output that were read.
        table: the differences as readable text.
        findings: ``severity``, ``code`` and ``message`` of each finding, such as the error
            ``verify.lossy`` of ``lossless=True``.
    """

    ok: bool
    differences: list[dict[str, str]] = field(default_factory=list)
    bytes_read: int = 0
    table: str = ""
    findings: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return self.table


@names_keywords
def verify(
    source: CheckpointPath | Catalog,
    output: CheckpointPath,
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
    dequantize: bool = False,
    experts: Experts = "keep",
    metadata: Metadata | None = None,
    beyond_ggml: bool = False,
    converter: str | os.PathLike[str] | None = None,
    trust_code: bool = False,
    lossless: bool = False,
    threads: int | None = None,
    progress: Progress = False,
    allow_links: bool = False,
) -> VerifyReport:
    """Compare an output with the tensors that a conversion of the source writes.

    >>> loadstone.convert("model.safetensors", "model.gguf", quantize="q8_0")
    >>> assert loadstone.verify("model.safetensors", "model.gguf", quantize="q8_0").ok

    Makes the tensors again, at most 256 MiB at once, and compares names, encodings, shapes and
    every byte. Writes nothing, and does not compare metadata.

    Args:
        source: the source of the conversion, see :func:`convert`.
        output: the checkpoint that the conversion wrote.
        rules, dtype, block_dtype, quantize, include, exclude, style, mode, imatrix: see
            :func:`convert`, like all other arguments: pass those of the conversion.
        lossless: compare the values of the two checkpoints as they are, without a conversion, and
            require that they are equal as real numbers, as ``convert(require_lossless=True)``
            does. Each change of encoding that changed values is a finding ``verify.lossy``, with
            the largest error. Cannot be combined with arguments of the conversion. Default: false.

    Raises:
        PlanError: the conversion is impossible, see :func:`convert`.
        FormatError: the source or the output breaks a rule of its format.
        LoadError: input failed, or a file changed during the comparison.
    """
    given = locals()
    if lossless:
        _refuse_conversion(given)
        first = open_catalog(source, allow_links=allow_links)
        second = open_catalog(output, allow_links=allow_links)
        with show_progress(progress, "verifying") as callback:
            return _report_of(
                _core.compare(
                    first._core,
                    second._core,
                    lossless=True,
                    threads=threads or 0,
                    progress=callback,
                )
            )
    arguments = _DEFAULTS | given | {"shard_size": _PART}
    found = open_catalog(output, allow_links=allow_links)
    # Only the suffix of the name matters, because nothing is written.
    target = "output.gguf" if found.shards[0].endswith(".gguf") else "output"
    _, conversion, _ = plan_conversion(arguments, target)
    require_ok(conversion)
    with show_progress(progress, "verifying") as callback:
        return _report_of(_core.compare_with_conversion(conversion, found._core, callback))


def _refuse_conversion(given: dict[str, Any]) -> None:
    """Reject arguments of a conversion, because a lossless comparison makes none."""
    others = {"source", "output", "lossless", "threads", "progress", "allow_links"}
    for name, value in given.items():
        if name in others or value == _DEFAULTS[name]:
            continue
        message = f"a lossless comparison uses the two checkpoints as they are: omit {name}="
        raise new_error("plan.options", message, field=name)


def _report_of(report: _core.VerifyReport) -> VerifyReport:
    document = json.loads(report.to_json())
    names = ("ok", "differences", "bytes_read", "findings")
    return VerifyReport(**{name: document[name] for name in names}, table=report.to_table())
