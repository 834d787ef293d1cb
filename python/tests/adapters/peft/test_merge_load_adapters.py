"""Tests that ``lora=`` yields peft's values, even if the libraries change names and layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_models import by_name, write_config, write_single_file
from safetensors.torch import load_file, save_file

import loadstone
import loadstone.diffusers
import loadstone.transformers
from loadstone._execute.audit import last_report

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8, "moe_intermediate_size": 24,
    "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS = {
    "llama": transformers.LlamaConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
}


def randomise(wrapped: Any) -> None:
    """Randomise the adapter, because peft initialises ``lora_B`` with zeros."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def wrapped_and_saved(model: Any, folder: Path, modules: list[str]) -> dict[str, torch.Tensor]:
    """Save the model and an adapter; return peft's merged weights in F32."""
    model.save_pretrained(folder / "base")
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=modules)
    wrapped = peft.get_peft_model(model, config)
    randomise(wrapped)
    wrapped.save_pretrained(folder / "adapter")
    return dict(wrapped.merge_and_unload().state_dict())


def assert_close(model: Any, expected: dict[str, torch.Tensor], changed: int) -> None:
    values = dict(model.state_dict())
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-5)
    assert loadstone.audit(model).ok
    report = last_report(model)
    assert report is not None
    assert sum(bool(row.merged) for row in report.provenance.values()) == changed


@pytest.mark.parametrize("kind", MODELS)
def test_transformers(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    config = MODELS[kind](**SMALL)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    expected = wrapped_and_saved(model, tmp_path, ["q_proj", "v_proj"])
    cls = type(model)
    model = loadstone.transformers.from_pretrained(
        cls, tmp_path / "base", lora=tmp_path / "adapter", dtype=torch.float32
    )
    assert_close(model, expected, changed=4)
    plain = loadstone.transformers.from_pretrained(cls, tmp_path / "base", dtype=torch.float32)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(plain.state_dict()[name], expected[name])


def test_transformers_with_a_module_that_is_not_there(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL))
    wrapped_and_saved(model, tmp_path, ["q_proj"])
    smaller = transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 1})
    transformers.AutoModelForCausalLM.from_config(smaller).save_pretrained(tmp_path / "base")
    with pytest.raises(loadstone.PlanError, match=r"layers\.1\.self_attn\.q_proj") as caught:
        loadstone.transformers.from_pretrained(
            transformers.LlamaForCausalLM, tmp_path / "base", lora=tmp_path / "adapter"
        )
    assert caught.value.code == "merge.unused"


@pytest.mark.parametrize("single_file", [False, True])
def test_diffusers(tmp_path: Path, single_file: bool) -> None:
    case = by_name("wan_t2v")
    model = case.build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "base")
    save_file(case.original(model), tmp_path / "single.safetensors")
    config = write_config(model, tmp_path / "config")
    generator = torch.Generator().manual_seed(3)
    adapter = {}
    expected = dict(before)
    for name in ("blocks.0.attn1.to_q", "blocks.0.attn2.to_out.0", "blocks.0.ffn.net.2"):
        rows, columns = before[f"{name}.weight"].shape
        right = torch.randn(3, columns, generator=generator)
        left = torch.randn(rows, 3, generator=generator)
        adapter[f"transformer.{name}.lora_A.weight"] = right
        adapter[f"transformer.{name}.lora_B.weight"] = left
        expected[f"{name}.weight"] = before[f"{name}.weight"] + 0.5 * (left @ right)
    (tmp_path / "adapter").mkdir()
    save_file(adapter, tmp_path / "adapter" / "pytorch_lora_weights.safetensors")
    lora = {tmp_path / "adapter": 0.5}

    def load(tie: Any) -> Any:
        if not single_file:
            folder = tmp_path / "base"
            return loadstone.diffusers.from_pretrained(case.cls, folder, lora=lora, tie=tie)
        path = str(tmp_path / "single.safetensors")
        return loadstone.diffusers.from_single_file(
            case.cls, path, config=config, lora=lora, tie=tie
        )

    assert_close(load("keep"), expected, changed=3)
    with pytest.raises(loadstone.OptionError) as caught:
        load("nonsense")
    assert caught.value.field == "tie"


# Module and suffixes of an adapter's tensors, by naming style, for a single-file layout.
SINGLE_FILE = {
    "kohya": ("lora_unet_caption_projection_linear_1", "lora_down.weight", "lora_up.weight"),
    "ComfyUI": ("diffusion_model.caption_projection.linear_1", "lora_A.weight", "lora_B.weight"),
    "model": ("caption_projection.linear_1", "lora_A.weight", "lora_B.weight"),
    "file": ("model.diffusion_model.caption_projection.linear_1", "lora_A.weight", "lora_B.weight"),
}


@pytest.mark.parametrize(
    ("style", "door"),
    [(style, "from_single_file") for style in SINGLE_FILE]
    + [(style, "merge") for style in SINGLE_FILE if style != "model"],
)
def test_names_of_a_single_file_are_one_tensor(style: str, door: str, tmp_path: Path) -> None:
    case = by_name("ltx")
    model = case.build(1)
    file, config = write_single_file(case, model, tmp_path / "base.safetensors")
    weight = model.caption_projection.linear_1.weight.detach()
    right, left = torch.randn(2, weight.shape[1]), torch.randn(weight.shape[0], 2)
    stem, first, second = SINGLE_FILE[style]
    adapter = tmp_path / "adapter.safetensors"
    save_file({f"{stem}.{first}": right, f"{stem}.{second}": left}, adapter)
    if door == "merge":
        loadstone.merge(file, tmp_path / "out.safetensors", lora=adapter)
        name = "model.diffusion_model.caption_projection.linear_1.weight"
        merged = load_file(tmp_path / "out.safetensors")[name]
    else:
        loaded = loadstone.diffusers.from_single_file(case.cls, file, config=config, lora=adapter)
        merged = loaded.caption_projection.linear_1.weight
    assert not torch.equal(merged, weight)  # control
    assert torch.allclose(merged, weight + left @ right, rtol=1e-5, atol=1e-5)


MODULE = "text_model.encoder.layers.0.mlp.fc1"
KOHYA = MODULE.replace(".", "_")
# Number of the pipeline's text encoder, by the prefix of the adapter's tensors.
ENCODERS = {"lora_te_": 1, "lora_te1_": 1, "lora_te2_": 2, "text_encoder.": 1, "text_encoder_2.": 2}


def write_encoder_adapter(prefix: str, path: Path) -> Path:
    stem = prefix + (KOHYA if prefix.startswith("lora") else MODULE)
    tensors = {f"{stem}.lora_down.weight": torch.ones(2, 8)}
    save_file(tensors | {f"{stem}.lora_up.weight": torch.ones(16, 2)}, path)
    return path


@pytest.mark.parametrize("encoders", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("prefix", [prefix for prefix in ENCODERS if prefix.startswith("lora")])
def test_encoders_of_a_single_file_are_told_apart(
    prefix: str, encoders: tuple[int, ...], tmp_path: Path
) -> None:
    names = {n: f"conditioner.embedders.{n}.transformer.{MODULE}.weight" for n in encoders}
    base, out = tmp_path / "base.safetensors", tmp_path / "out.safetensors"
    save_file({name: torch.zeros(16, 8) for name in names.values()}, base)
    adapter = write_encoder_adapter(prefix, tmp_path / "lora.safetensors")
    meant = ENCODERS[prefix] - 1
    if meant not in names:
        with pytest.raises(loadstone.PlanError) as caught:
            loadstone.merge(base, out, lora=adapter)
        assert caught.value.code == "merge.unused"
        return
    assert not loadstone.merge(base, out, lora=adapter).findings
    changed = {name for name, tensor in load_file(out).items() if tensor.any()}
    assert changed == {names[meant]}


@pytest.mark.parametrize("folder", ["text_encoder", "text_encoder_2", "clip"])
@pytest.mark.parametrize("prefix", ENCODERS)
def test_an_adapter_of_another_encoder_is_named(prefix: str, folder: str, tmp_path: Path) -> None:
    base = tmp_path / folder
    base.mkdir()
    save_file({f"{MODULE}.weight": torch.zeros(16, 8)}, base / "model.safetensors")
    adapter = write_encoder_adapter(prefix, tmp_path / "lora.safetensors")
    report = loadstone.merge(base, tmp_path / "out", lora=adapter)
    warned = [finding.message for finding in report.findings if finding.code == "merge.adapter"]
    is_same = folder == "text_encoder_2" if ENCODERS[prefix] == 2 else folder != "text_encoder_2"
    assert len(warned) == (not is_same)
    assert all(f"text encoder {ENCODERS[prefix]}" in message for message in warned)


@pytest.mark.parametrize("door", ["merge", "load", "from_pretrained"])
@pytest.mark.parametrize(("declared", "is_lost"), [("lm_head", True), ("classifier", False)])
def test_modules_trained_whole_are_there(
    declared: str, is_lost: bool, door: str, tmp_path: Path
) -> None:
    """The adapter must contain each head that it declares, if the base model has the head."""
    cls = transformers.LlamaForCausalLM
    base = cls(transformers.LlamaConfig(**SMALL))
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"modules_to_save": [declared]}))

    def begin() -> None:
        if door == "merge":
            loadstone.merge(tmp_path / "base", tmp_path / "out", lora=tmp_path / "adapter")
        elif door == "load":
            with loadstone.skeleton():
                model = cls(transformers.LlamaConfig(**SMALL))
            loadstone.load(model, tmp_path / "base", lora=tmp_path / "adapter")
        else:
            loadstone.transformers.from_pretrained(
                cls, tmp_path / "base", lora=tmp_path / "adapter"
            )

    if is_lost:
        with pytest.raises(loadstone.Error, match="lists 'lm_head' in modules_to_save"):
            begin()
    else:
        begin()
