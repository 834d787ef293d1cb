"""loadstone verify checks config.json against the quantized tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_scaled import write_fp8_block
from command import verified
from docs_worlds import gpt_oss, llama, of_bitsandbytes
from safetensors.torch import load_file, save_file

import loadstone

pytest.importorskip("transformers")

STYLES = {
    "modelopt": ("fp8", "fp8-block", "int4-awq", "mxfp4", "mxfp8", "nvfp4", "int8-channel"),
    "compressed-tensors": ("fp8", "fp8-channel", "fp8-block", "int8-channel", "mxfp4", "nvfp4"),
    "bitsandbytes": ("nf4", "fp4", "int8"),
}
WRITTEN = [(style, encoding) for style, encodings in STYLES.items() for encoding in encodings]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("plain") / "llama")


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    change(config)
    file.write_text(json.dumps(config), encoding="utf-8")


def codes(folder: Path, *options: str) -> tuple[int, set[str]]:
    """Return the exit status, and the codes of the findings."""
    status, report = verified(folder, *options)
    return status, {finding["code"] for finding in report["findings"]}


@pytest.mark.parametrize(("style", "encoding"), WRITTEN)
def test_what_conversions_write_agrees(
    style: str, encoding: str, plain: Path, tmp_path: Path
) -> None:
    options = {} if style == "bitsandbytes" else {"style": style}
    loadstone.convert(plain, tmp_path / "out", quantize=encoding, **options)
    assert codes(tmp_path / "out") == (0, set())
    edit(tmp_path / "out", lambda config: config.pop("quantization_config"))
    (tmp_path / "out" / "hf_quant_config.json").unlink(missing_ok=True)
    assert codes(tmp_path / "out") == (1, {"q.config"})


def test_what_libraries_write_agrees(tmp_path: Path) -> None:
    assert codes(of_bitsandbytes(tmp_path / "bitsandbytes")) == (0, set())
    write_fp8_block(tmp_path / "deepseek")
    section: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "deepseek" / "config.json").write_text(json.dumps(section), encoding="utf-8")
    assert codes(tmp_path / "deepseek") == (0, set())
    gpt_oss(tmp_path / "gpt-oss")
    section = {"quantization_config": {"quant_method": "mxfp4"}}
    edit(tmp_path / "gpt-oss", lambda config: config.update(section))
    assert codes(tmp_path / "gpt-oss") == (0, set())


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_another_method_is_named(method: str, plain: Path, tmp_path: Path) -> None:
    loadstone.convert(plain, tmp_path / "out", quantize="fp8", style="compressed-tensors")
    edit(
        tmp_path / "out",
        lambda config: config["quantization_config"].update(quant_method=method),
    )
    assert codes(tmp_path / "out") == (1, {"q.config"})


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt", "fp8"])
def test_bitsandbytes_under_another_method_is_named(
    method: str, plain: Path, tmp_path: Path
) -> None:
    loadstone.convert(plain, tmp_path / "out", quantize="nf4")
    edit(
        tmp_path / "out",
        lambda config: config["quantization_config"].update(quant_method=method),
    )
    assert codes(tmp_path / "out") == (1, {"q.config"})


def test_other_bits_are_named(plain: Path, tmp_path: Path) -> None:
    loadstone.convert(plain, tmp_path / "out", quantize="fp8", style="compressed-tensors")

    def change(config: dict[str, Any]) -> None:
        for group in config["quantization_config"]["config_groups"].values():
            group["weights"]["num_bits"] = 4

    edit(tmp_path / "out", change)
    status, report = verified(tmp_path / "out")
    (finding,) = report["findings"]
    assert (status, finding["code"], finding["found"]) == (1, "q.config", "4 bits")
    assert finding["expected"].startswith("fp8")


GROUPS = {"group_0": {"weights": {"num_bits": 8}, "targets": ["Linear"]}}
CACHE = {"num_bits": 8, "type": "float"}
CLAIMS: dict[str, tuple[dict[str, Any], bool]] = {
    "compressed-tensors": ({"format": "float-quantized", "config_groups": GROUPS}, False),
    "compressed-tensors, numbers that were rounded": (
        {"format": "dense", "config_groups": GROUPS},
        True,
    ),
    "compressed-tensors, of the cache": (
        {"format": "dense", "config_groups": {}, "kv_cache_scheme": CACHE},
        True,
    ),
    "gptq": ({"bits": 4}, False),
    "awq": ({"bits": 4}, False),
    "bitsandbytes": ({"load_in_4bit": True}, False),
    "bitsandbytes, of nothing": ({"load_in_4bit": False, "load_in_8bit": False}, True),
    "fp8": ({"weight_block_size": [128, 128]}, False),
    "mxfp4": ({}, False),
    "fp8, of the cache": ({"kv_cache_scheme": "fp8", "ignored_layers": ["re:.*"]}, True),
    "modelopt, of the cache": ({"quant_algo": None, "kv_cache_quant_algo": "FP8"}, True),
    "of-nobody": ({"bits": 3}, True),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_about_plain_numbers(claim: str, plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "out")
    section, is_right = CLAIMS[claim]
    section = {"quant_method": claim.partition(",")[0]} | section
    edit(tmp_path / "out", lambda config: config.update(quantization_config=section))
    assert codes(tmp_path / "out") == ((0, set()) if is_right else (1, {"q.config"}))


def test_codes_of_an_unknown_layout_are_not_taken_for_none(tmp_path: Path) -> None:
    """Marlin's GPTQ codes have different names and a different order."""
    tensors = {"a.B": torch.ones(8, 64, dtype=torch.int32), "a.s": torch.ones(1, 32).half()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert codes(tmp_path) == (0, set())


def claiming(folder: Path, **section: Any) -> None:
    """Write a config.json with this quantization section into the folder."""
    config = {"model_type": "llama"} | ({"quantization_config": section} if section else {})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_the_config_of_the_base_is_no_claim_about_an_adapter(tmp_path: Path) -> None:
    tensors = {f"base.x.lora_{each}.weight": torch.ones(8, 8) for each in "AB"}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    claiming(tmp_path, quant_method="gptq", bits=4)
    assert codes(tmp_path) == (1, {"q.config"})  # control
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    assert codes(tmp_path) == (0, set())


def test_a_shard_by_itself_is_not_all_that_the_config_speaks_of(tmp_path: Path) -> None:
    shard = tmp_path / "model-00002-of-00002.safetensors"
    save_file({"lm_head.weight": torch.ones(8, 8)}, shard)
    claiming(tmp_path, quant_method="gptq", bits=4)
    assert codes(shard) == (0, set())
    shard.rename(tmp_path / "model.safetensors")
    assert codes(tmp_path / "model.safetensors") == (1, {"q.config"})  # control


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "params.json"])
def test_other_files_may_speak_of_it(name: str, plain: Path, tmp_path: Path) -> None:
    loadstone.convert(plain, tmp_path / "out", quantize="nf4")
    claiming(tmp_path / "out")
    assert codes(tmp_path / "out") == (1, {"q.config"})  # control
    (tmp_path / "out" / name).write_text("{}", encoding="utf-8")
    assert codes(tmp_path / "out") == (0, set())


def test_a_claim_deep_in_a_config_is_one(plain: Path, tmp_path: Path) -> None:
    loadstone.convert(plain, tmp_path / "out", quantize="fp8")
    (tmp_path / "out" / "hf_quant_config.json").unlink()
    config = tmp_path / "out" / "config.json"
    section = json.loads(config.read_text(encoding="utf-8"))["quantization_config"]
    deep = {"model_type": "omni", "thinker": {"text": {"quantization_config": section}}}
    config.write_text(json.dumps(deep), encoding="utf-8")
    assert codes(tmp_path / "out") == (0, set())


def test_a_config_of_no_library_may_be_silent(tmp_path: Path) -> None:
    """GPT-OSS has such a config in its folder "original"."""
    gpt_oss(tmp_path / "original")
    config = tmp_path / "original" / "config.json"
    assert codes(tmp_path / "original") == (1, {"q.config"})
    config.write_text('{"num_hidden_layers": 1}', encoding="utf-8")
    assert codes(tmp_path / "original") == (0, set())


def test_a_lone_file_is_not_judged(plain: Path, tmp_path: Path) -> None:
    loadstone.convert(plain, tmp_path / "out", quantize="fp8")
    alone = tmp_path / "alone" / "model.safetensors"
    alone.parent.mkdir()
    shutil.copy(tmp_path / "out" / "model.safetensors", alone)
    assert codes(alone) == (0, set())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_strict_refuses_what_is_not_finite(value: float, plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "out")
    assert codes(tmp_path / "out", "--strict") == (0, set())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.tensor(value)
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    assert codes(tmp_path / "out") == (0, set())
    status, report = verified(tmp_path / "out", "--strict")
    (finding,) = report["findings"]
    assert (status, finding["code"]) == (1, "verify.not_finite")
    assert "'model.norm.weight'" in finding["message"]


def drop_section(folder: Path) -> None:
    edit(folder, lambda config: config.pop("quantization_config"))


def ignore_all(folder: Path) -> None:
    edit(folder, lambda config: config["quantization_config"]["ignore"].append("re:.*_proj"))


def ignore_by_look_behind(folder: Path) -> None:
    edit(folder, lambda config: config["quantization_config"]["ignore"].append("re:.*(?<=x)"))


def other_bits(folder: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 4

    edit(folder, change)


def tie(folder: Path) -> None:
    edit(folder, lambda config: config.update(tie_word_embeddings=True))


def untouched(_: Path) -> None:
    """Leave the folder unchanged, as a control."""


@pytest.mark.parametrize(
    "change", [untouched, drop_section, ignore_all, ignore_by_look_behind, other_bits, tie]
)
@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
def test_a_comparison_has_the_findings_of_each_config(
    change: Callable[[Path], None], place: int, plain: Path, tmp_path: Path
) -> None:
    tensors = load_file(plain / "model.safetensors")
    shutil.copytree(plain, tmp_path / "in")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    edit(tmp_path / "in", lambda config: config.update(tie_word_embeddings=False))
    out = tmp_path / "out"
    loadstone.convert(tmp_path / "in", out, quantize="fp8-channel", style="compressed-tensors")
    change(out)
    alone, report = verified(out)
    both = [tmp_path / "in", tmp_path / "in"]
    both[place] = out
    status, compared = verified(*both)
    assert compared["differences"] == []
    assert status == alone == (change is not untouched)
    assert compared["ok"] == report["ok"]
    found, expected = ([each["code"] for each in one["findings"]] for one in (compared, report))
    assert found == expected
    assert all(str(out) in each["message"] for each in compared["findings"])
