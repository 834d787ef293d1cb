"""Models of other libraries, and models with tensors that are derived from others."""

from __future__ import annotations

import accelerate
import diffusers
import pytest
import torch
import transformers
from models import Tiny, assert_same, randomise, save
from safetensors.torch import save_file

import loadstone


def bert_config():
    return transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=100,
        max_position_embeddings=24,
    )


def test_a_transformers_model_wholly_on_meta_gets_its_buffers_from_a_second_skeleton(tmp_path):
    reference = randomise(transformers.BertModel(bert_config()))
    save(reference, tmp_path / "m.safetensors")
    with torch.device("meta"):
        model = transformers.BertModel(bert_config())
    assert model.embeddings.position_ids.is_meta
    report = loadstone.load(model, tmp_path / "m.safetensors")
    assert_same(model, reference)
    assert report.provenance["embeddings.position_ids"].origin == "constructor"


def test_a_diffusers_model_wholly_on_meta(tmp_path):
    def build():
        return diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
            text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2,
        )  # fmt: skip

    reference = randomise(build())
    save(reference, tmp_path / "m.safetensors")
    with torch.device("meta"):
        model = build()
    assert model.rope.freqs_cos.is_meta
    loadstone.load(model, tmp_path / "m.safetensors")
    assert_same(model, reference)


def test_a_model_of_unknown_make_on_meta_is_refused_by_name(tmp_path):
    save(randomise(Tiny()), tmp_path / "m.safetensors")
    with torch.device("meta"):
        model = Tiny()
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.load(model, tmp_path / "m.safetensors")
    named = {f.target for f in caught.value.findings if f.code == "plan.no_value"}
    assert {"blocks.0.angles", "blocks.1.freqs[0]"} <= named


def test_a_model_of_accelerate_has_its_buffers_already(tmp_path):
    reference = randomise(Tiny())
    save(reference, tmp_path / "m.safetensors")
    with accelerate.init_empty_weights():
        model = Tiny()
    model.head.weight = model.embed.weight  # tie again, because accelerate's context unties
    loadstone.load(model, tmp_path / "m.safetensors")
    assert_same(model, reference)


def test_what_follows_from_parameters_is_recomputed_from_the_loaded_ones(tmp_path):
    """torch's older weight norm keeps a plain tensor that it derives from two parameters."""

    def build():
        return torch.nn.Sequential(torch.nn.utils.weight_norm(torch.nn.Linear(4, 3)))

    torch.manual_seed(3)
    reference = build()
    save_file(dict(reference.state_dict()), tmp_path / "m.safetensors")
    reference(torch.zeros(1, 4))  # a hook of the model computes the weight
    with loadstone.skeleton():
        model = build()
    report = loadstone.load(model, tmp_path / "m.safetensors")
    assert torch.equal(model[0].weight, reference[0].weight)
    item = report.provenance["0.weight"]
    assert (item.origin, item.reason) == ("constructor", "recomputed from the model's parameters")
    assert loadstone.audit(model).ok


class Bfloat16Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(3.1).sqrt().to(torch.get_default_dtype()))
        self.register_buffer("table", torch.linspace(0, 1, 5, dtype=None), persistent=False)
        self.weight = torch.nn.Parameter(torch.empty(2, 2))


def test_buffers_are_those_of_the_default_dtype_at_construction(tmp_path):
    torch.set_default_dtype(torch.bfloat16)
    try:
        reference = randomise(Bfloat16Scale())
        with loadstone.skeleton():
            model = Bfloat16Scale()
    finally:
        torch.set_default_dtype(torch.float32)
    save(reference, tmp_path / "m.safetensors")
    loadstone.load(model, tmp_path / "m.safetensors")
    assert model.table.dtype == torch.bfloat16
    assert_same(model, reference)
