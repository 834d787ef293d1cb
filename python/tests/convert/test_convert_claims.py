"""Configs that declare an encoding, rules that would move codes without their scales, and codes of
unknown layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from claim_folders import GATE, UP, folder
from command import run
from safetensors.torch import load_file, save_file

import loadstone


def fp8() -> dict[str, torch.Tensor]:
    return {
        UP: torch.randn(192, 192).to(torch.float8_e4m3fn),
        f"{UP}_scale_inv": torch.rand(2, 2) + 0.5,
        "model.norm.weight": torch.randn(192).bfloat16(),
    }


def claims(config: Any) -> int:
    if not isinstance(config, dict):
        return 0
    return sum("quantization_config" in key or claims(value) for key, value in config.items())


CLAIM = {"quant_method": "fp8", "weight_block_size": [96, 96]}
CONFIGS = {
    "top": json.dumps({"model_type": "llama", "quantization_config": CLAIM}),
    "part": json.dumps({"model_type": "llava", "text_config": {"quantization_config": CLAIM}}),
    "both": json.dumps(
        {"quantization_config": CLAIM, "text_config": {"quantization_config": CLAIM}}
    ),
    "escaped": '{"a": 1, "quantiz\\u0061tion_config": CLAIM}',
    "words": '{"time_step_limit": [0.0, Infinity], "x": NaN, "quantization_config": CLAIM}',
}


@pytest.mark.parametrize("config", CONFIGS)
def test_no_claim_outlives_the_codes_that_it_is_about(tmp_path: Path, config: str) -> None:
    given = fp8()
    text = CONFIGS[config].replace("CLAIM", json.dumps(CLAIM))
    source = folder(tmp_path / "source", given, text)
    done = run("convert", source, tmp_path / "plain", "--dequantize")
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "plain/config.json").read_text()
    assert claims(json.loads(written)) == 0
    assert ("Infinity" in written) == ("Infinity" in text)
    # The config declares blocks of 96; blocks of 128 would give different values.
    blocks = given[f"{UP}_scale_inv"].repeat_interleave(96, 0).repeat_interleave(96, 1)
    found = load_file(tmp_path / "plain/model.safetensors")[UP]
    assert torch.equal(found, (given[UP].float() * blocks).bfloat16())

    done = run("convert", source, tmp_path / "other", "--quantize", "nf4")
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "other/config.json").read_text())
    assert claims(made) == 1
    assert made["quantization_config"]["quant_method"] == "bitsandbytes"


@pytest.mark.parametrize("shape", [(1, 1), (1,), ()], ids=str)
@pytest.mark.parametrize("block", ["null", "absent", "edges"])
def test_a_config_without_blocks_has_one_scale(
    block: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """transformers takes ``"weight_block_size": null`` as one scale for the whole weight."""
    given = fp8() | {f"{UP}_scale_inv": torch.full(shape, 0.75)}
    claim: dict[str, Any] = {"quant_method": "fp8"}
    if block != "absent":
        claim["weight_block_size"] = {"null": None, "edges": [128, 128]}[block]
    source = folder(tmp_path / "source", given, {"quantization_config": claim})
    done = run("convert", source, tmp_path / "out", "--dequantize")
    if block != "null" and len(shape) == 2:  # control: the weight has two by two blocks
        assert done.returncode == 3 and "only one scale, but several blocks" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "out/model.safetensors")[UP]
    assert torch.equal(found, (given[UP].float() * 0.75).bfloat16())


def test_blocks_beside_a_config_without_blocks(tmp_path: Path) -> None:
    given = fp8()
    claim = {"quant_method": "fp8", "weight_block_size": None}
    source = folder(tmp_path / "source", given, {"quantization_config": claim})
    assert run("convert", source, tmp_path / "out", "--dequantize").returncode == 0
    blocks = given[f"{UP}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    found = load_file(tmp_path / "out/model.safetensors")[UP]
    assert torch.equal(found, (given[UP].float() * blocks[:192, :192]).bfloat16())


def test_a_config_that_cannot_be_read_stops_every_conversion(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", fp8(), "\ufeff{}")
    for options in (["--dequantize"], ["--quantize", "nf4"], []):
        done = run("convert", source, tmp_path / "out", *options)
        assert done.returncode != 0 and "config.json" in done.stderr, done
        assert not (tmp_path / "out").exists()
    (source / "config.json").write_text("{}")
    assert run("convert", source, tmp_path / "out").returncode == 0


OTHERS: dict[str, dict[str, torch.Tensor]] = {
    "gptq of 5 bits": {
        UP.replace("weight", "qweight"): torch.randint(0, 99, (20, 128), dtype=torch.int32),
        UP.replace("weight", "qzeros"): torch.randint(0, 99, (1, 20), dtype=torch.int32),
        UP.replace("weight", "scales"): torch.rand(1, 128).half(),
    },
    "quanto": {
        f"{UP}._data": torch.randint(-9, 9, (64, 64), dtype=torch.int8),
        f"{UP}._scale": torch.rand(64, 1),
    },
    "quanto of 4 bits": {
        f"{UP}._data._data": torch.randint(0, 99, (32, 64), dtype=torch.uint8),
        f"{UP}._scale": torch.rand(64, 1),
        f"{UP}._shift": torch.rand(64, 1),
    },
    "an order of groups": {
        UP: torch.randint(-9, 9, (64, 64), dtype=torch.int8),
        f"{UP}_scale": torch.rand(64, 2),
        f"{UP}_g_idx": torch.randint(0, 2, (64,), dtype=torch.int32),
    },
    "a scale of activations in the weight": {
        UP: torch.randn(64, 64).to(torch.float8_e4m3fn),
        f"{UP}_scale": torch.rand(()),
        UP.replace("weight", "pre_quant_scale"): torch.rand(64),
    },
    "a scale of another name": {
        UP: torch.randn(64, 64).to(torch.float8_e4m3fn),
        f"{UP}_descale": torch.rand(64, 1),
    },
    "two scales": {
        UP: torch.randn(64, 64).to(torch.float8_e4m3fn),
        f"{UP}_scale": torch.rand(64, 1),
        f"{UP}_scale_inv": torch.rand(1, 1),
    },
}


@pytest.mark.parametrize("layout", OTHERS)
def test_layouts_that_are_not_decoded_are_refused(tmp_path: Path, layout: str) -> None:
    plain = {GATE: torch.randn(64, 64).bfloat16()}
    source = folder(tmp_path / "source", OTHERS[layout] | plain, {"model_type": "llama"})
    out = tmp_path / "out"
    both = (f"{source}:0.5", f"{source}:0.5", "-o", out)
    for words in (
        ("convert", source, out, "--dequantize"),
        ("convert", source, out, "--quantize", "fp8"),
        ("merge", *both),
    ):
        done = run(*words)
        assert done.returncode == 1 and "plan.encoding" in done.stderr, done
        assert not out.exists()
    assert run("convert", source, out).returncode == 0
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in OTHERS[layout].items())


def of_tomorrow(at: Path, claim: str, **tensors: torch.Tensor) -> Path:
    """Write a folder in which config.json or the file `claim` declares an encoding."""
    section = {"quantization_config": {"quant_method": "of tomorrow"}}
    plain = {GATE: torch.randn(64, 64).bfloat16()}
    source = folder(at, plain | tensors, section if claim == "config.json" else {})
    if claim != "config.json":
        (source / claim).write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    return source


@pytest.mark.parametrize("claim", ["config.json", "hf_quant_config.json"])
def test_a_claim_that_no_tensor_bears_out_is_an_error(claim: str, tmp_path: Path) -> None:
    source = of_tomorrow(tmp_path / "source", claim)
    for options in (["--dequantize"], ["--quantize", "fp8"]):
        done = run("convert", source, tmp_path / "out", *options)
        assert done.returncode == 1 and "plan.config_mismatch" in done.stderr, done
        assert f"{claim} declares" in done.stderr
    if claim == "config.json":
        (source / claim).write_text("{}")
    else:
        (source / claim).unlink()
    assert run("convert", source, tmp_path / "out", "--quantize", "fp8").returncode == 0


CODES = {
    str(dtype).removeprefix("torch."): torch.ones(4, 4).to(dtype)
    for dtype in (
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    )
}


@pytest.mark.parametrize("door", ["merge", "adapter", "dtype"])
@pytest.mark.parametrize("codes", CODES)
def test_what_belongs_to_unknown_codes_is_not_computed_with(
    codes: str, door: str, tmp_path: Path
) -> None:
    """The rules would average or round the scales without changing the codes."""
    source = of_tomorrow(tmp_path / "source", "config.json", codes=CODES[codes])
    adapter = tmp_path / "adapter.safetensors"
    name = GATE.removesuffix(".weight")
    product = {
        f"{name}.lora_A.weight": torch.rand(2, 64),
        f"{name}.lora_B.weight": torch.rand(64, 2),
    }
    save_file(product, adapter)
    words = {
        "merge": ("merge", f"{source}:0.5", f"{source}:0.5", "-o"),
        "adapter": ("merge", source, "--lora", adapter, "-o"),
        "dtype": ("convert", source, "--dtype", "f16"),
    }[door]
    done = run(*words, tmp_path / "out")
    assert done.returncode == 1 and "plan.config_mismatch" in done.stderr, done
    (source / "config.json").write_text("{}")  # the control
    assert run(*words, tmp_path / "out").returncode == 0


@pytest.mark.parametrize("claim", ["config.json", "quantize_config.json"])
@pytest.mark.parametrize("place", [0, 1])
def test_the_claim_of_any_model_counts(place: int, claim: str, tmp_path: Path) -> None:
    codes = torch.ones(4, 4, dtype=torch.int16)
    folders = [of_tomorrow(tmp_path / str(i), claim, codes=codes) for i in range(2)]
    (folders[1 - place] / claim).write_text("{}")
    if claim != "config.json":
        (folders[1 - place] / claim).unlink()
    done = run("merge", *(f"{each}:0.5" for each in folders), "-o", tmp_path / "out")
    assert done.returncode == 1 and f"{claim} declares that the checkpoint" in done.stderr, done
    assert (
        f"remove {'the section from it' if claim == 'config.json' else 'the file'}" in done.stderr
    )


def test_a_foreign_file_beside_plain_numbers_is_no_claim(tmp_path: Path) -> None:
    source = of_tomorrow(tmp_path / "source", "quantize_config.json")
    assert run("convert", source, tmp_path / "out", "--quantize", "fp8").returncode == 0
    assert run("merge", f"{source}:0.5", f"{source}:0.5", "-o", tmp_path / "both").returncode == 0


@pytest.mark.parametrize("first", ["nf4", "compressed-tensors", "modelopt"])
def test_a_config_that_an_output_would_leave_stale_is_named(first: str, tmp_path: Path) -> None:
    """The source is a bare file, so no config.json replaces the older one."""
    source = folder(tmp_path / "source", {GATE: torch.randn(64, 64).bfloat16()}, {})
    loadstone.convert(source, tmp_path / "out", **KINDS[first])
    bare = source / "model.safetensors"
    done = run("convert", bare, tmp_path / "out")
    assert done.returncode == 2 and "declares an encoding" in done.stderr, done
    (tmp_path / "out" / "config.json").write_text("{}")  # the control
    assert run("convert", bare, tmp_path / "out").returncode == 0


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "nf4": {"quantize": "nf4"},
    "compressed-tensors": {"quantize": "fp8", "style": "compressed-tensors"},
    "modelopt": {"quantize": "fp8"},
    "nvfp4": {"quantize": "nvfp4"},
}


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_claims_of_an_older_output_go_with_it(first: str, second: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "source", {GATE: torch.randn(64, 64).bfloat16()}, {})
    for out, kinds in {"both": (first, second), "once": (second,)}.items():
        for kind in kinds:
            loadstone.convert(source, tmp_path / out, **KINDS[kind])
    written = {
        out: {each.name: each.read_bytes() for each in (tmp_path / out).iterdir()}
        for out in ("both", "once")
    }
    assert written["both"] == written["once"]
    left = {each.name for each in tmp_path.glob("[!.]*")}
    assert left == {"source", "both", "once"}


@pytest.mark.parametrize("claim", ["hf_quant_config.json", "quantize_config.json"])
def test_other_files_of_a_target_stay(claim: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "source", {GATE: torch.randn(64, 64).bfloat16()}, {})
    loadstone.convert(source, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "out" / claim).write_text("{}")
    loadstone.convert(source, tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "out" / claim).exists()


RULES: dict[str, list[dict[str, Any]]] = {
    "transpose": [{"op": "transpose", "dims": [0, 1], "sources": [UP], "targets": [UP]}],
    "slice": [
        {"op": "slice", "dim": 1, "start": 0, "sizes": [32], "sources": [UP], "targets": [UP]}
    ],
    "concat": [{"op": "concat", "dim": 0, "sources": [GATE, UP], "targets": ["both.weight"]}],
    "swap": [
        {"op": "rename", "sources": [UP], "targets": [GATE]},
        {"op": "rename", "sources": [GATE], "targets": [UP]},
    ],
    "rename": [{"op": "rename", "sources": [UP], "targets": ["alone.weight"]}],
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("encoding", ["fp8", "fp8-block", "int8-channel", "nvfp4", "mxfp8", "nf4"])
def test_rules_do_not_move_codes_like_numbers(tmp_path: Path, encoding: str, rule: str) -> None:
    plain = {name: torch.randn(256, 256).bfloat16() for name in (UP, GATE)}
    source = folder(tmp_path / "source", plain, {"model_type": "llama"})
    rules = [
        {**each, "sources": [s.replace(".", r"\.") for s in each["sources"]]}
        for each in RULES[rule]
    ]
    loadstone.convert(source, tmp_path / "numbers", rules=rules)  # the rules work for plain values
    loadstone.convert(source, tmp_path / "codes", quantize=encoding)
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(tmp_path / "codes", tmp_path / "out", rules=rules)
    assert caught.value.code in ("plan.encoding", "plan.shape"), caught.value
    with pytest.raises(loadstone.Error, match=r"plan\.options"):
        loadstone.convert(tmp_path / "codes", tmp_path / "out", rules=rules, quantize="fp8")
    assert not (tmp_path / "out").exists()


def test_stacks_of_codes_with_stacks_of_their_scales_are_codes(tmp_path: Path) -> None:
    plain = {
        f"model.layers.0.mlp.experts.{i}.up_proj.weight": torch.randn(128, 256).bfloat16()
        for i in range(3)
    }
    source = folder(tmp_path / "source", plain, {"model_type": "qwen3_moe"})
    loadstone.convert(source, tmp_path / "codes", quantize="fp8-block", style="compressed-tensors")
    rules = [
        {
            "op": "stack",
            "dim": 0,
            "sources": [rf"(.*)\.experts\.(\d+)\.up_proj\.weight{part}"],
            "targets": [f"$1.experts.up_proj.weight{part}"],
        }
        for part in ("", "_scale")
    ]
    loadstone.convert(tmp_path / "codes", tmp_path / "out", rules=rules)
    found = load_file(tmp_path / "out/model.safetensors")
    codes = load_file(tmp_path / "codes/model.safetensors")
    assert set(found) == {f"model.layers.0.mlp.experts.up_proj.weight{p}" for p in ("", "_scale")}
    for part in ("", "_scale"):
        expected = torch.stack([codes[f"{name}{part}"].float() for name in sorted(plain)])
        assert torch.equal(
            found[f"model.layers.0.mlp.experts.up_proj.weight{part}"].float(), expected
        )


LOOKED_FOR = ["model.safetensors", "diffusion_pytorch_model.safetensors"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WORDS = {name: torch.randn(64, 64).bfloat16() for name in (EMBEDDING, HEAD, GATE)}
TIED = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "tie_word_embeddings": True}


@pytest.mark.parametrize("name", LOOKED_FOR)
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_one_file_agrees_with_the_config_beside_it(
    first: str, second: str, name: str, tmp_path: Path
) -> None:
    source = folder(tmp_path / "source", {GATE: torch.randn(64, 64).bfloat16()}, {})
    out = tmp_path / "out"
    loadstone.convert(source, out, name=name.removesuffix(".safetensors"), **KINDS[first])
    before = (out / name).read_bytes()
    loadstone.convert(
        source, out / "merged.safetensors", **KINDS[second]
    )  # libraries ignore this name
    if first == second:
        loadstone.convert(source, out / name, overwrite=True, **KINDS[second])
        assert (out / name).read_bytes() == (out / "merged.safetensors").read_bytes()
        return
    with pytest.raises(loadstone.Error, match="declares") as caught:
        loadstone.convert(source, out / name, **KINDS[second])
    assert caught.value.code == "convert.target"
    assert (out / name).read_bytes() == before


def test_codes_that_stay_codes_agree_with_a_config_beside_them(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", fp8(), {"quantization_config": CLAIM})
    bare = tmp_path / "bare.safetensors"
    (source / "model.safetensors").rename(bare)
    loadstone.convert(bare, source / "model.safetensors")
    loadstone.convert(bare, source, overwrite=True)
    other = folder(tmp_path / "other", fp8(), {"quantization_config": CLAIM})
    again = json.dumps({"quantization_config": dict(reversed(CLAIM.items()))})
    (source / "config.json").write_text(again)
    loadstone.convert(other, source / "model.safetensors", overwrite=True)
    (source / "config.json").write_text(again.replace("fp8", "fbgemm_fp8"))
    with pytest.raises(loadstone.Error, match="declares a different encoding"):
        loadstone.convert(other, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    for target in (source, source / "model.safetensors"):
        with pytest.raises(loadstone.Error, match="declares no encoding"):
            loadstone.convert(bare, target)


@pytest.mark.parametrize("name", LOOKED_FOR)
def test_one_file_does_not_stand_beside_the_index_of_another_model(
    name: str, tmp_path: Path
) -> None:
    source = folder(tmp_path / "source", {GATE: torch.randn(64, 64).bfloat16()}, {})
    (tmp_path / "out").mkdir()
    index = tmp_path / "out" / f"{name}.index.json"
    index.write_text("{}")
    loadstone.convert(source, tmp_path / "out" / "merged.safetensors")
    with pytest.raises(loadstone.Error, match="another model") as caught:
        loadstone.convert(source, tmp_path / "out" / name)
    assert caught.value.code == "convert.target" and index.name in str(caught.value)
    index.unlink()
    loadstone.convert(source, tmp_path / "out" / name)


@pytest.mark.parametrize("door", ["file", "folder"])
@pytest.mark.parametrize("own", ["none", "untied", "tied"])
def test_a_config_does_not_tie_two_tensors_of_the_output(
    own: str, door: str, tmp_path: Path
) -> None:
    source = folder(tmp_path / "source", WORDS, TIED | {"tie_word_embeddings": own == "tied"})
    if own == "none":
        (source / "config.json").unlink()
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text(json.dumps(TIED))
    target = out / "model.safetensors" if door == "file" else out
    # Without a config, the source may contain the same tensor under both names.
    if own in ("tied", "none") or door == "folder":
        loadstone.convert(source, target)
        return
    with pytest.raises(loadstone.Error, match="tie_word_embeddings") as caught:
        loadstone.convert(source, target)
    assert caught.value.code == "convert.target" and HEAD in str(caught.value)
    (out / "config.json").write_text(json.dumps(TIED | {"tie_word_embeddings": False}))
    loadstone.convert(source, target)


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_a_model_leaves_no_config_of_an_adapter(kind: str, tmp_path: Path) -> None:
    """transformers treats a folder that contains an adapter config as an adapter."""
    source = folder(tmp_path / "source", {GATE: torch.randn(64, 64).bfloat16()}, {})
    bare = source / "model.safetensors"
    if kind == "adapter":
        bare = bare.rename(source / "adapter_model.safetensors")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_config.json").write_text("{}")
    loadstone.convert(bare, tmp_path / "out")
    left = {each.name for each in (tmp_path / "out").iterdir()}
    adapter = {"adapter_config.json", "adapter_model.safetensors"}
    assert left == (adapter if kind == "adapter" else {"model.safetensors"})
    (tmp_path / "out" / "adapter_model.bin").write_bytes(b"")
    done = run("convert", bare, tmp_path / "out")
    assert done.returncode == (0 if kind == "adapter" else 2), done.stderr


def test_the_index_of_a_variant_is_another_model(tmp_path: Path) -> None:
    index, other = "model.safetensors.index.fp16.json", "pytorch_model.bin.index.json"
    source = folder(tmp_path / "source", {GATE: torch.randn(64, 64).bfloat16()}, {})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / index).write_text("{}")
    done = run("convert", source, tmp_path / "out")
    assert done.returncode == 2 and "another model" in done.stderr and index in done.stderr
    (tmp_path / "out" / index).rename(tmp_path / "out" / other)  # safetensors takes precedence
    assert run("convert", source, tmp_path / "out").returncode == 0
