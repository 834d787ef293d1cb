"""Tests checkpoints whose config transforms activations at run time, at every entry point.

A weight that contains a transform needs the inverse transform. If other weights contain the
inverse, a conversion is correct. If the library applies the inverse online, plain weights compute
wrong results.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from merge_models import products, write_peft
from safetensors.torch import load_file, save_file
from torch import nn

import loadstone

DOWN = "model.layers.0.mlp.down_proj"
HIDDEN, INNER = 128, 256
Door = Callable[[Path, dict[str, torch.Tensor]], None]
ENCODINGS = ["fp8-channel", "fp8-block", "int8-channel", "nvfp4", "mxfp8"]


def groups(*locations: str) -> dict[str, Any]:
    places = [{"targets": ["re:.*down_proj$"], "location": each} for each in locations]
    return {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": places}}}}


def rotation(**flags: bool) -> dict[str, Any]:
    return {"r1": False, "r2": False, "r3": False, "r4": False, **flags}


# Section of the config, and the name of its online transform (None if all are in weights).
SECTIONS: dict[str, tuple[dict[str, Any], str | None]] = {
    "input": (groups("input", "weight_input"), "R4_input"),
    "output": (groups("weight_output", "output"), "R4_output"),
    "queries": (groups("q_attn"), "R4_q_attn"),
    "keys": (groups("k_cache"), "R4_k_cache"),
    "values": (groups("v_cache"), "R4_v_cache"),
    "of tomorrow": (groups("router"), "R4_router"),
    "in the weights": (groups("weight_input", "weight_output"), None),
    "empty": ({"transform_config": {}}, None),
    "null": ({"transform_config": None}, None),
    "quark": ({"algo_config": [{"name": "rotation", **rotation(r4=True)}]}, "rotation_r4"),
    "quark online": (
        {"algo_config": [{"name": "rotation", **rotation(r1=True), "online_r1_rotation": True}]},
        "rotation_r1",
    ),
    "quark, one": ({"algo_config": {"name": "quarot", **rotation(r3=True)}}, "quarot_r3"),
    "quark in the weights": (
        {"algo_config": [{"name": "rotation", **rotation(r1=True, r2=True)}]},
        None,
    ),
    "quark without": ({"algo_config": [{"name": "awq"}]}, None),
    "auto-round": ({"rotation_config": rotation(r4=True)}, "spinquant_r4"),
    "auto-round, older": ({"spinquant_config": rotation(r3=True)}, "spinquant_r3"),
    "auto-round, each layer": ({"rotation_config": {"hadamard_type": "hadamard"}}, "hadamard"),
    "modelopt": ({"rotate": True}, "rotate"),
    "modelopt, more": ({"rotate": {"enable": True, "block_size": 16}}, "rotate"),
    "modelopt without": ({"rotate": {"enable": False}}, None),
}


class Net(nn.Module):
    """A model whose parameters have the names and shapes of a checkpoint."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            at: nn.Module = self
            for part in path:
                if part not in dict(at.named_children()):
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
            at.register_parameter(leaf, nn.Parameter(torch.zeros_like(tensor), False))


def made(folder: Path, section: str, encoding: str | None) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a checkpoint of this encoding, whose config has the section; return its path and the
    plain tensors."""
    generator = torch.Generator().manual_seed(1)
    plain = {
        f"{DOWN}.weight": torch.randn(HIDDEN, INNER, generator=generator).bfloat16(),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    (folder / "plain").mkdir()
    save_file(plain, folder / "plain" / "model.safetensors")
    config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "plain" / "config.json").write_text(json.dumps(config))
    given = folder / "given"
    if encoding is None:
        given.mkdir()
        stored = plain | {f"{DOWN}.R4_input.weight": torch.eye(INNER).bfloat16()}
        save_file(stored, given / "model.safetensors")
        config |= {"quantization_config": {"quant_method": "compressed-tensors"}}
    else:
        style = "compressed-tensors"
        loadstone.convert(folder / "plain", given, quantize=encoding, style=style)
        config = json.loads((given / "config.json").read_text())
        if "transform_config" in SECTIONS[section][0] and SECTIONS[section][1]:
            stored = load_file(given / "model.safetensors")
            stored[f"{DOWN}.{SECTIONS[section][1]}.weight"] = torch.eye(INNER).bfloat16()
            save_file(stored, given / "model.safetensors")
    config["quantization_config"] |= SECTIONS[section][0]
    (given / "config.json").write_text(json.dumps(config))
    return given, plain


def _dequantized(given: Path, _: Any) -> None:
    loadstone.convert(given, given.with_name("out"), dequantize=True)


def _to_one_file(given: Path, _: Any) -> None:
    loadstone.convert(given, given.with_name("out.safetensors"), dequantize=True)


def _quantized(given: Path, _: Any) -> None:
    loadstone.convert(given, given.with_name("out"), quantize="fp8", style="compressed-tensors")


def _by_command(given: Path, _: Any) -> None:
    done = run("convert", given, given.with_name("out"), "--dequantize", "--json")
    if done.returncode:
        report = json.loads(done.stdout)
        error = report.get("error") or report["findings"][0]
        raise loadstone.Error(error["message"], code=error["code"])


def _merged(given: Path, _: Any) -> None:
    loadstone.merge([(given, 0.5), (given, 0.5)], given.with_name("out"))


def _with_adapter(given: Path, _: Any) -> None:
    adapter = given.with_name("adapter")
    if not adapter.exists():
        write_peft(adapter, products(2, 5, {DOWN: (HIDDEN, INNER)}), r=2)
    loadstone.merge(given, given.with_name("out"), lora=adapter)


def _loaded(given: Path, plain: dict[str, torch.Tensor]) -> None:
    loadstone.load(Net(plain), given, unexpected="ignore")


def _loaded_as_codes(given: Path, plain: dict[str, torch.Tensor]) -> None:
    stored = load_file(given / "model.safetensors")
    transforms = [name for name in stored if ".R4_" in name]
    loadstone.load(
        Net({name: stored[name] for name in stored if name not in transforms}),
        given,
        unexpected="ignore",
    )


def _planned(given: Path, plain: dict[str, torch.Tensor]) -> None:
    loadstone.plan(Net(plain), given, unexpected="ignore").require_ok()


DOORS: dict[str, Door] = {
    "dequantize": _dequantized,
    "one file": _to_one_file,
    "quantize": _quantized,
    "command": _by_command,
    "merge": _merged,
    "adapter": _with_adapter,
    "load": _loaded,
    "load of codes": _loaded_as_codes,
    "plan": _planned,
}


def refusal(door: Door, given: Path, plain: dict[str, torch.Tensor]) -> str:
    """Return the error's message about transforms, or an empty string."""
    try:
        door(given, plain)
    except loadstone.Error as error:
        assert not list(given.parent.glob("out*"))
        return f"{error.code}: {error}"
    return ""


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("section", SECTIONS)
def test_transforms_that_are_not_in_the_weights_are_refused(
    section: str, door: str, tmp_path: Path
) -> None:
    given, plain = made(tmp_path, section, "fp8-channel")
    found, expected = refusal(DOORS[door], given, plain), SECTIONS[section][1]
    is_stored = "transform_config" in SECTIONS[section][0]
    if expected is None or (door == "load of codes" and not is_stored):
        assert not found
    else:
        assert found.startswith("q.transform") and expected in found


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("encoding", ENCODINGS[1:])
def test_encodings(encoding: str, door: str, tmp_path: Path) -> None:
    """Even if the codes describe their layout, the transforms of the config apply."""
    given, plain = made(tmp_path, "input", encoding)
    assert refusal(DOORS[door], given, plain).startswith("q.transform")


@pytest.mark.parametrize("door", ["quantize", "merge", "adapter", "load", "plan"])
def test_plain_weights_behind_a_transform(door: str, tmp_path: Path) -> None:
    given, plain = made(tmp_path, "input", None)
    assert refusal(DOORS[door], given, plain).startswith("q.transform")
    config = json.loads((given / "config.json").read_text())
    del config["quantization_config"]
    (given / "config.json").write_text(json.dumps(config))
    assert not refusal(DOORS[door], given, plain)


@pytest.mark.parametrize("encoding", [*ENCODINGS, None])
@pytest.mark.parametrize("section", ["input", "quark", "in the weights"])
def test_codes_and_config_stay_together(section: str, encoding: str | None, tmp_path: Path) -> None:
    given, _ = made(tmp_path, section, encoding)
    loadstone.convert(given, tmp_path / "out")
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (given, tmp_path / "out")
    )
    assert after == before
    found, stored = (load_file(at / "model.safetensors") for at in (tmp_path / "out", given))
    assert found.keys() == stored.keys()
    assert all(found[n].view(torch.uint8).equal(stored[n].view(torch.uint8)) for n in stored)


@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
def test_another_style_would_lose_the_config(style: str, tmp_path: Path) -> None:
    given, _ = made(tmp_path, "input", "fp8-channel")
    with pytest.raises(loadstone.Error, match="R4_input") as caught:
        loadstone.convert(given, tmp_path / "out", style=style)
    assert caught.value.code == "q.transform"


def test_a_model_with_the_transforms_takes_the_weights(tmp_path: Path) -> None:
    given, plain = made(tmp_path, "input", None)
    stored = load_file(given / "model.safetensors")
    net = Net(stored)
    loadstone.load(net, given)
    assert all(torch.equal(net.get_parameter(name), stored[name]) for name in plain)


@pytest.mark.parametrize("encoding", ["fp8-channel", None])
def test_all_tensors_of_a_file_have_their_transforms(encoding: str | None, tmp_path: Path) -> None:
    given, _ = made(tmp_path, "input", encoding)
    found = loadstone.load_file(given)
    assert torch.equal(found[f"{DOWN}.R4_input.weight"], torch.eye(INNER).bfloat16())


def test_the_config_of_modelopt_counts_too(tmp_path: Path) -> None:
    given, plain = made(tmp_path, "empty", "fp8-channel")
    text: dict[str, Any] = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    for rotates in (False, True):
        text["quantization"] |= {"rotate": rotates}
        (given / "hf_quant_config.json").write_text(json.dumps(text))
        found = refusal(DOORS["dequantize"], given, plain)
        assert found.startswith("q.transform") == rotates
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_transformers_drops_transforms(tmp_path: Path) -> None:
    """transformers ignores transforms without an error (docs/found-elsewhere.md), but
    compressed-tensors applies them."""
    transformers = pytest.importorskip("transformers")
    library = pytest.importorskip("compressed_tensors.transform")
    from compressed_tensors.transform import TransformConfig

    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=64,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.5)
    tokens = torch.tensor([[3, 7, 9, 20]])
    wanted = net(tokens).logits.detach()
    place = {"targets": ["re:.*down_proj$"]}
    places = [
        {**place, "location": "input"},
        {**place, "location": "weight_input", "inverse": True},
    ]
    section = {"config_groups": {"R4": {"type": "hadamard", "apply": places}}}
    library.apply_transform_config(net, TransformConfig.model_validate(section))
    assert torch.allclose(net(tokens).logits, wanted, atol=1e-4)
    tensors = {name: each.clone() for name, each in net.state_dict().items() if "param" not in name}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    claim = {"quant_method": "compressed-tensors", "format": "dense", "transform_config": section}
    text = json.dumps({**config.to_dict(), "quantization_config": claim}, default=str)
    (tmp_path / "config.json").write_text(text)
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path)(tokens).logits
    assert not torch.allclose(found, wanted, atol=1.0)
    with pytest.raises(loadstone.Error, match="R4_input"):
        loadstone.transformers.from_pretrained(transformers.LlamaForCausalLM, tmp_path)
