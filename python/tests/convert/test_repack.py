"""Codes repacked from one layout to another decode to the same values.

``readback_oracles`` has the values according to the library that defines the folder's layout;
gguf-py has the values of GGUF files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from readback_cells import STYLES, styles_of, written_encodings
from readback_oracles import numbers_in, tensors_in
from safetensors.torch import load_file, save_file

import loadstone

pytest.importorskip("modelopt")
pytest.importorskip("compressed_tensors")

Tensors = dict[str, torch.Tensor]
GENERATOR = torch.Generator().manual_seed(3)
NAME = "model.layers.{}.mlp.up_proj.weight"
METADATA = {"general.architecture": "test"}
BOTH = [encoding for encoding in written_encodings() if styles_of(encoding) == STYLES]


def write_source(folder: Path) -> Path:
    """Write two layers and a norm in BF16."""
    folder.mkdir()
    tensors = {
        NAME.format(layer): torch.randn(256, 384, generator=GENERATOR).bfloat16()
        for layer in range(2)
    }
    tensors["model.norm.weight"] = torch.ones(384).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def write_stored(root: Path, encoding: str, style: str) -> Path:
    """Write the source in an encoding, with global scales that are powers of two, because their
    inverses are exact."""
    folder = root / "stored"
    loadstone.convert(write_source(root / "source"), folder, quantize=encoding, style=style)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("_scale_2", "_global_scale")):
            tensors[name] = torch.full_like(tensors[name], 2.0**-9 if "2" in name else 2.0**9)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def dequantized(path: Path, to: Path) -> Tensors:
    loadstone.convert(path, to, dequantize=True, dtype=torch.float32)
    return load_file(to)


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        bits = [each.reshape(-1).view(torch.uint8) for each in (found[name], tensor)]
        assert torch.equal(*bits), name


def assert_verified(source: Path, output: Path) -> None:
    done = run("verify", source, output)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("encoding", BOTH)
def test_a_style_becomes_the_other_and_back(encoding: str, style: str, tmp_path: Path) -> None:
    other = next(each for each in STYLES if each != style)
    stored = write_stored(tmp_path, encoding, style)
    output, back = tmp_path / "output", tmp_path / "back"
    loadstone.convert(stored, output, style=other, threads=2)
    loadstone.convert(output, back, style=style)
    numbers = dequantized(stored, tmp_path / "a.safetensors")
    assert_same_bits(dequantized(output, tmp_path / "b.safetensors"), numbers)
    assert_same_bits(tensors_in(back), tensors_in(stored))
    assert_same_bits(
        {name: t.float() for name, t in numbers_in(output).items()},
        {name: t.float() for name, t in numbers_in(stored).items()},
    )
    for one, two in ((stored, output), (output, stored), (stored, back)):
        assert_verified(one, two)
        assert_verified(two, two)
    has_claim = (output / "hf_quant_config.json").exists()
    assert has_claim == (other == "modelopt")


def test_a_copy_in_the_style_that_it_has(tmp_path: Path) -> None:
    for style in STYLES:
        root = tmp_path / style
        root.mkdir()
        stored = write_stored(root, "nvfp4", style)
        loadstone.convert(stored, root / "copy", style=style)
        assert_same_bits(tensors_in(root / "copy"), tensors_in(stored))


def change_of_scales(scale: torch.Tensor, style: str) -> float:
    """Return the largest relative change of a block scale if the other style stores 1 / scale."""
    codes = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    products = codes * scale if style == "modelopt" else codes / scale
    others = codes / (1 / scale) if style == "modelopt" else codes * (1 / scale)
    return float((others.double() / products.double() - 1).abs().max())


@pytest.mark.parametrize("style", STYLES)
def test_a_scale_without_an_inverse_is_rounded(style: str, tmp_path: Path) -> None:
    stored = write_stored(tmp_path, "nvfp4", style)
    path = stored / "model.safetensors"
    tensors = load_file(path)
    scales = [name for name in tensors if name.endswith(("_scale_2", "_global_scale"))]
    tensors[scales[0]].fill_(0.0123)
    save_file(tensors, path, metadata={"format": "pt"})
    other = next(each for each in STYLES if each != style)
    words = ("convert", stored, tmp_path / "out", "--style", other)
    with pytest.raises(loadstone.Error, match="no exact inverse") as caught:
        loadstone.convert(stored, tmp_path / "out", style=other, require_lossless=True)
    assert caught.value.code == "convert.lossy"
    assert scales[0] in str(caught.value)
    assert run(*words, "--require-lossless").returncode != 0
    assert not (tmp_path / "out").exists()
    rounding = (
        "the global scale of 1 of 2 tensors is rounded, because F32 has no exact inverse, which "
        f"changes scales by at most {100 * change_of_scales(tensors[scales[0]], style):.2g} %"
    )
    assert f"repacked, exact where scales fit: {rounding}" in run(*words, "--dry-run").stdout
    plan = json.loads(run(*words, "--dry-run", "--json").stdout)
    assert [(row["tensors"], row["rounded"]) for row in plan["repacked"]] == [(2, 1)]
    report = loadstone.convert(stored, tmp_path / "out", style=other)
    (found,) = [each for each in report.findings if each.code == "convert.rounded"]
    assert found.message.startswith(rounding)
    # Codes and block scales are kept, and decoded values change by less than a rounding of F32.
    before, after = tensors_in(stored), tensors_in(tmp_path / "out")
    for name, tensor in before.items():
        if name.endswith((".weight", ".weight_packed", ".weight_scale")) and "norm" not in name:
            kept = [each for each in after.values() if each.dtype == tensor.dtype]
            assert any(
                torch.equal(each.view(torch.uint8), tensor.view(torch.uint8))
                for each in kept
                if each.shape == tensor.shape
            ), name
    numbers = dequantized(stored, tmp_path / "a.safetensors")
    rounded = dequantized(tmp_path / "out", tmp_path / "b.safetensors")
    for name, tensor in numbers.items():
        assert torch.allclose(rounded[name], tensor, rtol=4e-7, atol=0), name
    assert not torch.equal(rounded[NAME.format(0)], numbers[NAME.format(0)])
    # verify accepts this rounding, and --lossless does not.
    assert "ok; a relative error of at most" in run("verify", stored, tmp_path / "out").stdout
    done = run("verify", stored, tmp_path / "out", "--lossless")
    assert done.returncode == 1 and "1 tensor changed from nvfp4 to nvfp4" in done.stdout


@pytest.mark.parametrize("style", STYLES)
def test_the_plan_has_the_error_of_a_rounded_scale(style: str, tmp_path: Path) -> None:
    stored = write_stored(tmp_path, "nvfp4", style)
    other = next(each for each in STYLES if each != style)
    words = ("convert", stored, tmp_path / "b", "--quantize", "nvfp4", "--style", other)
    report = loadstone.convert(stored, tmp_path / "out", style=other, quantize="nvfp4")
    (found,) = [each for each in report.findings if each.code == "convert.requantized"]
    output = run(*words, "--dry-run").stdout
    assert found.message in output
    if other == "compressed-tensors":
        assert "exact where scales fit, otherwise about 1.2e-05 % error" in found.message
        assert "9.5 %" not in output


def test_what_a_style_does_not_hold_is_refused(tmp_path: Path) -> None:
    stored = write_stored(tmp_path, "int4", "modelopt")
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(stored, tmp_path / "out", style="compressed-tensors")
    assert caught.value.code == "convert.lossy"
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(tmp_path / "source", tmp_path / "out", style="modelopt")
    assert (caught.value.code, caught.value.field) == ("plan.options", "style")
    assert not (tmp_path / "out").exists()


REFUSED_BESIDE: dict[str, dict[str, Any]] = {
    "dequantize": {"dequantize": True},
    "experts": {"experts": "fused"},
    "rules": {"rules": [{"op": "rename", "sources": ["a"], "targets": ["b"]}]},
}


@pytest.mark.parametrize("options", REFUSED_BESIDE.values(), ids=REFUSED_BESIDE)
def test_what_does_not_go_with_another_style(options: dict[str, Any], tmp_path: Path) -> None:
    stored = write_stored(tmp_path, "fp8", "modelopt")
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(stored, tmp_path / "out", style="compressed-tensors", **options)
    assert (caught.value.code, caught.value.field) == ("plan.options", "style")


def test_scales_of_activations_are_told(tmp_path: Path) -> None:
    stored = write_stored(tmp_path, "fp8", "modelopt")
    path = stored / "model.safetensors"
    tensors = load_file(path)
    name = NAME.format(0).replace("weight", "input_scale")
    save_file(tensors | {name: torch.tensor(0.5)}, path, metadata={"format": "pt"})
    report = loadstone.convert(stored, tmp_path / "out", style="compressed-tensors")
    assert [f.target for f in report.findings if f.code == "convert.activations"] == [name]
    assert name not in tensors_in(tmp_path / "out")


# ---- GGUF's blocks of MXFP4


def random_codes(style: str) -> Tensors:
    """Return random MXFP4 tensors with almost all scales."""
    codes = torch.randint(0, 256, (48, 96), dtype=torch.uint8, generator=GENERATOR)
    scales = torch.randint(1, 250, (48, 6), dtype=torch.uint8, generator=GENERATOR)
    suffix = "" if style == "modelopt" else "_packed"
    return {f"a.weight{suffix}": codes, "a.weight_scale": scales, "b.bias": torch.ones(3)}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("options", [{}, {"quantize": "mxfp4-gguf"}], ids=str)
def test_codes_become_blocks_and_back(style: str, options: dict[str, Any], tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    stored, file = tmp_path / "stored.safetensors", tmp_path / "out.gguf"
    save_file(random_codes(style), stored)
    if options:
        options = options | {"include": "a.weight"}
    loadstone.convert(stored, file, metadata=METADATA, threads=3, **options)
    (tensor,) = [each for each in gguf.GGUFReader(file).tensors if each.name == "a.weight"]
    assert tensor.tensor_type == gguf.GGMLQuantizationType.MXFP4
    numbers = dequantized(stored, tmp_path / "a.safetensors")
    foreign = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).view(48, 192)
    # MXFP4 blocks of GGUF decode to a single zero, without a sign.
    assert torch.equal(foreign, numbers["a.weight"])
    assert torch.equal(dequantized(file, tmp_path / "b.safetensors")["a.weight"], foreign)
    assert_verified(stored, file)
    back = tmp_path / "back.safetensors"
    loadstone.convert(file, back, style=style)
    assert_same_bits(load_file(back), load_file(stored))
    assert_verified(file, back)


def test_a_stack_of_codes_becomes_one_of_blocks(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    prefix = "model.layers.0.mlp.experts"
    tensors = {}
    for expert in range(2):
        for leaf, (rows, columns) in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
            name = f"{prefix}.{expert}.{leaf}_proj.weight"
            shape = (rows, columns // 2)
            tensors[name] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=GENERATOR)
            tensors[f"{name}_scale"] = torch.full((rows, columns // 32), 120, dtype=torch.uint8)
    stored, file = tmp_path / "stored.safetensors", tmp_path / "out.gguf"
    save_file(tensors, stored)
    loadstone.convert(stored, file, metadata=METADATA, experts="fused")
    found = {each.name: each.tensor_type for each in gguf.GGUFReader(file).tensors}
    assert found == dict.fromkeys(
        (f"{prefix}.gate_up_proj", f"{prefix}.down_proj"), gguf.GGMLQuantizationType.MXFP4
    )
    assert_verified(stored, file)
    alone = dequantized(stored, tmp_path / "a.safetensors")
    fused = dequantized(file, tmp_path / "b.safetensors")[f"{prefix}.gate_up_proj"]
    assert torch.equal(fused[1, 32:], alone[f"{prefix}.1.up_proj.weight"])


def test_codes_that_lie_otherwise_are_refused_by_name(tmp_path: Path) -> None:
    """GPT-OSS stores this weight transposed, so its codes do not fit GGUF's blocks."""
    stored = tmp_path / "stored.safetensors"
    blocks = torch.zeros(2, 64, 2, 16, dtype=torch.uint8)
    scales = torch.full((2, 64, 2), 127, dtype=torch.uint8)
    save_file({"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}, stored)
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(stored, tmp_path / "out.gguf", metadata=METADATA)
    assert caught.value.code == "convert.lossy"
    assert "experts.down_proj" in str(caught.value)
    loadstone.convert(stored, tmp_path / "out.gguf", metadata=METADATA, dequantize=True)


def test_the_plan_says_so(tmp_path: Path) -> None:
    stored = write_stored(tmp_path, "nvfp4", "modelopt")
    command = ("convert", stored, tmp_path / "out", "--style", "compressed-tensors", "--dry-run")
    done = run(*command, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads(done.stdout)
    assert [(row["encoding"], row["tensors"]) for row in plan["repacked"]] == [("nvfp4", 2)]
    lossless = {name for name, each in plan["tensors"].items() if "lossless" in each}
    assert lossless == set(plan["tensors"]) - {"model.norm.weight"}
    assert "repacked, exact\n" in run(*command).stdout


def test_verify_finds_a_code_that_was_changed(tmp_path: Path) -> None:
    stored = write_stored(tmp_path, "nvfp4", "modelopt")
    loadstone.convert(stored, tmp_path / "out", style="compressed-tensors")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    name = NAME.format(1) + "_packed"
    tensors[name][-1, -1] ^= 1
    save_file(tensors, path, metadata={"format": "pt"})
    done = run("verify", stored, tmp_path / "out")
    assert done.returncode != 0
    assert f"values     '{NAME.format(1)}'" in done.stdout
