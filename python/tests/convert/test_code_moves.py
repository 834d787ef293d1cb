"""Codes are moved to the layout of another encoding: they stay as they are, -0 included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from command import output, run
from safetensors.torch import load_file, save_file

import loadstone

NAME = "model.layers.0.mlp.down_proj"
ROWS, COLUMNS = 256, 512
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
GGUF = {"general.architecture": "llama"}
Tensors = dict[str, torch.Tensor]


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_bytes(*shape: int, least: int = 0, most: int = 255) -> torch.Tensor:
    return torch.randint(least, most + 1, shape, generator=random(1), dtype=torch.uint8)


def fp8_codes() -> torch.Tensor:
    codes = some_bytes(ROWS, COLUMNS)
    return torch.where(codes & 0x7F == 0x7F, 0, codes).view(E4M3)


CODES = some_bytes(ROWS, COLUMNS // 2)
POWERS = some_bytes(ROWS, COLUMNS // 32, least=3, most=250)
E4M3_SCALES = some_bytes(ROWS, COLUMNS // 16, least=1, most=126).view(E4M3)
HALVES = (torch.rand(ROWS, COLUMNS // 32, generator=random(2)) - 0.5).half()
SHAPE = torch.tensor([ROWS, COLUMNS])


def swapped(codes: torch.Tensor) -> torch.Tensor:
    return codes << 4 | codes >> 4


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """Order scales like ComfyUI: tiles of 128 rows and 4 columns."""
    rows, columns = scales.shape
    tiles = scales.view(torch.uint8).view(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns).view(scales.dtype)


def packed(codes: torch.Tensor, scales: torch.Tensor) -> Tensors:
    return {
        f"{NAME}.weight_packed": codes.view(torch.int32),
        f"{NAME}.weight_scale": scales,
        f"{NAME}.weight_shape": SHAPE,
    }


def scaled(codes: torch.Tensor, scales: torch.Tensor, *more: torch.Tensor) -> Tensors:
    suffixes = ("", "_scale", "_scale_2")
    return {
        f"{NAME}.weight{suffix}": each
        for suffix, each in zip(suffixes, (codes, scales, *more), strict=False)
    }


SOURCES: dict[str, Tensors] = {
    "gpt-oss": {
        f"{NAME}.weight_blocks": CODES.view(ROWS, -1, 16),
        f"{NAME}.weight_scales": POWERS,
    },
    "modelopt-mxfp4": scaled(CODES, POWERS),
    "deepseek": {f"{NAME}.weight": CODES.view(torch.int8), f"{NAME}.scale": POWERS.view(E8M0)},
    "modelopt-nvfp4": scaled(CODES, E4M3_SCALES, torch.tensor(0.0013)),
    "divided-nvfp4": {
        f"{NAME}.weight_packed": CODES,
        f"{NAME}.weight_scale": E4M3_SCALES,
        f"{NAME}.weight_global_scale": torch.tensor([1024.0]),
    },
    "comfy-nvfp4": {
        **scaled(swapped(CODES), tiled(E4M3_SCALES), torch.tensor(0.0013)),
        f"{NAME}.comfy_quant": torch.frombuffer(
            bytearray(b'{"format": "nvfp4"}'), dtype=torch.uint8
        ),
    },
    "int4": packed(CODES, HALVES),
    "int4-bf16": packed(CODES, HALVES.bfloat16()),
    "int4-128": packed(CODES, HALVES[:, : COLUMNS // 128].float().abs().half()),
    "int4-zeros": {
        **packed(CODES, HALVES),
        f"{NAME}.weight_zero_point": torch.full(
            (ROWS // 8, COLUMNS // 32), 0x88888888 - 2**32, dtype=torch.int32
        ),
    },
    "int8": packed(some_bytes(ROWS, COLUMNS), torch.rand(ROWS, 1, generator=random(4)).half()),
    "fp8": scaled(fp8_codes(), torch.tensor(0.3)),
    "fp8-rows": scaled(fp8_codes(), torch.rand(ROWS, 1, generator=random(3)) + 0.1),
    "fp8-blocks": {
        f"{NAME}.weight": fp8_codes(),
        f"{NAME}.weight_scale_inv": torch.rand(2, 4, generator=random(3)) + 0.1,
    },
    "mxfp8": scaled(fp8_codes(), POWERS // 2 + 40),
}
# Sources, encodings, and the codes of both.
PAIRS = [
    *((source, "mxfp4", CODES) for source in ("gpt-oss", "modelopt-mxfp4", "deepseek")),
    *((source, "nvfp4", CODES) for source in SOURCES if source.endswith("nvfp4")),
    *(("fp8", encoding, fp8_codes()) for encoding in ("fp8", "fp8-channel", "fp8-block")),
    ("fp8-rows", "fp8-channel", fp8_codes()),
    ("fp8-blocks", "fp8-block", fp8_codes()),
    ("mxfp8", "mxfp8", fp8_codes()),
    ("int8", "int8-channel", some_bytes(ROWS, COLUMNS) ^ 0x80),
]


def write(folder: Path, name: str, change: Callable[[Tensors], None] | None = None) -> Path:
    tensors = {key: tensor.clone() for key, tensor in SOURCES[name].items()}
    if change is not None:
        change(tensors)
    path = folder / f"{name}.safetensors"
    save_file(tensors, path)
    return path


def convert(source: Path, target: Path, encoding: str, **options: Any) -> Any:
    """Convert with the package and with the command; return the package's report."""
    is_gguf = target.suffix == ".gguf"
    if is_gguf:
        options["metadata"] = GGUF
    report = loadstone.convert(source, target, quantize=encoding, include=[".*"], **options)
    if not is_gguf:
        second = target.with_name("second.safetensors")
        quantize = ("--quantize", encoding, "--include", ".*", "--threads", "1")
        output("convert", source, second, *quantize, "--max-memory", "4MB")
        assert second.read_bytes() == target.read_bytes()
        second.unlink()
    return report


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def decoded(path: Path) -> torch.Tensor:
    target = path.with_name(f"{path.name}-values.safetensors")
    loadstone.convert(path, target, dequantize=True, dtype="float32")
    (values,) = (each for name, each in load_file(target).items() if name.endswith("weight"))
    target.unlink()
    return values


@pytest.mark.parametrize(("source", "encoding", "codes"), PAIRS)
def test_codes_stay(tmp_path: Path, source: str, encoding: str, codes: torch.Tensor) -> None:
    before, after = write(tmp_path, source), tmp_path / "out.safetensors"
    report = convert(before, after, encoding)
    (row,) = report.requantized
    assert row.exact_blocks == row.blocks > 0
    found = load_file(after)[f"{NAME}.weight"]
    assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(bits(decoded(after)), bits(decoded(before)))


@pytest.mark.parametrize("source", ["int4", "int4-bf16", "int4-128", "int4-zeros"])
def test_codes_stay_in_q4_0(tmp_path: Path, source: str) -> None:
    before, after = write(tmp_path, source), tmp_path / "out.gguf"
    convert(before, after, "q4_0")
    (tensor,) = gguf.GGUFReader(after).tensors
    found = gguf.dequantize(tensor.data, tensor.tensor_type)
    assert np.array_equal(found.view(np.int32), decoded(before).numpy().view(np.int32))


def test_gguf_blocks_become_components(tmp_path: Path) -> None:
    source = write(tmp_path, "gpt-oss")
    loadstone.convert(source, tmp_path / "blocks.gguf", metadata=GGUF)
    convert(tmp_path / "blocks.gguf", tmp_path / "out.safetensors", "mxfp4")
    (name,) = (each for each in load_file(tmp_path / "out.safetensors") if each.endswith("weight"))
    assert torch.equal(load_file(tmp_path / "out.safetensors")[name], CODES)


def spoil(value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{NAME}.weight_scale"][3, 5] = value

    return change


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-7])
def test_a_block_whose_scale_does_not_fit_is_encoded(tmp_path: Path, scale: float) -> None:
    """The other blocks keep their codes, for any number of threads and any memory limit."""
    source = write(tmp_path, "int4-bf16", spoil(scale))
    options: list[dict[str, Any]] = [{}, {"threads": 1, "max_memory": 4 << 20}]
    found = []
    for i, each in enumerate(options):
        (row,) = convert(source, tmp_path / f"{i}.gguf", "q4_0", **each).requantized
        (tensor,) = gguf.GGUFReader(tmp_path / f"{i}.gguf").tensors
        found.append(tensor.data.copy())
    assert np.array_equal(found[0], found[1])
    scales = load_file(source)[f"{NAME}.weight_scale"]
    fits = scales.half() == scales.float()
    assert row.blocks - row.exact_blocks == (~fits).sum() == (scale != 0)
    values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
    is_same = (bits(values) == bits(decoded(source))).view(ROWS, -1, 32).all(-1)
    assert torch.equal(is_same, fits & (scales != 0))
    halves = torch.from_numpy(found[0].reshape(ROWS, -1, 18)[:, :, 2:])
    adjacent = torch.cat([halves & 15, halves >> 4], -1)
    codes = adjacent[..., ::2] | adjacent[..., 1::2] << 4
    assert torch.equal(codes[is_same], CODES.view(ROWS, -1, 16)[is_same])


@pytest.mark.parametrize(
    ("source", "encoding", "part", "value"),
    [("gpt-oss", "mxfp4", "weight_scales", 255), ("fp8", "fp8-channel", "weight", 0x7F)],
)
def test_values_that_are_not_finite_are_reported(
    tmp_path: Path, source: str, encoding: str, part: str, value: int
) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{NAME}.{part}"].view(torch.uint8)[3, 5] = value

    path = write(tmp_path, source, change)
    options = ("--quantize", encoding, "--include", ".*")
    done = run("convert", path, tmp_path / "out.safetensors", *options)
    assert done.returncode != 0
    assert "element" in done.stderr
    output("convert", path, tmp_path / "out.safetensors", *options, "--allow-non-finite")


def test_weights_that_share_a_scale(tmp_path: Path) -> None:
    """Gate and up share a scale in the output, so their codes stay only if they do before."""
    for is_shared in (True, False):
        tensors: Tensors = {}
        for i, name in enumerate(("gate", "up")):
            path = f"model.layers.0.mlp.{name}_proj.weight"
            tensors[path] = CODES.clone()
            tensors[f"{path}_scale"] = E4M3_SCALES.clone()
            tensors[f"{path}_scale_2"] = torch.tensor(0.0013 if is_shared else 0.001 + 0.0003 * i)
        source = tmp_path / f"{is_shared}.safetensors"
        target = tmp_path / f"{is_shared}-out.safetensors"
        save_file(tensors, source)
        report = loadstone.convert(source, target, quantize="nvfp4", include=[".*"])
        (row,) = report.requantized
        assert (row.exact_blocks == row.blocks) == is_shared
        gate, up = (
            load_file(target)[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up")
        )
        assert (torch.equal(gate, CODES) and torch.equal(up, CODES)) == is_shared
