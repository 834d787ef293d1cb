"""Every encoding in every style, quantized and decoded, or rejected with a named reason."""

from __future__ import annotations

import json
from pathlib import Path

import codec_gguf
import pytest
import torch
from codec_files import CODECS
from command import run
from safetensors.torch import load_file, save_file

import loadstone

STYLES = (None, "modelopt", "compressed-tensors")
OF_BITSANDBYTES = ("nf4", "fp4", "int8")
# ModelOpt's layouts that compressed-tensors lacks.
ONLY_MODELOPT = ("int4", "int4-awq")
ENCODINGS = (
    *OF_BITSANDBYTES,
    *ONLY_MODELOPT,
    *("fp8", "fp8-channel", "fp8-block", "int8-channel", "nvfp4", "mxfp4", "mxfp8"),
)
LAYER = "model.layers.0"
# No two of these matrices share a scale. int4 in rows of 256 and int4-awq in rows of 128 have the
# same shapes in both layouts; the blocks of FP8 do not divide rows of 384 by 320 evenly.
SHAPES = {
    f"{LAYER}.self_attn.o_proj.weight": (256, 256),
    f"{LAYER}.mlp.down_proj.weight": (256, 128),
    "model.layers.1.mlp.down_proj.weight": (320, 384),
}
PLAIN = {"model.norm.weight": (256,), "lm_head.weight": (64, 256)}


def model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        for name, shape in {**SHAPES, **PLAIN}.items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 2, "torch_dtype": "bfloat16"})
    )
    return tensors


def is_refused(encoding: str, style: str | None) -> bool:
    if encoding in OF_BITSANDBYTES:
        return style is not None
    return encoding in ONLY_MODELOPT and style == "compressed-tensors"


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


def divided(unit: loadstone.Quantized) -> torch.Tensor:
    """Decode NVFP4 whose global scale is stored as its inverse: scales are divided."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    data = unit.parts["data"]
    codes = torch.stack([data & 15, data >> 4], -1).flatten(-2).long()
    numbers = values[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    scales = unit.parts["scale"].float() / (1 / unit.parts["scale_2"])
    return (numbers * scales.repeat_interleave(16, -1)).bfloat16()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("target", ["out", "out.safetensors"])
def test_each_cell_works_or_is_refused(
    tmp_path: Path, encoding: str, style: str | None, target: str
) -> None:
    source, out = tmp_path / "source", tmp_path / target
    given = model(source)
    options = [] if style is None else ["--style", style]
    done = run("convert", source, out, "--quantize", encoding, *options)
    if is_refused(encoding, style):
        assert done.returncode == 2, done
        assert encoding in done.stderr
        assert style is not None and style in done.stderr
        assert not out.exists()
        return
    assert done.returncode == 0, done.stderr
    for arguments in (["verify", out], ["verify", source, out], ["inspect", out, "--tensors"]):
        done = run(*arguments)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    again = tmp_path / "again.safetensors"
    done = run("convert", out, again, "--dequantize")
    assert done.returncode == 0, done.stderr
    found = load_file(again)
    assert set(found) == set(given)
    for name, tensor in given.items():
        assert found[name].dtype == torch.bfloat16, name
        expected = tensor
        if name in SHAPES:
            unit = loadstone.quantize(tensor, encoding)
            expected = unit.dequantize(torch.bfloat16)
            if encoding == "nvfp4" and style == "compressed-tensors":
                expected = divided(unit)
        assert torch.equal(found[name].view(torch.int16), expected.view(torch.int16)), name
    # The first conversion did quantize.
    assert set(tensors_of(out)) != set(given) or any(
        tensor.dtype != given[name].dtype for name, tensor in tensors_of(out).items()
    )


EXPERTS = "model.layers.0.mlp.experts"


def experts(folder: Path) -> dict[str, torch.Tensor]:
    """Write two separate experts and a norm that no encoding accepts; return the tensors."""
    generator = torch.Generator().manual_seed(4)
    inner = (256, 128)
    tensors = {
        f"{EXPERTS}.{expert}.{role}_proj.weight": torch.randn(shape, generator=generator).bfloat16()
        for expert in range(2)
        for role, shape in (("gate", inner), ("up", inner), ("down", inner[::-1]))
    }
    tensors["model.norm.weight"] = torch.randn(256, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_moe", "num_hidden_layers": 1})
    )
    return tensors


def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    def of(expert: int, role: str) -> torch.Tensor:
        return tensors[f"{EXPERTS}.{expert}.{role}_proj.weight"]

    return {
        f"{EXPERTS}.gate_up_proj": torch.stack(
            [torch.cat([of(expert, "gate"), of(expert, "up")]) for expert in range(2)]
        ),
        f"{EXPERTS}.down_proj": torch.stack([of(expert, "down") for expert in range(2)]),
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_codes_of_experts_are_joined_by_nothing_but_their_numbers(
    tmp_path: Path, encoding: str
) -> None:
    source, stored, out = tmp_path / "source", tmp_path / "stored", tmp_path / "out"
    experts(source)
    assert run("convert", source, stored, "--quantize", encoding).returncode == 0
    done = run("convert", stored, out, "--experts", "fused")
    assert done.returncode == 1, done
    assert "plan.encoding" in done.stderr and EXPERTS in done.stderr
    assert not out.exists()
    plain = tmp_path / "plain"
    assert run("convert", stored, plain, "--dequantize").returncode == 0
    done = run("convert", stored, out, "--experts", "fused", "--dequantize")
    assert done.returncode == 0, done.stderr
    found = tensors_of(out)
    for name, expected in joined(tensors_of(plain)).items():
        assert torch.equal(found[name], expected), name


def test_plain_experts_are_joined_and_taken_apart(tmp_path: Path) -> None:
    given = experts(tmp_path / "source")
    out, again = tmp_path / "out", tmp_path / "again"
    assert run("convert", tmp_path / "source", out, "--experts", "fused").returncode == 0
    found = tensors_of(out)
    for name, expected in joined(given).items():
        assert torch.equal(found[name], expected), name
    assert run("convert", out, again, "--experts", "separate").returncode == 0
    found = tensors_of(again)
    assert set(found) == set(given)
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())


def test_stacked_codes_are_not_taken_apart_without_their_scales(tmp_path: Path) -> None:
    stack = torch.randn(2, 512, 128).to(torch.float8_e4m3fn)
    down = torch.randn(2, 128, 256).to(torch.float8_e4m3fn)
    tensors = {f"{EXPERTS}.gate_up_proj": stack, f"{EXPERTS}.down_proj": down}
    scales = {f"{name}_scale_inv": torch.rand(2, 4, 2) for name in tensors}
    save_file({**tensors, **scales}, tmp_path / "stacked.safetensors")
    out = tmp_path / "out.safetensors"
    done = run("convert", tmp_path / "stacked.safetensors", out, "--experts", "separate")
    assert done.returncode == 1 and "plan.encoding" in done.stderr, done
    assert not out.exists()
    save_file(tensors, tmp_path / "plain.safetensors")  # without scales, FP8 values are plain
    done = run("convert", tmp_path / "plain.safetensors", out, "--experts", "separate")
    assert done.returncode == 0, done.stderr
    assert torch.equal(
        load_file(out)[f"{EXPERTS}.1.up_proj.weight"].view(torch.uint8),
        stack[1, 256:].view(torch.uint8),
    )


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_rule_moves_codes_with_their_scales_or_not_at_all(tmp_path: Path, encoding: str) -> None:
    source, stored = tmp_path / "source", tmp_path / "stored"
    experts(source)
    assert run("convert", source, stored, "--quantize", encoding).returncode == 0
    before = tensors_of(stored)
    data = next(
        name
        for name, tensor in before.items()
        if tensor.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn)
        and name.startswith(f"{EXPERTS}.0.up_proj.weight")
        and "scale" not in name
        and "quant_" not in name
    )
    alone = [{"op": "rename", "sources": [data.replace(".", r"\.")], "targets": ["moved.weight"]}]
    with pytest.raises(loadstone.PlanError, match=r"plan\.encoding"):
        loadstone.convert(stored, tmp_path / "out", rules=alone)
    assert not (tmp_path / "out").exists()
    all_of_them = [{"op": "rename", "sources": [r"model\.(.*)"], "targets": ["moved.$1"]}]
    loadstone.convert(stored, tmp_path / "out", rules=all_of_them)
    after = tensors_of(tmp_path / "out")
    assert {name.replace("model.", "moved.", 1) for name in before} == set(after)
    for name, tensor in before.items():
        found = after[name.replace("model.", "moved.", 1)]
        assert found.dtype == tensor.dtype and raw(found) == raw(tensor), name


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_another_dtype_rounds_no_scale(
    tmp_path: Path, encoding: str, style: str | None, dtype: str
) -> None:
    if is_refused(encoding, style):
        return
    source, stored, out = tmp_path / "source", tmp_path / "stored", tmp_path / "out"
    experts(source)
    options = [] if style is None else ["--style", style]
    assert run("convert", source, stored, "--quantize", encoding, *options).returncode == 0
    before = tensors_of(stored)
    # An activation scale belongs to the codes, so a cast leaves it unchanged too.
    before[f"{EXPERTS}.0.up_proj.input_scale"] = torch.tensor(1 / 3)
    (file,) = stored.glob("*.safetensors")
    save_file(before, file)
    assert run("convert", stored, out, "--dtype", dtype).returncode == 0
    after = tensors_of(out)
    assert set(after) == set(before)
    for name, tensor in before.items():
        if name == "model.norm.weight":  # control: floats are cast
            wanted = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
            assert torch.equal(after[name], tensor.to(wanted))
            continue
        assert after[name].dtype == tensor.dtype, name
        assert raw(after[name]) == raw(tensor), name


@pytest.mark.parametrize("codec", sorted({*CODECS} - {*codec_gguf.WRITERS, "plain"}))
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_another_dtype_leaves_codes_as_they_are(codec: str, dtype: str, tmp_path: Path) -> None:
    """The codecs include bitsandbytes codes that are stored as floats (quant_storage)."""
    written, out = CODECS[codec](tmp_path / "in"), tmp_path / "out"
    config = tmp_path / "in/config.json"
    known = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps(known | {"dtype": "float64"}))
    done = run("convert", tmp_path / "in", out, "--dtype", dtype)
    assert done.returncode == 0, done.stderr
    after = tensors_of(out)
    assert set(after) == set(written.stored)
    plain = set(written.numbers) - set(written.quantized)
    for name, tensor in written.stored.items():
        if name in plain and tensor.is_floating_point():  # control: floats are cast
            wanted = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[dtype]
            assert after[name].dtype == wanted, name
            continue
        assert after[name].dtype == tensor.dtype, name
        assert raw(after[name]) == raw(tensor), name
    declared = json.loads((out / "config.json").read_text())["dtype"]
    assert declared == {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("mode", ["exact", "modelopt-compat"])
@pytest.mark.parametrize("encoding", ["int4", "int4-awq", "fp8-block"])
def test_modelopts_layouts_are_decoded_from_other_dtypes(
    tmp_path: Path, encoding: str, mode: str, dtype: torch.dtype
) -> None:
    given = model(tmp_path / "source", dtype)
    out, again = tmp_path / "out", tmp_path / "again.safetensors"
    loadstone.convert(tmp_path / "source", out, quantize=encoding, mode=mode)
    done = run("convert", out, again, "--dequantize", "--dtype", "f32")
    assert done.returncode == 0, done.stderr
    found = load_file(again)
    for name in SHAPES:
        # ModelOpt's export rounds FP8 blocks once, like the dialect "exact".
        dialect = "exact" if encoding == "fp8-block" else mode
        unit = loadstone.quantize(given[name], encoding, dialect=dialect)
        assert torch.equal(found[name], unit.dequantize(torch.float32)), name


def test_integers_of_four_bits_that_may_be_either_are_refused(tmp_path: Path) -> None:
    """Both 4-bit layouts fit the shapes, and the header does not declare which one it is."""
    unit = loadstone.quantize(torch.randn(256, 128).bfloat16(), "int4-awq")
    name = f"{LAYER}.mlp.down_proj.weight"
    parts = {name: unit.parts["data"], f"{name}_scale": unit.parts["scale"]}
    path, out = tmp_path / "either.safetensors", tmp_path / "out.safetensors"
    save_file(parts, path)
    done = run("convert", path, out, "--dequantize")
    assert done.returncode == 3, done
    assert "int4-awq" in done.stderr
    assert not out.exists()
    for known, is_right in (("int4", False), ("int4-awq", True)):
        save_file(parts, path, metadata={"loadstone.int4": known})
        assert run("convert", path, out, "--dequantize").returncode == 0
        numbers = load_file(out)[name]
        assert (numbers.shape == (256, 128)) == is_right
        if is_right:
            assert torch.equal(numbers, unit.dequantize(torch.bfloat16))
        out.unlink()


def test_the_word_on_integers_goes_with_them(tmp_path: Path) -> None:
    model(tmp_path / "source")
    out, copy, again = (tmp_path / f"{name}.safetensors" for name in ("out", "copy", "again"))
    source = tmp_path / "source" / "model.safetensors"
    assert run("convert", source, out, "--quantize", "int4").returncode == 0
    assert run("convert", out, copy).returncode == 0
    assert run("convert", copy, again, "--dequantize").returncode == 0
    assert loadstone.inspect(copy).metadata["loadstone.int4"] == "int4"
    assert "loadstone.int4" not in loadstone.inspect(again).metadata


@pytest.mark.parametrize("name", ["y.GGUF", "y.pt", "y.bin", "y.SafeTensors"])
def test_a_target_named_like_another_format_is_refused(tmp_path: Path, name: str) -> None:
    model(tmp_path / "source")
    done = run("convert", tmp_path / "source", tmp_path / name)
    assert done.returncode == 2
    assert name in done.stderr
    assert not (tmp_path / name).exists()
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(tmp_path / "source", tmp_path / name)
    assert caught.value.code == "convert.target"


def test_a_style_and_a_mode_need_something_to_quantize(tmp_path: Path) -> None:
    model(tmp_path / "source")
    for options in (["--style", "modelopt"], ["--mode", "modelopt-compat"]):
        done = run("convert", tmp_path / "source", tmp_path / "out", *options)
        assert done.returncode == 2, options
    done = run(
        *("convert", tmp_path / "source", tmp_path / "out", "--quantize", "nf4"),
        *("--mode", "modelopt-compat"),
    )
    assert done.returncode == 2
    assert "nf4" in done.stderr


@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
def test_weights_that_are_tiny_keep_finite_scales(tmp_path: Path, style: str) -> None:
    weight = ((torch.rand(64, 64) * 2 - 1) * 1e-36).bfloat16()
    name = f"{LAYER}.mlp.up_proj.weight"
    path, out = tmp_path / "tiny.safetensors", tmp_path / "out.safetensors"
    again = tmp_path / "again.safetensors"
    save_file({name: weight}, path)
    done = run("convert", path, out, "--quantize", "nvfp4", "--style", style)
    assert done.returncode == 0, done.stderr
    for each, tensor in load_file(out).items():
        if tensor.is_floating_point():
            assert torch.isfinite(tensor.float()).all() and (tensor.float() > 0).all(), each
    assert run("verify", out).returncode == 0
    assert run("convert", out, again, "--dequantize").returncode == 0
    error = (load_file(again)[name].double() - weight.double()).norm() / weight.double().norm()
    assert error < 0.15


def test_an_inverse_scale_that_would_be_infinite_is_refused(tmp_path: Path) -> None:
    """The scale that ModelOpt computes for such a weight has no inverse in F32."""
    name = f"{LAYER}.mlp.up_proj.weight"
    path, out = tmp_path / "tiny.safetensors", tmp_path / "out.safetensors"
    save_file({name: torch.full((64, 64), 1e-36).bfloat16()}, path)
    options = ("--quantize", "nvfp4", "--style", "compressed-tensors", "--mode", "modelopt-compat")
    done = run("convert", path, out, *options)
    assert done.returncode == 3, done
    assert "q.scale_value" in done.stderr
    assert "weight_global_scale" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_largest_numbers_stay_finite(encoding: str, dtype: torch.dtype) -> None:
    # int8 is computed in F16; 65280 is the largest value that F16 and BF16 can both represent.
    most = 65280.0 if encoding == "int8" else torch.finfo(dtype).max
    weight = torch.full((256, 256), most).to(dtype)
    weight[1::2] *= -1
    unit = loadstone.quantize(weight, encoding)
    assert torch.isfinite(unit.dequantize(dtype)).all()
    for name, part in unit.parts.items():
        if part.is_floating_point():
            assert torch.isfinite(part.float()).all(), name
