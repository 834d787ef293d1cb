"""Converts files from each encoding to each other encoding, and compares the values.

``tools/lossless_table.py`` writes the results to ``docs/lossless.md``.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import torch
from codec_files import CODECS
from safetensors.torch import load_file, save_file

import loadstone

PAGE = Path(__file__).resolve().parents[3] / "docs" / "lossless.md"
NAME = "model.layers.0.mlp.up_proj.weight"
SHAPE = (128, 1024)
ARCH = {"general.architecture": "none"}
FOLDERS = (
    *("nvfp4", "mxfp4", "mxfp8", "fp8", "fp8-channel", "fp8-block"),
    *("int4", "int4-awq", "int4-packed", "int4-packed-32", "int8-channel"),
    *("nf4", "fp4", "int8"),
)
BLOCKS = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq3_s", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0", "mxfp4-gguf", "nvfp4-gguf"),
)
ENCODINGS = (*FOLDERS, *BLOCKS)
FIDELITIES = ("exact", "exact where scales fit", "lossy")


@dataclasses.dataclass(frozen=True)
class Source:
    """A file with one encoding, and its decoded values in F32."""

    path: Path
    values: dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The plan's prediction for the quantized tensors, and the result of the conversion.

    Attributes:
        predicted: fidelities in the plan's findings; empty if the tensors keep their encoding.
        blocks, exact_blocks: counts of the report.
        is_equal: all values of quantized tensors are equal.
        error: root mean square of the differences, relative to that of the values.
    """

    predicted: frozenset[str]
    blocks: int
    exact_blocks: int
    is_equal: bool
    error: float


def normal_values() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(11))


def target_path(folder: Path, encoding: str) -> Path:
    return folder / f"target.{'gguf' if encoding in BLOCKS else 'safetensors'}"


def convert(
    source: Path, target: Path, encoding: str, dry_run: bool = False
) -> loadstone.ConvertReport:
    metadata = ARCH if target.suffix == ".gguf" and source.suffix != ".gguf" else None
    if target.suffix == ".gguf" and source.is_dir():
        source = next(source.glob("*.safetensors"))  # not llama.cpp's own converter
    return loadstone.convert(
        source, target, quantize=encoding, include=[".*"], metadata=metadata, dry_run=dry_run
    )


def decoded(path: Path) -> dict[str, torch.Tensor]:
    target = path.with_name("decoded.safetensors")
    loadstone.convert(path, target, dequantize=True, dtype="float32")
    values = load_file(target)
    target.unlink()
    return values


def normal_source(folder: Path, encoding: str) -> Source:
    """Write normally distributed values in an encoding."""
    folder.mkdir(parents=True)
    plain = folder / "plain.safetensors"
    values = normal_values()
    # Scales of int4-packed have the dtype of the values, which is usually BF16.
    save_file({NAME: values.bfloat16() if "packed" in encoding else values}, plain)
    path = target_path(folder, encoding)
    convert(plain, path, encoding)
    return Source(path, decoded(path))


def codec_source(folder: Path, codec: str) -> Source:
    """Write random codes and scales with the writer of a codec."""
    written = CODECS[codec](folder / "model")
    names = set(written.quantized) & set(written.numbers)
    return Source(written.path, {name: written.numbers[name].float() for name in names})


def outcome(source: Source, encoding: str, folder: Path) -> Outcome:
    """Convert a source to an encoding."""
    target = target_path(folder, encoding)
    planned = convert(source.path, target, encoding, dry_run=True)
    report = convert(source.path, target, encoding)
    texts = [each.message for each in planned.findings if each.code == "convert.requantized"]
    predicted = frozenset(re.split(r": |, (?:otherwise|with) about", text)[1] for text in texts)
    assert predicted <= set(FIDELITIES)
    assert texts == [each.message for each in report.findings if each.code == "convert.requantized"]
    left = {name for name in source.values if f"'{name}'" in " ".join(_left_alone(planned))}
    values = decoded(target)
    pairs = [
        (values[name].reshape(-1), tensor.reshape(-1))
        for name, tensor in source.values.items()
        if name in values and name not in left
    ]
    found, expected = (
        (torch.cat(each) for each in zip(*pairs, strict=True)) if pairs else 2 * [torch.ones(1)]
    )
    same = (found == expected) | (found.isnan() & expected.isnan())
    finite = expected.isfinite() & found.isfinite()
    difference = (found - expected)[finite].double().norm()
    return Outcome(
        predicted,
        sum(each.blocks for each in report.requantized),
        sum(each.exact_blocks for each in report.requantized),
        bool(same.all()),
        float(difference / expected[finite].double().norm().clamp(min=1e-300)),
    )


def _left_alone(report: loadstone.ConvertReport) -> list[str]:
    return [each.message for each in report.findings if each.code == "convert.left_alone"]


def cell(result: Outcome) -> str:
    """Return the text of a cell of the table."""
    if not result.predicted or result.predicted == {"exact"}:
        return "**0**"
    if result.predicted == {"lossy"}:
        return f"{100 * result.error:.2g}"
    return f"s {100 * result.exact_blocks / result.blocks:.0f}"


def table(sources: dict[str, Source], targets: tuple[str, ...], folder: Path) -> str:
    lines = ["", "| from / to | " + " | ".join(targets) + " |", "|---" * (len(targets) + 1) + "|"]
    for name, source in sources.items():
        row = [cell(outcome(source, target, folder)) for target in targets]
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join([*lines, ""])


def cells_of_page() -> dict[tuple[str, str], str]:
    """Return the cells by source and target."""
    found = {}
    for block in PAGE.read_text().split("| from / to |")[1:]:
        rows = [line.strip("| ").split(" | ") for line in block.split("\n\n")[0].splitlines()]
        for name, *values in rows[2:]:
            found |= {(name, target): value for target, value in zip(rows[0], values, strict=True)}
    return found
