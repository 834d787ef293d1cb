"""Conversions from codes to codes: a block keeps its values if the new encoding can hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from command import output
from safetensors.torch import load_file, save_file

import loadstone

LAYER = "model.layers.0"
EXPERT = f"{LAYER}.mlp.experts.0"
E4M3_MOST = 448


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def save(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 1, **config}))
    return folder


def gpt_oss(folder: Path, exponents: tuple[int, int] = (118, 126)) -> Path:
    random = generator()
    tensors = {}
    for name, (rows, groups) in {"gate_up_proj": (256, 4), "down_proj": (128, 4)}.items():
        path = f"{LAYER}.mlp.experts.{name}"
        shape = (2, rows, groups)
        scales = torch.randint(*exponents, shape, generator=random, dtype=torch.uint8)
        codes = torch.randint(0, 256, (*shape, 16), generator=random, dtype=torch.uint8)
        tensors |= {f"{path}_blocks": codes, f"{path}_scales": scales}
        tensors[f"{path}_bias"] = torch.randn(2, rows, generator=random).bfloat16()
    return save(
        folder,
        tensors,
        model_type="gpt_oss",
        hidden_size=128,
        intermediate_size=128,
        num_local_experts=2,
        quantization_config={"quant_method": "mxfp4"},
    )


def values(source: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Decode all tensors to F32."""
    target = source.parent / f"{source.name}-values.safetensors"
    loadstone.convert(source, target, dequantize=True, dtype="float32", **options)
    found = load_file(target)
    target.unlink()
    return {name: tensor for name, tensor in found.items() if name.endswith("weight")}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def gguf_values(path: Path) -> dict[str, np.ndarray]:
    reader = gguf.GGUFReader(path)
    return {each.name: gguf.dequantize(each.data, each.tensor_type) for each in reader.tensors}


@pytest.mark.parametrize("encoding", ["nvfp4", "fp8-block", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
def test_mxfp4_stays_exact(tmp_path: Path, encoding: str, style: str) -> None:
    source = gpt_oss(tmp_path / "source")
    separate = {"experts": "separate"}
    report = loadstone.convert(
        source, tmp_path / "python", quantize=encoding, style=style, threads=1, **separate
    )
    (found,) = report.requantized
    assert (found.encoding, found.tensors, found.largest_error) == (encoding, 6, 0)
    assert found.exact_blocks == found.blocks > 0
    assert f"{encoding}: {found.blocks} of {found.blocks} blocks exact (6 tensors)\n" in str(report)
    text = output(
        *("convert", source, tmp_path / "command", "--quantize", encoding, "--style", style),
        *("--experts", "separate", "--threads", "4"),
    )
    assert_equal(values(tmp_path / "python"), values(source, **separate))
    assert f"\n{encoding}: " in text
    for file in tmp_path.joinpath("python").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "command" / file.name).read_bytes()


# The exponents of the scales differ by more than NVFP4's scales can.
def test_most_blocks_of_nvfp4_are_exact(tmp_path: Path) -> None:
    source = gpt_oss(tmp_path / "source", (100, 126))
    out = tmp_path / "out"
    report = loadstone.convert(
        source, out, quantize="nvfp4", experts="separate", receipt="xxh3-128"
    )
    found, expected = values(out), values(source, experts="separate")
    receipt = json.loads((out / "receipt.json").read_text())
    losses = {
        each["name"]: each["loss"]
        for file in receipt["outputs"]
        for each in file["tensors"]
        if "loss" in each
    }
    blocks = exact = 0
    largest = 0.0
    for name, tensor in expected.items():
        errors = (found[name] - tensor).abs().view(-1, 16).amax(-1)
        most = tensor.abs().view(-1, 16).amax(-1)
        error = (errors.double() / most)[errors > 0].max().item()
        count, equal = len(errors), int((errors == 0).sum())
        assert 0.5 * count < equal < count, name
        loss = {"blocks": count, "exact_blocks": equal, "largest_error": error}
        zeroed = int(((found[name].view(-1, 16) == 0).all(-1) & (most > 0)).sum())
        assert losses[name] == loss | ({"zeroed_blocks": zeroed} if zeroed else {})
        blocks, exact, largest = blocks + count, exact + equal, max(largest, error)
    (row,) = report.requantized
    assert (row.blocks, row.exact_blocks, row.largest_error) == (blocks, exact, largest)


def packed_int4(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes from -8 to 7 like compressed-tensors."""
    nibbles = (codes + 8).view(codes.shape[0], -1, 8)
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def int4_groups(path: Path, *, least: int) -> torch.Tensor:
    """Save a weight in groups of 32, and return its values."""
    rows, columns = 128, 256
    random = generator()
    codes = torch.randint(least, 8, (rows, columns), generator=random)
    scales = (torch.rand(rows, columns // 32, generator=random) * 0.02 + 0.001).bfloat16()
    name = "model.layers.1.mlp.experts.0.up_proj"
    tensors = {
        f"{name}.weight_packed": packed_int4(codes),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": torch.tensor([rows, columns], dtype=torch.int32),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return codes * scales.float().repeat_interleave(32, -1)


@pytest.mark.parametrize("least", [-7, -8])
@pytest.mark.parametrize("encoding", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_int4_stays_exact_in_gguf(tmp_path: Path, encoding: str, least: int) -> None:
    source, target = tmp_path / "source.safetensors", tmp_path / "out.gguf"
    expected = int4_groups(source, least=least)
    loadstone.convert(
        source,
        target,
        quantize=encoding,
        include=[".*"],
        metadata={"general.architecture": "deepseek2"},
    )
    (found,) = gguf_values(target).values()
    assert torch.equal(torch.from_numpy(found), expected)


def fp8_blocks(folder: Path) -> Path:
    """Save weights whose scales are powers of two, and codes that fit one scale."""
    random = generator(2)
    tensors = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        codes = torch.randint(8, 16, (256, 256), generator=random) * 2.0 ** torch.randint(
            -3, 1, (256, 256), generator=random
        )
        codes *= torch.randint(0, 2, (256, 256), generator=random) * 2 - 1
        path = f"{EXPERT}.{name}.weight"
        tensors[path] = codes.to(torch.float8_e4m3fn)
        tensors[f"{path}_scale_inv"] = 2.0 ** torch.randint(-12, -8, (2, 2), generator=random)
    return save(
        folder,
        tensors,
        model_type="deepseek_v3",
        quantization_config={
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "fmt": "e4m3",
        },
    )


@pytest.mark.parametrize("encoding", ["fp8", "fp8-channel", "fp8-block", "mxfp8"])
def test_fp8_blocks_stay_exact(tmp_path: Path, encoding: str) -> None:
    source = fp8_blocks(tmp_path / "source")
    for threads in (1, 4):
        loadstone.convert(source, tmp_path / f"out{threads}", quantize=encoding, threads=threads)
    assert_equal(values(tmp_path / "out1"), values(source))
    file = "model.safetensors"
    assert (tmp_path / "out1" / file).read_bytes() == (tmp_path / "out4" / file).read_bytes()
    scales = load_file(tmp_path / "out1" / file)
    if encoding == "fp8":  # gate and up share a scale
        gate, up = (scales[f"{EXPERT}.{name}_proj.weight_scale"] for name in ("gate", "up"))
        assert torch.equal(gate, up)


def test_scales_in_f32_are_not_rounded(tmp_path: Path) -> None:
    """Values of FP8 with F32 scales have up to 28 bits, so BF16 would round them."""
    random = generator(3)
    path = f"{LAYER}.self_attn.o_proj.weight"
    tensors = {
        path: torch.randn(256, 256, generator=random).to(torch.float8_e4m3fn),
        f"{path}_scale_inv": torch.rand(2, 2, generator=random) + 0.5,
    }
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source = save(tmp_path / "source", tensors, model_type="llama", quantization_config=config)
    loadstone.convert(source, tmp_path / "out", quantize="fp8-block")
    assert_equal(values(tmp_path / "out"), values(source))


@pytest.mark.parametrize("encoding", ["fp8", "fp8-block", "int8-channel", "int4", "nvfp4", "mxfp4"])
def test_codes_survive_a_second_conversion(tmp_path: Path, encoding: str) -> None:
    random = generator(4)
    tensors = {
        f"{EXPERT}.{name}_proj.weight": torch.randn(256, 256, generator=random)
        for name in ("gate", "up", "down")
    }
    source = save(tmp_path / "source", tensors, model_type="llama")
    loadstone.convert(source, tmp_path / "first", quantize=encoding)
    loadstone.convert(tmp_path / "first", tmp_path / "second", quantize=encoding)
    assert_equal(values(tmp_path / "second"), values(tmp_path / "first"))


def test_float_sources_get_the_usual_bytes(tmp_path: Path) -> None:
    """The values are codes of NVFP4, but their source is plain, so the search does not run."""
    path = f"{LAYER}.mlp.down_proj.weight"
    codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
    plain = codes[torch.randint(0, 7, (128, 128), generator=generator(5))].bfloat16()
    source = save(tmp_path / "source", {path: plain}, model_type="llama")
    loadstone.convert(source, tmp_path / "out", quantize="nvfp4")
    found = load_file(tmp_path / "out" / "model.safetensors")
    unit = loadstone.quantize(plain, "nvfp4")
    assert torch.equal(found[path], unit.parts["data"])
    assert torch.equal(found[f"{path}_scale_2"], unit.parts["scale_2"])


@pytest.mark.parametrize("encoding", ["nvfp4", "fp8", "fp8-block"])
def test_modelopts_bytes_stay(tmp_path: Path, encoding: str) -> None:
    source = gpt_oss(tmp_path / "source")
    options = {"quantize": encoding, "mode": "modelopt-compat"}
    loadstone.convert(source, tmp_path / "plain", dequantize=True, experts="separate")
    loadstone.convert(tmp_path / "plain", tmp_path / "expected", **options)
    loadstone.convert(source, tmp_path / "found", experts="separate", **options)
    file = "model.safetensors"
    assert_equal(load_file(tmp_path / "found" / file), load_file(tmp_path / "expected" / file))


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("to", "scale"), [("mxfp8", INF), ("fp8-channel", INF), ("nvfp4", INF), ("nvfp4", NAN)]
)
def test_values_that_are_not_finite_are_not_counted_as_exact(
    to: str, scale: float, tmp_path: Path
) -> None:
    """NaN in FP8 stays NaN, so it is exact there."""
    scales = torch.ones(16, 1)
    tensors = {
        "model.layers.0.up_proj.weight": torch.ones(16, 64).to(torch.float8_e4m3fn),
        "model.layers.0.up_proj.weight_scale": scales,
    }
    exact = []
    for row_scale in (1.0, scale):  # the first is the control
        scales[3] = row_scale
        source, target = tmp_path / f"{row_scale}.safetensors", tmp_path / f"o{row_scale}"
        save_file(tensors, source)
        report = loadstone.convert(
            source, target, quantize={"": to}, include=[".*"], allow_non_finite=True
        )
        (loss,) = report.requantized
        exact.append((loss.exact_blocks, loss.blocks))
    assert exact[0][0] == exact[0][1]
    assert exact[1][0] < exact[1][1]


def test_the_plan_knows_that_experts_are_transposed(tmp_path: Path) -> None:
    """A block of NVFP4 in a transposed stack has values of 16 blocks of MXFP4."""
    source = gpt_oss(tmp_path / "source")
    for experts, answer in {"keep": "lossy", "separate": "exact where scales fit"}.items():
        options: dict[str, Any] = {"quantize": "nvfp4", "experts": experts, "include": ["experts"]}
        report = loadstone.convert(source, tmp_path / "out", dry_run=True, **options)
        texts = [each.message for each in report.findings if each.code == "convert.requantized"]
        assert texts
        assert {text.split(": ")[1].split(", ")[0] for text in texts} == {answer}
