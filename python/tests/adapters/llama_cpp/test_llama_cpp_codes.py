"""Tests quantized models with a converter: the file has the values of the source's codes.

The tests' own small converter permutes, stacks, transposes and slices. ``expected()`` does the same
to the values that the oracles of the codecs decode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import llama_cpp_oracle as oracle
import numpy as np
import packed_compressed as compressed
import packed_gptq as gptq
import pytest
import torch
from codec_checkpoint import Checkpoint, Written
from codec_nibbles import OF_MODELOPT, add_nvfp4_divided, low_first, named, positive_fp8
from codec_scaled import power
from command import COMMAND, run
from safetensors.torch import load_file, save_file

import loadstone
from loadstone._command import command

CONVERTER = Path(__file__).parents[2] / "support" / "llama_cpp_converter"
Q, GATE, UP, DOWN = (
    f"blk.0.{name}.weight" for name in ("attn_q", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
)
ROWS = 16
Add = Callable[[Checkpoint, str], None]


def write(folder: Path, add: Add, config: dict[str, Any] | None = None) -> Written:
    """Write a model for the small converter: three quantized matrices and a norm."""
    made = Checkpoint(7)
    for module in ("q", "up.0", "up.1"):
        add(made, module)
    made.add_plain("attn_norm.weight", made.normal(64).bfloat16())
    made.config = {"architectures": ["Codes"]} | (config or {})
    return made.save(folder)


def write_int4(folder: Path) -> Written:
    how = compressed.Weights(group_size=32)
    return write(
        folder,
        lambda made, module: compressed.add_packed(made, f"{module}.weight", how, ROWS, 256),
        {"quantization_config": how.config("pack-quantized")["quantization_config"]},
    )


def write_gptq(folder: Path) -> Written:
    how = gptq.Gptq(group_size=32)
    return write(
        folder,
        lambda made, module: gptq.add_gptq(made, module, how, outputs=ROWS),
        {"quantization_config": how.config},
    )


def write_nvfp4(folder: Path, columns: int = 256) -> Written:
    def add(made: Checkpoint, module: str) -> None:
        parts = {
            "data": made.bytes(ROWS, columns // 2),
            "scale": positive_fp8(made, ROWS, columns // 16),
            "scale_2": made.uniform(1e-4, 1e-2),
        }
        scale = (parts["scale"].float() * parts["scale_2"]).repeat_interleave(16, -1)
        values = low_first(parts["data"]) * scale
        made.add(f"{module}.weight", "nvfp4", named(parts, OF_MODELOPT), values)

    return write(folder, add)


def write_divided(folder: Path) -> Written:
    """Write NVFP4 of compressed-tensors, with global scales that have no exact inverse."""
    return write(
        folder, lambda made, module: add_nvfp4_divided(made, f"{module}.weight", ROWS, 256)
    )


def write_gpt_oss(folder: Path) -> Written:
    """Write experts as GPT-OSS does, and an attention matrix in BF16."""
    made = Checkpoint(8)
    for role, rows, groups in (("gate_up_proj", 64, 2), ("down_proj", 64, 1)):
        data = made.bytes(3, rows, groups, 16)
        scale = made.integers(110, 135, 3, rows, groups).to(torch.uint8)
        values = (low_first(data) * power(scale)[..., None]).flatten(-2).transpose(1, 2)
        components = {"data": ("_blocks", data), "scale": ("_scales", scale)}
        made.add(f"mlp.experts.{role}", "mxfp4", components, values)
    made.add_plain("attn_k.weight", made.normal(8, 64).bfloat16())
    made.config = {"architectures": ["Codes"], "quantization_config": {"quant_method": "mxfp4"}}
    return made.save(folder)


SOURCES: dict[str, Callable[[Path], Written]] = {
    "int4": write_int4,
    "gptq": write_gptq,
    "mxfp4": write_gpt_oss,
    "nvfp4": write_nvfp4,
}


def expected(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the values of the file's quantized tensors, from those of the checkpoint."""
    if "q.weight" not in values:
        both = values["mlp.experts.gate_up_proj"].transpose(1, 2)
        down = values["mlp.experts.down_proj"].transpose(1, 2)
        return {GATE: both[:, ::2], UP: both[:, 1::2], DOWN: down}
    q = values["q.weight"]
    rows = q.reshape(2, 2, ROWS // 4, -1).swapaxes(1, 2).reshape(q.shape)
    return {Q: rows, UP: torch.stack([values["up.0.weight"], values["up.1.weight"]])}


def require_values(path: Path, source: Written, kind: str) -> None:
    """Check the type and the values of each tensor that comes from codes."""
    found = {each.name: each for each in oracle.read(path).tensors}
    loaded = loadstone.load_file(path, dtype="float32")
    for name, values in expected(source.numbers).items():
        tensor = found[name]
        assert tensor.tensor_type.name == kind
        assert torch.equal(loaded[name], values), name
        if kind != "NVFP4":  # gguf-py ignores the scale of the matrix, which is another tensor
            own = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert torch.equal(torch.from_numpy(np.array(own)), values), name


def convert(door: str, source: Path, target: Path, **options: Any) -> None:
    """Convert with the small converter, by Python or by the command."""
    if door == "python":
        loadstone.convert(source, target, converter=CONVERTER, **options)
        return
    names = {name.replace("_", "-"): value for name, value in options.items()}
    given = [f"--{name}" if value is True else f"--{name}={value}" for name, value in names.items()]
    line = ["convert", str(source), str(target), f"--converter={CONVERTER}", *given]
    assert command.main(line) == 0


@pytest.fixture(params=["python", "command"])
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "command":
        if not Path(COMMAND).is_file():
            pytest.skip("the command is not installed")
        monkeypatch.setattr(command, "_command", lambda: COMMAND)
    return str(request.param)


@pytest.mark.parametrize(
    ("name", "quantize", "kind"),
    [
        ("int4", "q4_0", "Q4_0"),
        ("gptq", "q4_0", "Q4_0"),
        ("mxfp4", "mxfp4_moe", "MXFP4"),
        ("mxfp4", "mxfp4", "MXFP4"),
        ("mxfp4", None, "MXFP4"),
        ("nvfp4", "nvfp4-gguf", "NVFP4"),
        ("nvfp4", None, "NVFP4"),
    ],
)
def test_values_of_codes_stay_exact(
    door: str, name: str, quantize: str | None, kind: str, tmp_path: Path
) -> None:
    source = SOURCES[name](tmp_path / "model")
    has_floats = quantize in ("mxfp4", "mxfp4_moe")  # of attention, which no block represents
    options: dict[str, Any] = {} if has_floats else {"require_lossless": True}
    if quantize is not None:
        options["quantize"] = quantize
    convert(door, source.path, tmp_path / "out.gguf", **options)
    require_values(tmp_path / "out.gguf", source, kind)


def test_scales_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    """Q4_0 stores scales in F16; here one scale of a stacked expert is too small for F16."""
    source = write_int4(tmp_path / "model")
    file = source.path / "model.safetensors"
    tensors = load_file(file)
    tensors["up.1.weight_scale"][3, 5] = 1e-9
    save_file(tensors, file)
    options: dict[str, Any] = {"quantize": "q4_0", "converter": CONVERTER}
    report = loadstone.convert(source.path, tmp_path / "out.gguf", **options)
    (loss,) = report.requantized
    assert loss.blocks - loss.exact_blocks == 1
    with pytest.raises(loadstone.PlanError, match="1 of 256 blocks would change") as caught:
        loadstone.convert(source.path, tmp_path / "b.gguf", require_lossless=True, **options)
    assert caught.value.code == "convert.lossy"
    assert not (tmp_path / "b.gguf").exists()


def test_a_plan_says_that_codes_fit(tmp_path: Path) -> None:
    source = write_int4(tmp_path / "model").path
    report = loadstone.convert(
        source, tmp_path / "out.gguf", quantize="q4_0", converter=CONVERTER, dry_run=True
    )
    messages = [each.message for each in report.findings if each.code == "convert.requantized"]
    assert ["exact where scales fit" in each for each in messages] == [True]
    assert report.table.count("exact where scales fit") == 3  # the finding, and a row per shape


def test_values_are_not_rounded_before_they_become_blocks(door: str, tmp_path: Path) -> None:
    """Q4_K has no exact scales, so its blocks must be those of the decoded F32 values."""
    source = write_int4(tmp_path / "model")
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text('{"architectures": ["Codes"]}')
    save_file(source.numbers, plain / "model.safetensors")
    convert(door, source.path, tmp_path / "out.gguf", quantize="q4_k")
    found = blocks_of(tmp_path / "out.gguf")
    for dtype in ("float32", "bfloat16"):
        convert(door, plain, tmp_path / f"{dtype}.gguf", quantize="q4_k", dtype=dtype)
        own = blocks_of(tmp_path / f"{dtype}.gguf")
        assert [found[name] == own[name] for name in (Q, UP)] == [dtype == "float32"] * 2


def blocks_of(path: Path) -> dict[str, bytes]:
    return {each.name: each.data.tobytes() for each in oracle.read(path).tensors}


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dequantize": True}], ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_codes_are_decoded_on_request(
    door: str, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    source = SOURCES[name](tmp_path / "model")
    convert(door, source.path, tmp_path / "out.gguf", **options)
    kinds = {
        each.name: each.tensor_type.name for each in oracle.read(tmp_path / "out.gguf").tensors
    }
    values = expected(source.numbers)
    dtype = kinds[UP]
    assert dtype == "BF16" or "dtype" not in options
    loaded = loadstone.load_file(tmp_path / "out.gguf")
    for each, tensor in values.items():
        assert kinds[each] == dtype
        assert torch.equal(loaded[each], tensor.to(loaded[each].dtype)), each


@pytest.mark.parametrize("write", [write_divided, partial(write_nvfp4, columns=96)])
def test_codes_that_cannot_stay_are_told(write: Callable[[Path], Written], tmp_path: Path) -> None:
    """A converter's recipes yield values instead; a conversion without one must not guess."""
    source = write(tmp_path / "model")
    report = loadstone.convert(source.path, tmp_path / "out.gguf", converter=CONVERTER)
    lossy = {each.target: each for each in report.findings if each.code == "convert.lossy"}
    assert lossy.keys() == {Q, UP}
    assert all(
        each.severity == "warning" and "--dequantize" in each.suggestion for each in lossy.values()
    )
    with pytest.raises(loadstone.PlanError) as caught:
        catalog = loadstone.inspect(source.path)
        loadstone.convert(catalog, tmp_path / "b.gguf", metadata={"general.architecture": "toy"})
    errors = [each for each in caught.value.findings if each.severity == "error"]
    assert {each.code for each in errors} == {"convert.lossy"}
    assert all("NVFP4 blocks of GGUF" in each.message for each in errors)


def test_saved_recipes_keep_codes(tmp_path: Path) -> None:
    source = write_nvfp4(tmp_path / "model")
    recipes, metadata = loadstone.llama_cpp.save_recipes(
        source.path, tmp_path / "x", converter=CONVERTER
    )
    target = tmp_path / "out.gguf"
    report = loadstone.convert(source.path, target, rules=recipes, metadata=metadata)
    require_values(target, source, "NVFP4")
    assert "repacked, exact" in report.table
    words = (f"--rules={recipes}", f"--metadata={metadata}")
    assert run("verify", source.path, target, *words).returncode == 0
