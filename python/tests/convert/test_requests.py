"""A conversion satisfies each option, or is rejected.

A selecting pattern must match a tensor, and an excluding pattern that matches none warns. An option
that the source already satisfies is accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from safetensors.torch import load_file, save_file

import loadstone

FP8 = torch.float8_e4m3fn
LAYER = "model.layers.0"
DENSE = {
    f"{LAYER}.mlp.up_proj.weight": torch.randn(64, 64).bfloat16(),
    f"{LAYER}.mlp.down_proj.weight": torch.randn(64, 64).bfloat16(),
    f"{LAYER}.norm.weight": torch.ones(64).bfloat16(),
    "lm_head.weight": torch.randn(64, 64).bfloat16(),
}
SEPARATE = {
    f"{LAYER}.mlp.experts.{e}.{role}_proj.weight": torch.randn(64, 64).bfloat16()
    for e in range(2)
    for role in ("gate", "up", "down")
}
FUSED = {
    f"{LAYER}.mlp.experts.gate_up_proj": torch.randn(2, 128, 64).bfloat16(),
    f"{LAYER}.mlp.experts.down_proj": torch.randn(2, 64, 64).bfloat16(),
}
FOREIGN = {"layers.0.moe.w1_stack": torch.randn(2, 64, 64).bfloat16()}  # an unknown layout
LLAMA = {"general.architecture": "none"}
METADATA = {  # the same content as a file for --metadata
    "format": "loadstone-gguf-metadata",
    "version": 1,
    "entries": [{"key": "general.architecture", "type": "string", "value": "none"}],
}

# Options as Python arguments; the tests translate them for the command.
Options = dict[str, Any]
Outcome = tuple[int, str]  # exit status, and the message
NAMES = "convert.architecture"  # llama.cpp does not read the names of these small models


def python_outcome(source: Path, target: Path, options: Options) -> Outcome:
    if target.suffix == ".gguf":
        options = options | {"metadata": LLAMA}
    try:
        report = loadstone.convert(source, target, **options)
    except loadstone.Error as error:
        hints = [each.suggestion for each in error.findings if each.severity == "error"]
        return 2 if error.code == "plan.options" else 1, " ".join([str(error), *hints])
    told = [f for f in report.findings if f.severity == "warning" and f.code != NAMES]
    return 0, " ".join(f.message for f in told)


def arguments_of(options: Options) -> list[str]:
    arguments = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif isinstance(value, dict):
            arguments += [word for k, v in value.items() for word in (flag, f"{k}={v}")]
        else:
            arguments += [flag, str(value)]
    return arguments


def command_outcome(source: Path, target: Path, options: Options, *more: str) -> Outcome:
    arguments = arguments_of(options)
    if target.suffix == ".gguf":
        file = source.with_suffix(".json")
        file.write_text(json.dumps(METADATA))
        arguments += ["--metadata", str(file)]
    done = run("convert", source, target, *arguments, *more)
    told = [line for line in done.stderr.splitlines(keepends=True) if f"[{NAMES}]" not in line]
    return done.returncode, "".join(told)


DOORS: dict[str, Callable[[Path, Path, Options], Outcome]] = {
    "python": python_outcome,
    "command": command_outcome,
}
TARGETS = ["o.safetensors", "o.gguf"]

# Options that cannot be satisfied, with their messages. "E" becomes Q8_0 for GGUF, FP8 otherwise.
REFUSED: dict[str, tuple[dict[str, torch.Tensor], Options, str]] = {
    "quantize": (
        DENSE,
        {"quantize": {"nothing": "E"}},
        "the pattern 'nothing' (quantize) matches no tensor",
    ),
    "quantize, one of two": (
        DENSE,
        {"quantize": {"up_proj": "E", "dwon_proj": "E"}},
        "the pattern 'dwon_proj' (quantize) matches no tensor",
    ),
    "quantize a norm": (
        DENSE,
        {"quantize": {"norm": "E"}},
        "'norm' (quantize) matches no tensor that",
    ),
    "quantize nothing": ({"a": torch.ones(8)}, {"quantize": "E"}, "no tensor would be"),
    "include": (DENSE, {"quantize": "E", "include": "lm_haed"}, "'lm_haed' (include) matches no"),
    "include a norm": (
        DENSE,
        {"quantize": "E", "include": "norm"},
        "'norm' (include) matches no tensor that",
    ),
    "experts separate": (FOREIGN, {"experts": "separate"}, "no tensor is an expert"),
    "experts fused": (FOREIGN, {"experts": "fused"}, "no tensor is an expert"),
    "experts of a dense model": (DENSE, {"experts": "fused"}, "no tensor is an expert"),
}
# Options that can be satisfied, including those that the source already satisfies.
GRANTED: dict[str, tuple[dict[str, torch.Tensor], Options]] = {
    "dtype": (DENSE, {"dtype": "bf16"}),
    "dequantize": (DENSE, {"dequantize": True}),
    "fused": (FUSED, {"experts": "fused"}),
    "separate": (SEPARATE, {"experts": "separate"}),
    "to fused": (SEPARATE, {"experts": "fused"}),
    "to separate": (FUSED, {"experts": "separate"}),
    "quantize": (DENSE, {"quantize": {"up_proj": "E", "": "E"}}),
    "include": (DENSE, {"quantize": "E", "include": "lm_head", "exclude": "down_proj"}),
    "include a stack": (FUSED, {"quantize": "E", "include": "experts"}),
}


def with_encoding(options: Options, target: str) -> Options:
    encoding = "q8_0" if target.endswith(".gguf") else "fp8"
    text = json.dumps(options).replace('"E"', f'"{encoding}"')
    found: Options = json.loads(text)
    return found


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_does_not_hold_is_refused(
    door: str, target: str, case: str, tmp_path: Path
) -> None:
    tensors, options, told = REFUSED[case]
    path, out = saved(tmp_path / "a.safetensors", tensors), tmp_path / target
    status, text = DOORS[door](path, out, with_encoding(options, target))
    assert status in (1, 2) and told in text, (status, text)
    assert not out.exists()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", GRANTED)
def test_a_request_that_holds_is_granted(door: str, target: str, case: str, tmp_path: Path) -> None:
    tensors, options = GRANTED[case]
    path, out = saved(tmp_path / "a.safetensors", tensors), tmp_path / target
    assert DOORS[door](path, out, with_encoding(options, target)) == (0, "")
    assert out.exists()


MISTYPED: dict[str, Options] = {
    "exclude": {"quantize": "E", "exclude": "lm_haed"},
    "include": {"quantize": "E", "include": "lm_haed"},
    "quantize": {"quantize": {"lm_haed": "none", "": "E"}},
}


@pytest.mark.parametrize("option", MISTYPED)
@pytest.mark.parametrize("target", TARGETS)
def test_a_mistyped_pattern_is_an_error_with_similar_names(
    target: str, option: str, tmp_path: Path
) -> None:
    path, out = saved(tmp_path / "a.safetensors", DENSE), tmp_path / target
    options = with_encoding(MISTYPED[option], target)
    message = f"the pattern 'lm_haed' ({option}) matches no tensor"
    for outcome in DOORS.values():
        status, text = outcome(path, out, options)
        assert status == 2 and message in text and "similar names: 'lm_head.weight'" in text, text
    if target != "o.gguf":
        done = run("merge", f"{path}:0.5", f"{path}:0.5", "-o", out, *arguments_of(options))
        assert done.returncode == 2 and message in done.stderr
        assert "similar names: 'lm_head.weight'" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize("target", TARGETS)
def test_a_pattern_that_leaves_out_is_no_warning(target: str, tmp_path: Path) -> None:
    path, out = saved(tmp_path / "a.safetensors", DENSE), tmp_path / target
    options = with_encoding({"quantize": {"lm": "none", "": "E"}, "exclude": "norm"}, target)
    status, text = command_outcome(path, out, options, "--strict")
    assert (status, text) == (3 if target == "o.gguf" else 0, "")


# ---- FP8 without scales

PLAIN = {
    "blocks.0.proj.weight": torch.randn(64, 64).to(FP8),
    "blocks.0.proj.bias": torch.randn(64).to(torch.float8_e5m2),
    "blocks.0.norm.scale": torch.ones(64),
}
# Options, target, and the resulting dtype of the weight (None if the conversion is rejected).
OF_FP8: list[tuple[Options, str, torch.dtype | None]] = [
    ({}, "o.safetensors", FP8),
    ({"dtype": "bf16"}, "o.safetensors", torch.bfloat16),
    ({"dtype": "f16"}, "o.safetensors", torch.float16),
    ({"dequantize": True}, "o.safetensors", torch.bfloat16),
    ({"dequantize": True, "dtype": "f32"}, "o.safetensors", torch.float32),
    ({"dequantize": True, "block_dtype": "f16"}, "o.safetensors", torch.float16),
    ({"quantize": {"weight": "q8_0"}}, "o.gguf", None),  # GGUF has no FP8, but the bias is FP8
    ({"dequantize": True, "quantize": {"weight": "f16"}}, "o.gguf", torch.float16),
    ({"dtype": "bf16"}, "o.gguf", torch.bfloat16),
    ({"dequantize": True}, "o.gguf", torch.bfloat16),
    ({}, "o.gguf", None),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("options", "target", "dtype"), OF_FP8)
def test_plain_fp8_is_numbers_on_request(
    door: str, options: Options, target: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    path, out = saved(tmp_path / "a.safetensors", PLAIN), tmp_path / target
    if options.get("quantize"):
        options = options | {"include": "proj.weight"}
    status, text = DOORS[door](path, out, options)
    if dtype is None:
        assert status == 1 and "which GGUF does not support" in text
        return
    assert (status, text) == (0, "")
    found = loadstone.load_file(out) if out.suffix == ".gguf" else load_file(out)
    weight, bias = PLAIN["blocks.0.proj.weight"], PLAIN["blocks.0.proj.bias"]
    assert torch.equal(found["blocks.0.proj.weight"].float(), weight.to(dtype).float())
    assert found["blocks.0.proj.weight"].dtype == dtype
    assert torch.equal(found["blocks.0.proj.bias"].float(), bias.float())


@pytest.mark.parametrize("target", TARGETS)
def test_plain_fp8_is_quantized(target: str, tmp_path: Path) -> None:
    """FP8 and BF16 sources of the same values give equal codes. Other weights stay FP8."""
    encoding = "q8_0" if target.endswith(".gguf") else "nvfp4"
    options: Options = {"quantize": encoding, "include": "proj.weight"}
    tensors = {n: t for n, t in PLAIN.items() if not n.endswith("bias")}
    if target != "o.gguf":
        tensors["lm_head.weight"] = torch.randn(64, 64).to(FP8)
    outs = []
    for name, dtype in (("fp8", None), ("bf16", torch.bfloat16)):
        made = {n: t.to(dtype) if dtype and t.dtype == FP8 else t for n, t in tensors.items()}
        path = saved(tmp_path / f"{name}.safetensors", made)
        outs.append(tmp_path / f"{name}-{target}")
        assert python_outcome(path, outs[-1], options) == (0, "")
    first, second = (loadstone.load_file(out) for out in outs)
    assert first.keys() == second.keys()
    assert torch.equal(first["blocks.0.proj.weight"], second["blocks.0.proj.weight"])
    if target != "o.gguf":
        assert first["lm_head.weight"].dtype == FP8


def test_fp8_beside_a_scale_that_is_not_known_stays(tmp_path: Path) -> None:
    """The scale may belong to codes of an unknown layout, so the weight is not decoded."""
    tensors = {"a.weight": torch.randn(64, 64).to(FP8), "a.my_scale": torch.ones(1)}
    path, out = saved(tmp_path / "a.safetensors", tensors), tmp_path / "o.safetensors"
    assert command_outcome(path, out, {"dtype": "bf16"})[0] == 0
    assert load_file(out)["a.weight"].dtype == FP8
    status, text = command_outcome(path, tmp_path / "p.safetensors", {"dequantize": True})
    assert status != 0 and "a.my_scale" in text


# ---- adapters and devices


def test_patterns_of_adapters_and_maps(tmp_path: Path) -> None:
    base = saved(tmp_path / "base.safetensors", DENSE)
    (tmp_path / "lora").mkdir()
    module = f"{LAYER}.mlp.up_proj"
    adapter = {
        f"{module}.lora_up.weight": torch.randn(64, 2),
        f"{module}.lora_down.weight": torch.randn(2, 64),
        "text.lora_up.weight": torch.randn(64, 2),
    }
    save_file(adapter, tmp_path / "lora" / "a.safetensors")
    out = tmp_path / "o.safetensors"
    merge = ["merge", base, "--lora", tmp_path / "lora", "-o", out, "--lora-ignore", r"^text\."]
    done = run(*merge)
    assert (done.returncode, done.stderr) == (0, "")
    done = run(*merge, "--lora-ignore", "nothing")
    assert done.returncode == 0 and "'nothing' (lora-ignore) matches no tensor" in done.stderr
    assert run(*merge, "--lora-ignore", "nothing", "--strict").returncode == 3
    out.unlink()
    done = run(*merge, "--lora-ignore", ".")
    assert done.returncode == 1 and "it has no tensors to merge" in done.stderr
    assert not out.exists()
    for map_, status in (("nothing=cpu,=cpu", 1), (f"{module}=cpu,=cpu", 0)):
        done = run("plan", base, "--device-map", map_)
        assert done.returncode == status
        assert ("is not a module" in done.stdout) == (status == 1)


@pytest.mark.parametrize(("option", "value"), [("lora_ignore", "x"), ("tie", "keep")])
def test_options_of_adapters_need_an_adapter(option: str, value: str, tmp_path: Path) -> None:
    base = saved(tmp_path / "base.safetensors", DENSE)
    out = tmp_path / "o.safetensors"
    words = ["--" + option.replace("_", "-"), value]
    for command in (["merge", base, f"{base}:0.5", "-o", out], ["plan", base], ["load", base]):
        done = run(*command, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.search("--lora-ignore needs --lora|needs adapters.*keep", done.stderr)
    model = torch.nn.Module()
    given: Any = {option: value}
    doors: list[Callable[[], object]] = [
        lambda: loadstone.merge([base, base], out, **given),
        lambda: loadstone.plan(model, base, **given),
        lambda: loadstone.load(model, base, **given),
    ]
    for door in doors:
        with pytest.raises(loadstone.Error, match=r"this option needs|requires lora") as caught:
            door()
        assert (caught.value.code, caught.value.field) == ("plan.options", option)
    assert not out.exists()


# ---- advice

CODES = {
    "a.weight": torch.randn(64, 64).to(FP8),
    "a.weight_scale": torch.tensor(0.5),
    "a.pre_quant_scale": torch.ones(64),  # prevents decoding
}
ADVICE: list[tuple[dict[str, torch.Tensor], Options, str]] = [
    (CODES, {"dequantize": True}, "o.safetensors"),
    (CODES, {"dequantize": True}, "o.gguf"),
    (CODES, {"dequantize": True, "dtype": "bf16"}, "o.gguf"),
    ({"a": torch.ones(8, dtype=torch.uint32)}, {"dequantize": True}, "o.gguf"),
    (PLAIN, {"dequantize": True, "quantize": {"x": "q8_0"}}, "o.gguf"),
    (DENSE, {"quantize": {"norm": "fp8"}, "include": "lm_head"}, "o.safetensors"),
    (DENSE, {"quantize": "fp8", "include": "norm"}, "o.safetensors"),
    ({"a.weight": torch.full((64, 64), 1e39, dtype=torch.float64)}, {"dtype": "f32"}, "o.gguf"),
    ({"a.weight": torch.full((64, 64), 1e39, dtype=torch.float64)}, {"dtype": "bf16"}, "o.gguf"),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("tensors", "options", "target"), ADVICE)
def test_no_advice_names_what_was_given(
    door: str, tensors: dict[str, torch.Tensor], options: Options, target: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "a.safetensors", tensors)
    status, text = DOORS[door](path, tmp_path / target, options)
    assert status != 0
    given = {word for word in arguments_of(options) if word.startswith("--")}
    assert not given & set(re.findall(r"--[a-z-]+", text)), text
    if "dtype" in options:
        assert f"represent them ({options['dtype']}" not in text
