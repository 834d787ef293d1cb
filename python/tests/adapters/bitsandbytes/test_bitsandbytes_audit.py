"""Tests that the audit visits every component of a quantized weight and explains absent ones."""

from __future__ import annotations

import accelerate
import bitsandbytes as bnb
import pytest
import torch
from accelerate.hooks import attach_align_device_hook, remove_hook_from_submodules
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes_models import FOUR_BIT, KINDS, inputs, linear, net, on_meta

import loadstone
import loadstone.bitsandbytes as ours
from loadstone._execute import audit
from loadstone._execute.report import Provenance, Report
from loadstone._model.walk import walk

kinds = pytest.mark.parametrize("kind", KINDS)


def accounted(model):
    """Return the model with a fake record of a load that took all tensors from a checkpoint."""
    slots = walk(model)
    rows = {
        slot.name: Provenance(slot.name, "checkpoint", slot.kind, "memory", (), "cpu", "F32", ())
        for slot in slots
    }
    report = Report(rows, 0.0, 0, 0, 0, {})
    audit.remember(model, report, slots)
    return model


def by_torch(model):
    """Return the names of meta tensors that torch's own functions list."""
    places = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in places if tensor.is_meta]


PLACES = {
    "nf4": ["absmax", "code"],
    "fp4": ["absmax", "code"],
    "nf4+double": ["absmax", "code", "offset", "state2.absmax", "state2.code"],
}
PLANTED = [(kind, place) for kind, places in PLACES.items() for place in places]


@pytest.mark.parametrize(("kind", "place"), PLANTED)
@pytest.mark.parametrize("healed", [False, True])
def test_one_tensor_on_meta_in_a_state_is_found_alone(kind, place, healed):
    model = accounted(net(kind))
    if healed:
        ours.heal(model)
    assert loadstone.audit(model).ok
    *path, last = place.split(".")
    owner = model.body[2].weight.quant_state
    for name in path:
        owner = getattr(owner, name)
    setattr(owner, last, getattr(owner, last).to("meta"))
    found = loadstone.audit(model)
    assert found.on_meta == [f"body.2.weight.quant_state.{place}"] and not found.unaccounted
    assert by_torch(model) == []  # torch lists no component of a quantized weight
    with pytest.raises(loadstone.AuditError) as caught:
        found.require_real()
    assert caught.value.tensor == f"body.2.weight.quant_state.{place}"


@pytest.mark.parametrize("part", ["CB", "SCB"])
@pytest.mark.parametrize("where", ["weight", "state"])
def test_one_tensor_on_meta_in_an_8_bit_weight_is_found_alone(part, where):
    model = net("int8")
    if where == "state":
        model(inputs())  # bitsandbytes moves codes and scales into the module's state
    accounted(model)
    assert loadstone.audit(model).ok
    owner = getattr(model.body[0], where)
    setattr(owner, part, getattr(owner, part).to("meta"))
    assert loadstone.audit(model).on_meta == [f"body.0.{where}.{part}"]
    assert by_torch(model) == []


def test_a_state_that_only_the_module_has_is_walked():
    model = net("nf4")
    layer = model.body[0]
    layer.weight = bnb.nn.Params4bit(layer.weight.data, bnb_quantized=True)  # the state after FSDP
    layer.quant_state.code = layer.quant_state.code.to("meta")
    assert on_meta(model) == ["body.0.quant_state.code"]


@kinds
@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_what_is_offloaded_is_an_exception(kind, offload, tmp_path):
    model = accounted(ours.heal(net(kind)))
    if offload == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    for _ in range(2):
        found = loadstone.audit(model)
        assert found.ok and found.not_held.keys() == set(on_meta(model))
        assert set(found.not_held.values()) == {"offloaded"}
        model(inputs())
    remove_hook_from_submodules(model)
    found = loadstone.audit(model)
    assert not found.on_meta and not found.not_held
    if offload == "cpu":  # only these components are new tensors
        made_anew = (".offset", ".state2.code")
        assert all(name.endswith(made_anew) for name in found.changed)
    else:
        assert "body.0.weight" in found.changed


@pytest.mark.parametrize("kind", FOUR_BIT)
@pytest.mark.parametrize("gone", ["weight", "weight.absmax"])
def test_what_no_map_holds_is_no_exception(kind, gone):
    model = accounted(ours.heal(net(kind)))
    state = model.state_dict()
    accelerate.cpu_offload(model, execution_device="cpu", state_dict=state)
    del state[f"body.2.{gone}"]
    found = loadstone.audit(model)
    assert "body.2.weight" in found.on_meta and "body.2.weight.quant_state.code" in found.on_meta
    assert "body.0.weight" in found.not_held


@kinds
def test_what_a_hook_keeps_itself_is_accounted_for(kind):
    model = accounted(ours.heal(net(kind)))
    attach_align_device_hook(model, execution_device="cpu", offload=True)
    assert on_meta(model) and loadstone.audit(model).ok


@pytest.mark.parametrize("kind", FOUR_BIT)
def test_no_weight_is_named_in_a_model_that_is_not_healed(kind):
    model = accounted(net(kind))
    accelerate.cpu_offload(model, execution_device="cpu")
    found = loadstone.audit(model)
    assert found.not_held == {"body.0.bias": "offloaded", "body.2.bias": "offloaded"}
    assert "body.0.weight.quant_state.absmax" in found.on_meta


@kinds
def test_a_forward_pass_leaves_the_account_in_order(kind):
    model = accounted(ours.heal(net(kind)))
    model(inputs())
    found = loadstone.audit(model)
    assert found.ok
    rearranges = kind != "int8" and has_avx512bf16()
    assert set(found.not_held.values()) == ({"rearranged for this CPU"} if rearranges else set())


def test_plain_modules_of_a_healed_model_are_offloaded_too(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 128), linear("nf4", 128, 64).to("cpu"))
    model = accounted(ours.heal(model.eval()))
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    assert loadstone.audit(model).not_held["0.weight"] == "offloaded"
    assert loadstone.audit(model).ok
