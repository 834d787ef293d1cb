"""Tests models in torch's activation checkpointing, whose wrappers are absent from state dicts."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from state_dicts import codes
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

import loadstone
from loadstone._model.walk import walk


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("table", torch.randn(4), persistent=False)
        self.held = {"mask": torch.randn(3)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


class Extra(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.state = torch.zeros(2)

    def get_extra_state(self) -> torch.Tensor:
        return self.state

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.state = state


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 8)
        self.last = Extra(8, 8)


def around_blocks(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, Block))
    return model


def around_layers(model: nn.Module) -> nn.Module:
    """Wrap linear layers, which have parameters directly."""
    apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, nn.Linear))
    return model


def around_both(model: nn.Module) -> nn.Module:
    return around_blocks(around_layers(model))


def around_all_twice(model: nn.Module) -> nn.Module:
    return checkpoint_wrapper(offload_wrapper(around_both(model)))


WRAPS = [around_blocks, around_layers, around_both, checkpoint_wrapper, around_all_twice]


@pytest.fixture
def state():
    model = Model()
    return {
        name: torch.randn_like(t) if t.is_floating_point() else t + 7
        for name, t in model.state_dict().items()
    }


@pytest.fixture
def file(tmp_path, state):
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def require_state(model, state):
    found = model.state_dict()
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__name__)
def test_names_are_those_of_the_state_dict(wrap):
    model, bare = wrap(Model()), Model()
    assert [slot.name for slot in walk(model)] == [slot.name for slot in walk(bare)]
    saved = [slot.name for slot in walk(model) if slot.kind in ("parameter", "persistent_buffer")]
    assert set(saved) == {n for n in model.state_dict() if not n.endswith("_extra_state")}
    others = dict(model.named_parameters()).keys() - dict(bare.named_parameters()).keys()
    assert others or wrap in (checkpoint_wrapper, around_all_twice)  # control: names do differ


@pytest.mark.parametrize("on_meta", [True, False])
@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__name__)
def test_a_load_is_that_of_the_bare_model(wrap, on_meta, file, state):
    with loadstone.skeleton() if on_meta else torch.device("cpu"):
        model = wrap(Model())
    report = loadstone.load(model, file, strict=True)
    require_state(model, state)
    bare = Model()
    assert list(report.provenance) == list(loadstone.load(bare, file).provenance)
    assert loadstone.audit(model).ok
    assert not list(loadstone.audit(model).not_held)


@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__name__)
def test_a_model_may_be_wrapped_once_it_is_loaded(wrap, file):
    model = Model()
    loadstone.load(model, file)
    wrapped = wrap(model)
    assert loadstone.audit(wrapped).ok and not loadstone.audit(wrapped).changed
    wrapped.blocks[1].linear.weight.data = torch.randn(8, 8)
    assert loadstone.audit(wrapped).changed == ["blocks.1.linear.weight"]


@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__name__)
def test_a_plan_of_one_is_a_plan_of_the_other(wrap, file, state, tmp_path):
    with loadstone.skeleton():
        bare, wrapped = Model(), Model()
        bare.last = wrapped.last = nn.Identity()  # a plan with extra state cannot be saved
        wrapped = wrap(wrapped)
    plan = loadstone.plan(bare, file)
    assert plan.to_json() == loadstone.plan(wrapped, file).to_json()
    plan.save(tmp_path / "plan.json")
    loadstone.Plan.load(tmp_path / "plan.json").execute(into=wrapped)
    require_state(wrapped, {n: t for n, t in state.items() if not n.startswith("last.")})


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__name__)
def test_what_is_missing_is_missing(wrap, hooked, file, state, tmp_path):
    """Because of the hook, loadstone rehearses the load on a copy of the model."""
    lacking = {n: t for n, t in state.items() if n not in ("blocks.1.linear.weight", "head.bias")}
    save_file(lacking | {"blocks.1.other": torch.zeros(1)}, tmp_path / "lacking.safetensors")
    model = Model()
    if hooked:
        model.embed.register_load_state_dict_pre_hook(lambda *_: None)
    plan = loadstone.plan(wrap(model), tmp_path / "lacking.safetensors", unexpected="error")
    found = {(each.code, each.target) for each in plan.findings if each.severity == "error"}
    assert found == {
        ("plan.missing", "blocks.1.linear.weight"),
        ("plan.missing", "head.bias"),
        ("plan.unexpected", "blocks.1.other"),
    }


@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__name__)
def test_initialisers_run_inside(wrap, file, state, tmp_path):
    del state["head.weight"], state["blocks.0.linear.weight"]
    save_file(state, tmp_path / "lacking.safetensors")
    with loadstone.skeleton():
        model = wrap(Model())
    with pytest.warns(loadstone.FilledWarning):
        loadstone.load(model, tmp_path / "lacking.safetensors", missing="initialise")
    found = model.state_dict()
    for name in ("head.weight", "blocks.0.linear.weight"):
        assert found[name].abs().max() <= 8**-0.5 and found[name].std() > 0.05
    assert loadstone.audit(model).ok


@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__name__)
def test_modules_of_a_map_are_those_of_the_bare_model(wrap, file, state, tmp_path):
    with loadstone.skeleton():
        model = wrap(Model())
    as_torch_says = [name for name, each in model.named_modules() if each is model.blocks[1]]
    for path in ("blocks.1", as_torch_says[0]):
        devices = {"": "cpu", path: "disk", "blocks.0.linear": "cpu"}
        plan = loadstone.plan(model, file, device_map=devices, offload_folder=tmp_path / "offload")
        plan.require_ok()
        on_disk = {each.name for each in plan.targets if each.device == "disk"}
        assert on_disk == {name for name in state if name.startswith("blocks.1.")}


@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__name__)
def test_layers_inside_are_quantized(wrap, file):
    bnb = pytest.importorskip("bitsandbytes")
    models = []
    for each in (wrap, lambda model: model):
        with loadstone.skeleton():
            models.append(each(Model()))
        loadstone.load(models[-1], file, quantize={"blocks.0.linear": "int8"})
        assert loadstone.audit(models[-1]).ok
    wrapped, bare = (
        [each for each in model.modules() if isinstance(each, bnb.nn.Linear8bitLt)]
        for model in models
    )
    assert len(wrapped) == len(bare) == 1
    assert torch.equal(wrapped[0].weight, bare[0].weight)


class Other(nn.Module):
    """A wrapper that torch does not define, but whose state dict has the attribute's name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self._checkpoint_wrapped_module = nn.Linear(4, 4)


def test_modules_of_other_makers_keep_their_names(tmp_path):
    state = {name: torch.randn_like(each) for name, each in Other().state_dict().items()}
    assert len(state) == 3
    save_file(state, tmp_path / "model.safetensors")
    with loadstone.skeleton():
        model = Other()
    loadstone.load(model, tmp_path / "model.safetensors", strict=True)
    require_state(model, state)


@pytest.mark.parametrize("wrap", [*WRAPS, lambda model: model])
def test_a_tensor_by_torchs_own_name_is_unexpected(wrap, file, state, tmp_path):
    """The file has the right name too. Because of a hook, loadstone rehearses the load."""
    name = "head._checkpoint_wrapped_module.weight"
    save_file(state | {name: torch.zeros(8, 8)}, tmp_path / "more.safetensors")
    model = Model()
    model.embed.register_load_state_dict_pre_hook(lambda *_: None)
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.load(wrap(model), tmp_path / "more.safetensors", strict=True)
    assert caught.value.code == "plan.unexpected" and name in str(caught.value)


@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__name__)
def test_receipts_are_found(wrap, file):
    model = Model()
    loadstone.load(model, file, receipt="xxh3-128")
    wrapped = wrap(model)
    before = loadstone.audit(wrapped, receipt=True)
    assert before.ok and "head.weight" in before.proved
    with torch.no_grad():
        model.head.weight.data.fill_(1)
    assert loadstone.audit(wrapped, receipt=True).changed == ["head.weight"]


@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__name__)
def test_accelerate_gets_maps_of_modules_inside(wrap, file, state, tmp_path):
    import loadstone.accelerate

    for device_map in (None, {"": "cpu", "blocks.0.linear": "cpu"}):
        with loadstone.skeleton():
            model = Model()
            model.last = nn.Linear(8, 8)  # without its extra state
            del model.blocks[0].held  # the device map would not place this tensor
            model = wrap(model)
        loadstone.accelerate.load_checkpoint_in_model(model, file, device_map=device_map)
        require_state(model, {n: t for n, t in state.items() if n != "last._extra_state"})
        assert loadstone.audit(model).ok
    offload = {"": "cpu", "blocks.1": "disk"}
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.accelerate.dispatch_model(model, offload, offload_dir=tmp_path)
    assert caught.value.code == "plan.device_map" and "dispatch the model" in str(caught.value)


@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__name__)
def test_a_dispatched_model_may_be_wrapped(wrap, tmp_path):
    """Wrap after the dispatch, as the error in the previous test advises."""
    import loadstone.accelerate

    model, x = nn.Sequential(Block(), nn.Linear(8, 8)).eval(), torch.randn(4, 8)
    expected = model(x)
    loadstone.accelerate.dispatch_model(model, {"0": "disk", "1": "cpu"}, offload_dir=tmp_path)
    assert model[0].linear.weight.is_meta
    model = wrap(model)
    for _ in range(2):
        assert torch.equal(model(x), expected)


def test_a_module_may_have_the_name_of_what_is_around_it(tmp_path):
    """The module's children have the same names as attributes of the surrounding wrapper."""
    inside = nn.ModuleDict(
        {"checkpoint_fn": nn.Linear(64, 64), "checkpoint_impl": nn.Linear(64, 64)}
    )
    state = {f"0.{name}": torch.randn_like(t) for name, t in inside.state_dict().items()}
    del state["0.checkpoint_impl.bias"]
    save_file(state, tmp_path / "model.safetensors")
    model = nn.Sequential(checkpoint_wrapper(inside))
    options = {"missing": "initialise", "quantize": {"0.checkpoint_fn": "int8"}}
    with pytest.warns(loadstone.FilledWarning):
        loadstone.load(model, tmp_path / "model.safetensors", **options)
    assert type(inside["checkpoint_fn"]).__name__ == "Linear8bitLt"
    assert torch.equal(inside["checkpoint_impl"].weight, state["0.checkpoint_impl.weight"])
    assert loadstone.audit(model).ok


def test_conversions_of_transformers_reach_inside(tmp_path):
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=32, num_experts=4,
        num_experts_per_tok=2, mlp_only_layers=[],
    )  # fmt: skip
    saved = AutoModelForCausalLM.from_config(config)
    saved.save_pretrained(tmp_path)
    with loadstone.skeleton():
        model = AutoModelForCausalLM.from_config(config)
    layer = type(model.model.layers[0])
    apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, layer))
    assert codes(model, tmp_path) == {"plan.missing"}  # only transformers' rules stack the experts
    loadstone.load(model, tmp_path, rules="transformers", strict=True)
    require_state(model, saved.state_dict())
    assert loadstone.audit(model).ok
    with loadstone.skeleton():
        around = checkpoint_wrapper(AutoModelForCausalLM.from_config(config))
    loadstone.load(around, tmp_path, rules="transformers", strict=True)
    require_state(around, saved.state_dict())
    tokens = torch.arange(6)[None]
    assert torch.equal(model.eval()(tokens).logits, saved.eval()(tokens).logits)
