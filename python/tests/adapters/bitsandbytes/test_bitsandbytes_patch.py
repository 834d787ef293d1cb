"""Tests loadstone.patch("bitsandbytes"), and library models with quantized weights."""

from __future__ import annotations

import threading

import accelerate
import accelerate.hooks
import bitsandbytes as bnb
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from bitsandbytes_models import FOUR_BIT, KINDS, copied, inputs, net, on_meta, same_bytes
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
)

import loadstone
import loadstone.bitsandbytes as ours
from loadstone._adapters.bitsandbytes import modules

kinds = pytest.mark.parametrize("kind", KINDS)

CONFIGS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4+double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
LLAMA = LlamaConfig(
    vocab_size=96,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
TOKENS = torch.tensor([[5, 9, 3, 7]])


def standing():
    """Return the current value of each attribute that the patch replaces."""
    return [vars(hook.owner).get(hook.name) for hook in ours.patches()]


@pytest.fixture
def untouched():
    before = standing()
    yield
    assert all(now is was for now, was in zip(standing(), before, strict=True))


def test_the_very_objects_are_put_back(untouched):
    before = standing()
    assert len(before) > 20 and None in before  # None marks an inherited attribute
    with loadstone.patch("bitsandbytes", "accelerate"):
        assert not any(now is was for now, was in zip(standing(), before, strict=True))
    healing = loadstone.patch("bitsandbytes").start()
    assert bnb.nn.Params4bit.to is not before[0]
    healing.stop()
    assert bnb.nn.Params4bit.to is before[0]
    with pytest.raises(ValueError), loadstone.patch("bitsandbytes"):
        raise ValueError


def test_what_nobody_touches_inside_is_not_healed(untouched):
    model, other = net("nf4"), net("nf4")
    with loadstone.patch("bitsandbytes"):
        model.body[0].weight.to("meta")
        model.body[2](inputs())
    assert type(model.body[0].weight) is not bnb.nn.Params4bit
    assert modules.is_self_contained(model.body[2])
    assert not any(modules.is_self_contained(layer) for layer in other.quantized())
    assert type(other.body[0].weight) is bnb.nn.Params4bit


def test_another_thread_gets_the_librarys_own(untouched):
    model, done = net("nf4"), []

    def run():
        model.body[0].weight.to("meta")
        done.append(model.body[0].weight.quant_state.absmax.is_meta)

    with loadstone.patch("bitsandbytes", "accelerate"):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert done == [True] and type(model.body[0].weight) is bnb.nn.Params4bit


def test_started_for_the_process_it_acts_in_every_thread(untouched):
    model = net("nf4")
    healing = loadstone.patch("bitsandbytes").start()
    try:
        thread = threading.Thread(target=lambda: model.body[0].weight.to("meta"))
        thread.start()
        thread.join()
    finally:
        healing.stop()
    assert not on_meta(model)


def test_plain_modules_are_none_of_its_business(untouched):
    with loadstone.patch("bitsandbytes", "accelerate"):
        model = accelerate.cpu_offload(torch.nn.Linear(3, 2), execution_device="cpu")
    assert type(model._hf_hook.hooks[-1].weights_map) is accelerate.utils.PrefixedDataset
    assert model(torch.ones(1, 3)).shape == (1, 2)


@kinds
def test_accelerates_own_function_sets_a_whole_weight(kind, untouched):
    """Some scripts call this function themselves, one tensor at a time."""
    model, stored = net(kind), copied(net(kind).state_dict())
    with loadstone.patch("bitsandbytes", "accelerate"):
        for place in ("meta", "cpu"):
            for layer in model.quantized():
                value = None if place == "meta" else net(kind).body[0].weight
                if layer is model.body[2] and value is not None:
                    value = net(kind).body[2].weight
                accelerate.utils.set_module_tensor_to_device(layer, "weight", place, value=value)
        assert same_bytes(copied(model.state_dict()), stored)
        assert torch.equal(model(inputs()), net(kind)(inputs()))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LLAMA).to(torch.bfloat16).save_pretrained(folder)
    return folder


def llama(folder, kind):
    config = BitsAndBytesConfig(**CONFIGS[kind])
    options = {"quantization_config": config, "device_map": {"": "cpu"}, "dtype": torch.bfloat16}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@kinds
@pytest.mark.parametrize("way", ["cpu", "disk", "both"])
def test_a_model_of_transformers_is_offloaded_whole(kind, way, checkpoint, tmp_path, untouched):
    expected = llama(checkpoint, kind)(TOKENS).logits
    model = ours.heal(llama(checkpoint, kind))
    if way == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    elif way == "disk":
        accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    else:
        places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
        places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
        model = accelerate.dispatch_model(model, places, offload_dir=tmp_path)
    assert on_meta(model)
    for _ in range(3):
        assert torch.equal(model(TOKENS).logits, expected)
    remove_hook_from_submodules(model)
    assert not on_meta(model)
    assert torch.equal(model(TOKENS).logits, expected)


@kinds
def test_an_offloaded_model_is_saved_as_the_one_in_memory(kind, checkpoint, tmp_path, untouched):
    llama(checkpoint, kind).save_pretrained(tmp_path / "expected")
    model = ours.heal(llama(checkpoint, kind))
    expected = model(TOKENS).logits
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    model = accelerate.dispatch_model(model, places, offload_dir=tmp_path / "offload")
    model.save_pretrained(tmp_path / "saved")
    found, known = (
        load_file(tmp_path / each / "model.safetensors") for each in ("saved", "expected")
    )
    assert same_bytes(dict(sorted(found.items())), dict(sorted(known.items())))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", device_map={"": "cpu"}).eval()
    assert torch.equal(ours.heal(again)(TOKENS).logits, expected)


class Mixer(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, kind: str = "nf4") -> None:
        super().__init__()
        self.inside = net(kind, seed=3)

    def forward(self, x):
        return self.inside(x)


class Two(DiffusionPipeline):
    model_cpu_offload_seq = "text_encoder->transformer"

    def __init__(self, text_encoder, transformer):
        super().__init__()
        self.register_modules(text_encoder=text_encoder, transformer=transformer)

    def __call__(self, tokens):
        states = self.text_encoder(tokens.to(self._execution_device)).last_hidden_state
        result = self.transformer(states.float()).cpu()
        self.maybe_free_model_hooks()
        return result


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=63,
    )
    CLIPTextModel(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def pipeline(folder, kind):
    config = BitsAndBytesConfig(**CONFIGS[kind])
    options = {"quantization_config": config, "device_map": {"": "cpu"}, "dtype": torch.bfloat16}
    encoder = CLIPTextModel.from_pretrained(folder, **options).eval()
    return Two(encoder, Mixer(kind).eval())


@pytest.fixture
def cpu_has_no_number(monkeypatch):
    """Replace the device ``cpu:0``, for which accelerate would create no parameters, by ``cpu``."""
    real = accelerate.cpu_offload

    def offload(model, device, **options):
        return real(model, torch.device(device.type), **options)

    monkeypatch.setattr(accelerate, "cpu_offload", offload)


def sequential(pipe):
    pipe.enable_sequential_cpu_offload(device="cpu")


def by_model(pipe):
    pipe.enable_model_cpu_offload(device="cpu")


@kinds
@pytest.mark.parametrize("offload", [sequential, by_model])
@pytest.mark.parametrize("way", ["heal", "patch"])
@torch.no_grad()
def test_a_pipeline_of_diffusers_is_offloaded_whole(
    kind, offload, way, encoder, untouched, cpu_has_no_number
):
    expected = pipeline(encoder, kind)(TOKENS)
    pipe = pipeline(encoder, kind)
    if way == "heal":
        assert ours.heal(pipe) is pipe
        offload(pipe)
    else:
        with loadstone.patch("bitsandbytes", "accelerate"):
            offload(pipe)
    if offload is sequential:
        assert on_meta(pipe.text_encoder) and on_meta(pipe.transformer)
    for _ in range(3):
        assert torch.equal(pipe(TOKENS), expected)
    pipe.remove_all_hooks()
    assert not on_meta(pipe.text_encoder) and not on_meta(pipe.transformer)
    assert torch.equal(pipe(TOKENS), expected)


@pytest.mark.parametrize("kind", FOUR_BIT)
@torch.no_grad()
def test_control_a_pipeline_alone_cannot_be_offloaded_layer_by_layer(
    kind, encoder, cpu_has_no_number
):
    pipe = pipeline(encoder, kind)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        sequential(pipe)
        pipe(TOKENS)


@pytest.mark.parametrize("kind", [each for each in CONFIGS if each != "int8"])
def test_an_adapter_is_merged_as_without_the_patch(kind, checkpoint, untouched):
    """PEFT merges into a float weight with the old attributes, which ``to`` quantizes again."""

    def merged(model):
        for layer in model.modules():
            if isinstance(layer, bnb.nn.Linear4bit):
                old = layer.weight
                plain = bnb.functional.dequantize_4bit(old.data, old.quant_state) * 1.5
                kept = old.__dict__ | {"bnb_quantized": False, "requires_grad": False}
                layer.weight = bnb.nn.Params4bit(plain, **kept).to("cpu")
        return model.eval()

    tokens = torch.arange(7)[None]
    expected = merged(llama(checkpoint, kind))(tokens).logits
    with loadstone.patch("bitsandbytes"):
        found = merged(llama(checkpoint, kind))(tokens).logits
    assert torch.equal(found, expected)
    assert not torch.equal(found, llama(checkpoint, kind)(tokens).logits)
