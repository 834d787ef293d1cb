"""Tests adapters of models with offloaded layers, and Trainer's checkpoints of fused experts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import accelerate
import diffusers
import pytest
import torch
from diffusers_pipelines import unet
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

import loadstone

IDS = torch.arange(8)[None]
FIRST = "model.layers.0.self_attn.q_proj"
PLACES = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


def lora(**more) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "up_proj"], **more)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Path, Path, torch.Tensor, torch.Tensor]:
    """Write a model and its adapter; return the folders, and the outputs without and with it."""
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    model = LlamaForCausalLM.from_pretrained(folder / "base")  # the adapter records this path
    with torch.no_grad():
        plain = model(IDS).logits
        tuned = get_peft_model(model, lora(init_lora_weights=False)).eval()
        tuned.save_pretrained(folder / "lora")
        return folder / "base", folder / "lora", plain, tuned(IDS).logits


def offloaded(folder: Path, tmp_path: Path):
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map=PLACES, offload_folder=tmp_path / "offload"
    )


def assert_adapters_are_real(model) -> None:
    adapters = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    assert len(adapters) == 8 and not any(parameter.is_meta for parameter in adapters.values())
    # The offloaded layer must stay offloaded.
    assert any(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def test_a_folder_with_an_adapter_and_layers_on_disk(llama, tmp_path):
    _, adapter, plain, tuned = llama
    model = loadstone.transformers.from_pretrained(
        AutoModelForCausalLM, adapter, device_map=PLACES, offload_folder=tmp_path / "offload"
    )
    assert_adapters_are_real(model)
    assert torch.equal(model(IDS).logits, tuned) and not torch.equal(plain, tuned)


@pytest.mark.parametrize("way", ["direct", "patched"])
@pytest.mark.parametrize("device_map", [None, PLACES])
def test_a_folder_with_an_adapter_passes_the_audit(llama, tmp_path, way, device_map):
    _, adapter, _, tuned = llama
    options = {"device_map": device_map, "offload_folder": tmp_path / "offload"}
    if way == "direct":
        model = loadstone.transformers.from_pretrained(AutoModelForCausalLM, adapter, **options)
    else:
        with loadstone.patch("transformers", "peft"):
            model = AutoModelForCausalLM.from_pretrained(adapter, **options)
    audit = loadstone.audit(model)
    assert audit.ok, audit
    assert audit.provenance[f"{FIRST}.base_layer.weight"].origin == "checkpoint"
    assert all("lora_" in name for name in audit.changed) and len(audit.changed) == 8
    loaded = f"ok: all {len(audit.provenance)} loaded tensors have a known origin "
    assert str(audit).startswith(loaded) and str(audit).endswith("), 8 added since the load")
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, tuned)


@torch.no_grad()
@pytest.mark.parametrize("library", ["peft", "transformers"])
def test_an_adapter_loaded_later(llama, tmp_path, library):
    base, adapter, _, tuned = llama
    with loadstone.patch("transformers"):
        model = offloaded(base, tmp_path)
    with loadstone.patch(library):
        model.load_adapter(adapter)
    assert_adapters_are_real(model)
    assert torch.equal(model(IDS).logits, tuned)


@torch.no_grad()
@pytest.mark.parametrize("add", ["add_adapter", "get_peft_model"])
def test_a_fresh_adapter_is_initialised(llama, tmp_path, add):
    base, _, plain, _ = llama
    with loadstone.patch("transformers", "peft"):
        model = offloaded(base, tmp_path)
        if add == "add_adapter":
            model.add_adapter(lora())
        else:
            model = get_peft_model(model, lora())
    assert_adapters_are_real(model)
    assert torch.equal(model.eval()(IDS).logits, plain)  # a new adapter has no effect yet
    values = dict(model.named_parameters())
    first = next(value for name, value in values.items() if "layers.1" in name and "lora_A" in name)
    assert first.abs().max() > 0 and first.requires_grad


def test_what_needs_an_offloaded_weight_is_refused_by_name(llama, tmp_path):
    base, *_ = llama
    with loadstone.patch("transformers", "peft"):
        for number, more in enumerate(({"init_lora_weights": "pissa"}, {"use_dora": True})):
            model = offloaded(base, tmp_path / str(number))
            with pytest.raises(loadstone.PlanError, match="without offloading this layer"):
                model.add_adapter(lora(**more))
            in_memory = LlamaForCausalLM.from_pretrained(base)  # as the message advises
            in_memory.add_adapter(lora(**more))
            assert not any(parameter.is_meta for parameter in in_memory.parameters())
            assert in_memory(IDS).logits.isfinite().all()


def test_hooks_on_modules_around_a_layer_are_refused(llama):
    base, *_ = llama
    model = LlamaForCausalLM.from_pretrained(base)
    accelerate.cpu_offload(model, "cpu", preload_module_classes=["LlamaDecoderLayer"])
    with (
        loadstone.patch("peft"),
        pytest.raises(loadstone.PlanError, match="preload_module_classes"),
    ):
        model.add_adapter(lora())


def test_a_peft_model_over_a_disk_is_refused_by_name(llama, tmp_path, monkeypatch):
    base, adapter, _, tuned = llama
    monkeypatch.chdir(tmp_path)  # peft writes to the model's path, made relative
    with loadstone.patch("transformers", "peft"):
        model = offloaded(base, tmp_path)
        with pytest.raises(loadstone.PlanError, match="load_adapter"):
            PeftModel.from_pretrained(model, adapter)
        model = offloaded(base, tmp_path)
        model.load_adapter(adapter)  # as the message advises
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, tuned)


def test_a_model_on_meta_by_its_makers_wish_is_left_alone(llama):
    with loadstone.patch("peft"), torch.device("meta"):
        model = get_peft_model(LlamaForCausalLM(LlamaConfig.from_pretrained(llama[0])), lora())
    assert all(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def test_an_adapter_of_a_diffusers_model(tmp_path):
    model = unet(8).eval()
    model.save_pretrained(tmp_path / "base")
    inputs = torch.randn(1, 4, 8, 8), torch.tensor(3), torch.randn(1, 4, 8)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    model.save_lora_adapter(tmp_path / "lora")
    expected = model(*inputs).sample
    places = {name: "cpu" for name, _ in model.named_children()} | {"mid_block": "disk"}
    other = loadstone.diffusers.from_pretrained(
        diffusers.UNet2DConditionModel,
        tmp_path / "base",
        device_map=places,
        offload_folder=str(tmp_path / "offload"),
    )
    with loadstone.patch("diffusers"):
        other.load_lora_adapter(
            tmp_path / "lora", prefix=None, weight_name="pytorch_lora_weights.safetensors"
        )
    adapters = [parameter for name, parameter in other.named_parameters() if "lora_" in name]
    assert adapters and not any(parameter.is_meta for parameter in adapters)
    assert any(parameter.is_meta for parameter in other.parameters())
    assert torch.equal(other(*inputs).sample, expected)


# --- Trainer -------------------------------------------------------------------------------------


def trainer_of(tmp_path: Path) -> tuple[Trainer, Path, dict[str, torch.Tensor]]:
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    saved = Qwen3MoeForCausalLM(config)
    saved.save_pretrained(tmp_path / "checkpoint")
    arguments = TrainingArguments(output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True)
    trainer = Trainer(model=Qwen3MoeForCausalLM(config), args=arguments)
    return trainer, tmp_path / "checkpoint", dict(saved.named_parameters())


@pytest.mark.parametrize("which", ["resume", "best"])
def test_trainers_checkpoints_give_all_experts(tmp_path, which):
    trainer, folder, saved = trainer_of(tmp_path)
    before = {
        name: (id(parameter), parameter.data_ptr())
        for name, parameter in trainer.model.named_parameters()
    }
    with loadstone.patch("transformers"):
        if which == "resume":
            trainer._load_from_checkpoint(str(folder))
        else:
            trainer.state.best_model_checkpoint = str(folder)
            trainer._load_best_model()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, saved[name]), name
        # The parameter stays the same object, because an optimizer may refer to it.
        assert (id(parameter), parameter.data_ptr()) == before[name]
        assert parameter.requires_grad


def test_a_lost_expert_in_trainers_checkpoint_is_an_error(tmp_path):
    from safetensors.torch import load_file, save_file

    trainer, folder, _ = trainer_of(tmp_path)
    state = load_file(folder / "model.safetensors")
    del state["model.layers.0.mlp.experts.2.up_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with loadstone.patch("transformers"), pytest.raises(loadstone.PlanError, match="expert 2"):
        trainer._load_from_checkpoint(str(folder))


def test_trainer_may_be_imported_after_patching():
    code = """
import sys, loadstone
patching = loadstone.patch("transformers").start()
assert "transformers.trainer" not in sys.modules
from transformers import Trainer
plain = vars(Trainer)["_load_from_checkpoint"]
loadstone.transformers.patches().refresh()
assert vars(Trainer)["_load_from_checkpoint"] is not plain
patching.stop()
assert vars(Trainer)["_load_from_checkpoint"] is plain
"""
    subprocess.run([sys.executable, "-c", code], check=True)
