"""Tests loadstone.patch on accelerate itself, with models whose checkpoints need conversion."""

from __future__ import annotations

import sys
import threading

import accelerate
import accelerate.big_modeling
import pytest
import torch
from accelerate import init_empty_weights
from accelerate import load_checkpoint_and_dispatch as bound_before
from accelerate_models import TOKENS, empty, saved
from models import all_tensors, assert_same, randomise
from offload_folders import written
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import loadstone
from loadstone import accelerate as ours

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
CONFIGS = [
    MixtralConfig(**SMALL, num_local_experts=4),
    Qwen3MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=16, head_dim=8),
]
FUSED = "model.layers.1.mlp.experts.down_proj"
LAST_ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


@pytest.fixture(params=CONFIGS, ids=lambda config: config.model_type)
def mixture(request, tmp_path):
    """Return a mixture of experts and its checkpoint with one key per expert."""
    config = request.param
    randomise(AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / "model")
    names = load_file(tmp_path / "model" / "model.safetensors")
    assert any(".experts.3." in name for name in names)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    return config, tmp_path / "model", reference


def on_meta(config, **options):
    with init_empty_weights(**options):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
@pytest.mark.parametrize("include_buffers", [False, True])
def test_experts_are_fused(mixture, device_map, include_buffers):
    config, folder, reference = mixture
    model = on_meta(config, include_buffers=include_buffers)
    ours.load_checkpoint_and_dispatch(model, folder, device_map=device_map)
    assert_same(model, reference)
    assert torch.equal(model(TOKENS).logits, reference(TOKENS).logits)
    assert loadstone.audit(model).ok


def test_accelerate_itself_leaves_them_on_meta(mixture):
    config, folder, _ = mixture
    model = on_meta(config)
    accelerate.load_checkpoint_in_model(model, str(folder), device_map={"": "cpu"})
    assert model.get_parameter(FUSED).is_meta
    with pytest.raises(NotImplementedError, match="meta tensor"):
        accelerate.dispatch_model(model, {"": "cpu"})


@pytest.mark.parametrize("device_map", [{"": "disk"}, LAST_ON_DISK, "auto"])
def test_fused_experts_on_disk(mixture, tmp_path, device_map):
    config, folder, reference = mixture
    model = ours.load_checkpoint_and_dispatch(
        on_meta(config),
        folder,
        device_map=device_map,
        max_memory={"cpu": reference.get_memory_footprint() // 2},
        no_split_module_classes=reference._no_split_modules,
        offload_folder=tmp_path / "offload",
    )
    assert "disk" in model.hf_device_map.values()
    assert torch.equal(model(TOKENS).logits, reference(TOKENS).logits)
    names = written(tmp_path / "offload")
    assert FUSED in names
    assert not any("norm" in name or "self_attn" in name for name in names)


def test_a_map_that_no_hook_can_serve_is_refused(mixture, tmp_path):
    """accelerate's device map can place a single parameter, but its hooks serve modules only."""
    config, folder, reference = mixture
    arguments = {"max_memory": {"cpu": reference.get_memory_footprint() // 2}}
    with pytest.raises(loadstone.PlanError) as caught:
        ours.load_checkpoint_and_dispatch(
            on_meta(config), folder, "auto", offload_folder=tmp_path / "offload", **arguments
        )
    assert caught.value.code == "plan.device_map"
    assert "mlp.experts" in str(caught.value) and "no_split_module_classes" in str(caught.value)
    assert not (tmp_path / "offload").exists()
    model = ours.load_checkpoint_and_dispatch(  # as the message advises
        on_meta(config),
        folder,
        "auto",
        offload_folder=tmp_path / "offload",
        no_split_module_classes=[type(reference.model.layers[0]).__name__],
        **arguments,
    )
    assert torch.equal(model(TOKENS).logits, reference(TOKENS).logits)


@pytest.mark.parametrize("places", [("disk", "cpu"), ("cpu", "disk"), ("disk", "disk")])
def test_ties_that_are_not_made_yet(tmp_path, places):
    config = MixtralConfig(**SMALL, num_local_experts=4, tie_word_embeddings=True)
    randomise(AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config).eval()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach())
    device_map = LAST_ON_DISK | dict(zip(("model.embed_tokens", "lm_head"), places, strict=True))
    ours.load_checkpoint_and_dispatch(
        model, tmp_path / "model", device_map, offload_folder=tmp_path / "offload"
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model(TOKENS).logits, reference(TOKENS).logits)
    assert loadstone.audit(model).ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16"])
def test_experts_are_cast(mixture, dtype):
    config, folder, _ = mixture
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = on_meta(config)
    ours.load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"}, dtype=dtype)
    mine, theirs = all_tensors(model), all_tensors(reference)
    for name in mine:
        assert mine[name].dtype == theirs[name].dtype, name
        assert torch.equal(mine[name], theirs[name]), name


def test_an_expert_that_is_missing_is_named(mixture):
    config, folder, _ = mixture
    state = load_file(folder / "model.safetensors")
    gone = next(name for name in state if "layers.1" in name and ".experts.2." in name)
    del state[gone]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    for model in (on_meta(config), AutoModelForCausalLM.from_config(config)):
        with pytest.raises(loadstone.PlanError) as caught:
            ours.load_checkpoint_in_model(model, folder)
        assert caught.value.code == "plan.missing"
        assert gone in str(caught.value)


def objects():
    """Yield every attribute of every loaded module of accelerate."""
    return {
        (name, attribute): value
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "accelerate"
        for attribute, value in vars(module).items()
    }


def test_accelerate_is_untouched_afterwards(tmp_path):
    _, path = saved(tmp_path)
    before = objects()
    with loadstone.patch("accelerate", "transformers"):
        inside = objects()
        changed = {key for key, value in inside.items() if before.get(key) is not value}
        assert {name for _, name in changed} == {
            "load_checkpoint_in_model",
            "load_checkpoint_and_dispatch",
        }
        bound = {key for key, value in before.items() if key[1] in {name for _, name in changed}}
        assert bound == changed  # the patch replaces the function in every module that imports it
        with pytest.raises(loadstone.PlanError):
            accelerate.load_checkpoint_in_model(torch.nn.Linear(2, 2), str(path), strict=True)
    after = objects()
    assert after.keys() == before.keys()
    assert all(after[key] is before[key] for key in before)


def test_accelerates_own_names_run_on_loadstone(mixture):
    config, folder, reference = mixture
    with loadstone.patch("accelerate"):
        for load in (
            accelerate.load_checkpoint_and_dispatch,
            accelerate.big_modeling.load_checkpoint_and_dispatch,
            bound_before,  # accelerate's unpatched function, which calls a patched one
        ):
            model = load(on_meta(config), str(folder), device_map={"": "cpu"})
            assert_same(model, reference)
            assert loadstone.audit(model).ok
        for load in (
            accelerate.load_checkpoint_in_model,
            accelerate.utils.load_checkpoint_in_model,
            accelerate.utils.modeling.load_checkpoint_in_model,
        ):
            model = on_meta(config)
            assert load(model, str(folder)) is None
            assert_same(model, reference)
    with pytest.raises(NotImplementedError, match="meta tensor"):
        accelerate.load_checkpoint_and_dispatch(
            on_meta(config), str(folder), device_map={"": "cpu"}
        )


def test_what_accelerate_leaves_in_silence_raises_inside(tmp_path):
    _, path = saved(tmp_path)
    state = load_file(path)
    del state["head.weight"]
    torch.save(state, tmp_path / "weights.bin")
    save_file(state, path)
    for where in (path, tmp_path / "weights.bin"):
        model = empty()
        accelerate.load_checkpoint_in_model(model, str(where))
        assert model.head.weight.is_meta
        with loadstone.patch("accelerate"), pytest.raises(loadstone.PlanError) as caught:
            accelerate.load_checkpoint_in_model(empty(), str(where))
        assert caught.value.code == "plan.missing"


def test_an_argument_of_another_version_is_refused_by_name(tmp_path):
    with loadstone.patch("accelerate"), pytest.raises(loadstone.Error) as caught:
        accelerate.load_checkpoint_in_model(empty(), str(tmp_path), one_of_next_year=True)
    assert caught.value.code == "plan.options" and "one_of_next_year" in str(caught.value)


def test_threads_beside_a_patched_one_get_accelerates_own(mixture):
    config, folder, reference = mixture
    inside, outside = on_meta(config), on_meta(config)
    entered, done = threading.Event(), threading.Event()

    def unpatched():
        entered.wait()
        try:
            accelerate.load_checkpoint_in_model(outside, str(folder), {"": "cpu"})
        finally:
            done.set()

    thread = threading.Thread(target=unpatched)
    thread.start()
    with loadstone.patch("accelerate"):
        entered.set()
        accelerate.load_checkpoint_in_model(inside, str(folder), {"": "cpu"})
        done.wait()
    thread.join()
    assert outside.get_parameter(FUSED).is_meta
    assert not outside.get_parameter("lm_head.weight").is_meta
    assert_same(inside, reference)


def test_a_reset_state_has_accelerates_own_error():
    """The patch must not hide accelerate's own error, which suggests the fix."""
    accelerator = accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state()
    with loadstone.patch("accelerate"), pytest.raises(AttributeError, match="reinitialized"):
        accelerator.prepare(torch.nn.Linear(1, 1))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_model_keeps_the_modules_that_it_wants_in_float32(tmp_path):
    """The patched load keeps them in float32, as ``from_pretrained`` does; accelerate does not."""
    small = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=32, **small)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    dtypes = {}
    for name, load in {"theirs": bound_before, "ours": ours.load_checkpoint_and_dispatch}.items():
        with init_empty_weights():
            model = T5ForConditionalGeneration(config)
        model.tie_weights()
        load(model, tmp_path, device_map={"": "cpu"}, dtype=torch.float16)
        dtypes[name] = {key: tensor.dtype for key, tensor in model.named_parameters()}
    kept = {key for key, dtype in dtypes["ours"].items() if dtype == torch.float32}
    assert kept and all(".wo." in key for key in kept)
    assert set(dtypes["theirs"].values()) == {torch.float16}
    library = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    assert dtypes["ours"] == {key: tensor.dtype for key, tensor in library.named_parameters()}
