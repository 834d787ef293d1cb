"""Tests hooks and overrides of ``load_state_dict``: a load has the same effect, bit for bit, or
rejects the model."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hooked_models import (
    MOVES,
    PLACES,
    Nested,
    Two,
    W,
    cast,
    overwrite,
    own,
    own_first,
    rename,
    state_for,
    swap,
    transpose,
    versions,
)
from state_dicts import assert_same, codes, reference, save
from torch import nn
from torch.nn.utils import parametrizations

import loadstone

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


# --- hooks that move elements --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("hook", MOVES, ids=lambda hook: hook.__name__)
@pytest.mark.parametrize("place", PLACES)
def test_a_load_does_what_load_state_dict_does(hook, kind, place, tmp_path):
    path, state = save(state_for(hook), tmp_path, kind)
    expected, found = reference(lambda: Nested(hook), state)
    assert not found.missing_keys and not found.unexpected_keys
    with PLACES[place]():
        model = Nested(hook)
    if hook in (own, own_first) and place == "meta":
        assert codes(model, path) == {"plan.missing"}  # the hook keeps a value, which meta lacks
        return
    report = loadstone.load(model, path, strict=True)
    assert_same(model, expected)
    assert loadstone.audit(model).ok
    made = "constant" if hook is overwrite else "checkpoint"
    assert report.provenance["blocks.1.weight"].origin == made


def test_a_cast_has_one_rounding_or_is_refused(tmp_path):
    state = {"weight": torch.randn(W, dtype=torch.bfloat16), "extra": torch.randn(W)}
    path, state = save(state, tmp_path, "safetensors")
    expected, _ = reference(lambda: Two(cast), state)
    model = Two(cast)
    loadstone.load(model, path)
    assert_same(model, expected)

    def narrow(module, state, prefix, *_):
        state[prefix + "extra"] = state[prefix + "extra"].bfloat16()

    expected, _ = reference(lambda: Two(narrow).bfloat16(), state)
    model = Two(narrow).bfloat16()
    loadstone.load(model, path)
    assert_same(model, expected)
    assert codes(Two(narrow), path) == {"plan.recipe"}  # the hook rounds before a cast to F32


@pytest.mark.parametrize("strict", [True, False])
def test_a_dropped_tensor_of_the_model_is_missing(strict, tmp_path):
    def hook(module, state, prefix, *_):
        del state[prefix + "extra"]

    path, _ = save({"weight": torch.randn(W), "extra": torch.randn(W)}, tmp_path, "safetensors")
    model = Two(hook)
    if strict:
        assert codes(model, path, strict=True) == {"plan.missing"}
        return
    report = loadstone.load(model, path, strict=False)
    assert report.provenance["extra"].origin == "kept"
    assert torch.equal(model.extra, torch.full(W, 2.0))


def test_what_a_hook_leaves_over_is_unexpected(tmp_path):
    def hook(module, state, prefix, *_):
        state[prefix + "odd"] = state.pop(prefix + "junk")

    tensors = {
        "weight": torch.randn(W),
        "extra": torch.randn(W),
        "junk": torch.randn(2),
        "other": torch.randn(2),
    }
    path, state = save(tensors, tmp_path, "safetensors")
    _, found = reference(lambda: Two(hook), state)
    assert set(found.unexpected_keys) == {"odd", "other"}
    assert codes(Two(hook), path, strict=True) == {"plan.unexpected"}
    plan = loadstone.plan(Two(hook), path)
    told = {each.target for each in plan.findings if each.code == "plan.unexpected"}
    assert told == {"odd", "other"} and plan.ok
    loadstone.load(Two(hook), path, strict=False)


def forgiving(module, keys):
    keys.missing_keys.remove("extra")
    keys.unexpected_keys.clear()


def test_a_post_hook_may_edit_what_is_missing_and_unexpected(tmp_path):
    def make():
        model = Two()
        model.register_load_state_dict_post_hook(forgiving)
        return model

    path, state = save({"weight": torch.randn(W), "junk": torch.randn(2)}, tmp_path, "safetensors")
    expected = make()
    expected.load_state_dict(state, strict=True)
    model = make()
    loadstone.load(model, path, strict=True)
    assert_same(model, expected)
    with torch.device("meta"):
        empty = make()
    assert codes(empty, path, strict=True) == {"plan.missing"}


# --- names: prefixes, rules, versions ------------------------------------------------------------


def test_hooks_see_names_without_a_prefix_and_after_rules(tmp_path):
    state = {f"module.{name}": tensor for name, tensor in state_for(rename).items()}
    path, _ = save(state, tmp_path, "safetensors")
    stripped = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    expected, _ = reference(lambda: Nested(rename), stripped)
    rule = {"op": "rename", "sources": [r"module\.(.*)"], "targets": ["$1"]}
    for options in ({}, {"rules": [rule], "strip_prefix": ()}):
        model = Nested(rename)
        loadstone.load(model, path, strict=True, **options)
        assert_same(model, expected)


def test_what_rules_join_can_be_handed_on_and_not_cut(tmp_path):
    rows = {f"row{index}": torch.randn(4) for index in range(4)}
    path, _ = save(rows | {"old_extra": torch.randn(W)}, tmp_path, "safetensors")
    rules = [{"op": "stack", "sources": [r"row(\d)"], "targets": ["weight"], "dim": 0}]
    model = Two(rename)
    loadstone.load(model, path, rules=rules, strict=True)
    assert torch.equal(model.weight, torch.stack(list(rows.values())))
    for hook in (transpose, swap):
        assert "plan.load_hook" in codes(Two(hook), path, rules=rules)
    square = [{"op": "transpose", "sources": ["old_extra"], "targets": ["extra"], "dims": [0, 1]}]
    assert "plan.load_hook" in codes(Two(swap), path, rules=rules + square)


def test_pickles_keep_the_versions_of_modules(tmp_path):
    state = state_for(versions)
    for version, prefix in ((1, ""), (2, ""), (2, "module.")):
        named = OrderedDict((prefix + name, tensor) for name, tensor in state.items())
        path = f"{prefix}blocks.1"
        named._metadata = OrderedDict({path: {"version": version}})
        file, _ = save(named, tmp_path, "pt")
        model = Nested(versions)
        loadstone.load(model, file)
        stored = state["blocks.1.weight"]
        assert torch.equal(model.blocks[1].weight, stored.flip(0) if version == 1 else stored)
    torch.save({"epoch": 3, "state_dict": named}, file, _use_new_zipfile_serialization=False)
    model = Nested(versions)
    loadstone.load(model, file)
    assert torch.equal(model.blocks[1].weight, stored)


# --- hooks of torch ------------------------------------------------------------------------------


def batch_norm():
    return nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True))


TORCHS = [
    lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
    lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
    lambda: parametrizations.spectral_norm(nn.Linear(2, 2)),
    lambda: parametrizations.orthogonal(nn.Linear(2, 2)),
    lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    batch_norm,
    lambda: nn.MultiheadAttention(4, 2),
    lambda: nn.TransformerEncoderLayer(4, 2, 8),
    lambda: nn.LSTM(2, 2),
]


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("make", TORCHS)
def test_modules_of_torch(make, kind, tmp_path):
    path, state = save(make().state_dict(), tmp_path, kind)
    expected, _ = reference(make, state)
    model = make()
    loadstone.load(model, path, strict=True)
    assert_same(model, expected)
    assert loadstone.audit(model).ok


def test_weight_norm_of_old_is_renamed(tmp_path):
    def make():
        return parametrizations.weight_norm(nn.Linear(2, 2))

    path, state = save(nn.utils.weight_norm(nn.Linear(2, 2)).state_dict(), tmp_path, "safetensors")
    expected, found = reference(make, state)
    assert not found.missing_keys
    model = make()
    loadstone.load(model, path, strict=True)
    assert_same(model, expected)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("place", PLACES)
def test_a_missing_counter_of_batches_is_as_torch_has_it(kind, place, tmp_path):
    """Plain state dicts have version 0, in which the counter was optional; pickles store theirs."""
    state = nn.BatchNorm1d(2).state_dict()
    del state["num_batches_tracked"]
    path, _ = save(state, tmp_path, kind)
    with PLACES[place]():
        model = nn.BatchNorm1d(2)
    if place == "real":
        model.num_batches_tracked.fill_(7)
    if kind == "pt":
        assert codes(model, path, strict=True) == {"plan.missing"}
        return
    report = loadstone.load(model, path, strict=True)
    assert int(model.num_batches_tracked) == (7 if place == "real" else 0)
    origin = report.provenance["num_batches_tracked"].origin
    assert origin == ("constant" if place == "meta" else "kept")


# --- rejected hooks ------------------------------------------------------------------------------


def scaled(module, state, prefix, *_):
    state[prefix + "weight"] = state[prefix + "weight"] * 2


def reading(module, state, prefix, *_):
    if state[prefix + "weight"].sum() > 0:
        state.clear()


def listing(module, state, prefix, *_):
    state[prefix + "weight"].tolist()


def as_numpy(module, state, prefix, *_):
    state[prefix + "weight"] = torch.from_numpy(state[prefix + "weight"].numpy())


def written(module, state, prefix, *_):
    state[prefix + "weight"].mul_(2)


def marking(module, *_):
    module.mark = 1


def resizing(module, state, prefix, *_):
    module.weight = nn.Parameter(torch.zeros(3, 3))


def reseating(module, state, prefix, *_):
    module.weight.data = state[prefix + "weight"][:2]


def of_another(module, state, prefix, *_):
    state[prefix + "weight"] = module.extra


def raising(*_):
    raise KeyError("nothing")


def after(module, _):
    with torch.no_grad():
        module.weight.mul_(2)


def after_copy(module, _):
    with torch.no_grad():
        module.table.copy_(module.weight)


REFUSED = [
    scaled, reading, listing, as_numpy, written, marking, resizing, reseating, of_another, raising,
    after, after_copy,
]  # fmt: skip


@pytest.mark.parametrize("hook", REFUSED, ids=lambda hook: hook.__name__)
def test_hooks_that_need_values_or_change_the_module_are_refused_by_name(hook, tmp_path):
    path, _ = save(
        {"0.weight": torch.ones(4, 4), "0.extra": torch.randn(W)}, tmp_path, "safetensors"
    )
    model = nn.Sequential(Two())
    model[0].register_buffer("table", torch.zeros(4, 4), persistent=False)
    if hook.__name__.startswith("after"):
        model[0].register_load_state_dict_post_hook(hook)
    else:
        model[0].register_load_state_dict_pre_hook(hook)
    before = {name: id(value) for name, value in vars(model[0]).items()}
    for missing in ("error", "zeros"):
        assert codes(model, path, missing=missing) == {"plan.load_hook"}
    with pytest.raises(loadstone.PlanError, match=hook.__name__) as caught:
        loadstone.load(model, path)
    assert caught.value.code == "plan.load_hook"
    assert torch.equal(model[0].weight, torch.ones(4, 4))
    assert before == {name: id(value) for name, value in vars(model[0]).items()}


def test_a_lazy_module_is_refused_by_name(tmp_path):
    path, _ = save({"0.weight": torch.ones(3, 2), "0.bias": torch.ones(3)}, tmp_path, "safetensors")
    plan = loadstone.plan(nn.Sequential(nn.LazyLinear(3)), path)
    found = [each for each in plan.findings if each.code == "plan.load_hook"]
    assert [each.target for each in found] == ["0"] and "_lazy_load_hook" in found[0].message


def test_observers_of_quantization_are_loaded(tmp_path):
    from torch.ao import quantization

    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(model, inplace=True)
        torch.manual_seed(0)
        model(torch.zeros(2, 4))
        return model

    trained = make()
    trained(torch.ones(2, 4))
    path, state = save(trained.state_dict(), tmp_path, "safetensors")
    expected, _ = reference(make, state)
    model = make()
    loadstone.load(model, path, strict=True)
    assert_same(model, expected)
    assert not torch.equal(
        make()[0].activation_post_process.scale, expected[0].activation_post_process.scale
    )


def test_a_hook_that_reaches_past_the_stand_in_writes_nothing(tmp_path):
    path, _ = save({"weight": torch.randn(W), "extra": torch.randn(W)}, tmp_path, "safetensors")
    model = Two()

    def hook(*_):
        with torch.no_grad():
            model.weight.zero_()

    model.register_load_state_dict_pre_hook(hook)
    assert codes(model, path) == {"plan.load_hook"}
    assert torch.equal(model.weight, torch.ones(4, 4))
