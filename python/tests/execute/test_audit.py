"""The audit reports each kind of defect, and nothing else."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from models import Tiny, randomise, save

import loadstone


@pytest.fixture
def loaded(tmp_path):
    save(randomise(Tiny()), tmp_path / "m.safetensors")
    with loadstone.skeleton():
        model = Tiny()
    report = loadstone.load(model, tmp_path / "m.safetensors")
    return model, report


def test_a_loaded_model_passes_with_and_without_its_report(loaded):
    model, report = loaded
    assert loadstone.audit(model, report).ok
    result = loadstone.audit(model)
    assert result.ok
    assert result.provenance.keys() == report.provenance.keys()
    result.require_real()


def test_without_a_load_nothing_is_accounted_for():
    result = loadstone.audit(Tiny())
    assert not result.ok
    assert "embed.weight" in result.unaccounted and "blocks.0.freqs[0]" in result.unaccounted
    assert "audit(model, receipt=...)" in str(result)


def test_a_deep_copy_has_the_origins_of_the_loaded_model(loaded):
    model, report = loaded
    with torch.no_grad():
        model.blocks[0].norm.bias.add_(1)
    wrapped = copy.deepcopy(copy.deepcopy(torch.nn.ModuleDict({"model": model})))
    result = loadstone.audit(wrapped["model"], report)
    assert result.ok and result.provenance.keys() == report.provenance.keys()
    assert result.changed == loadstone.audit(model).changed == ["blocks.0.norm.bias"]
    with torch.no_grad():
        wrapped["model"].blocks[1].norm.bias.add_(1)
    changed = ["blocks.0.norm.bias", "blocks.1.norm.bias"]
    assert loadstone.audit(wrapped["model"]).changed == changed


def test_a_pickle_of_a_loaded_model_needs_no_loadstone(loaded):
    model, _ = loaded
    text = pickle.dumps(model)
    assert b"loadstone." not in text
    assert not loadstone.audit(pickle.loads(text)).ok


def test_a_skeleton_is_on_meta():
    with loadstone.skeleton():
        model = Tiny()
    result = loadstone.audit(model)
    assert "blocks.1.linear.weight" in result.on_meta
    with pytest.raises(loadstone.AuditError, match=r"blocks|embed") as caught:
        result.require_real()
    assert caught.value.code == "audit.on_meta"


def replace_parameter(model):
    model.blocks[0].linear.weight = torch.nn.Parameter(torch.zeros(8, 8))
    return "blocks.0.linear.weight"


def replace_data(model):
    model.blocks[0].norm.bias.data = torch.zeros(8)
    return "blocks.0.norm.bias"


def replace_buffer(model):
    model.blocks[1].scale = torch.ones(8)
    return "blocks.1.scale"


def replace_in_list(model):
    model.blocks[1].freqs[0] = torch.ones(8)
    return "blocks.1.freqs[0]"


def replace_at_the_same_address(model):
    """Free a tensor and allocate one of the same size, which very likely gets its address."""
    del model.blocks[0].linear.bias
    gc.collect()
    model.blocks[0].linear.register_parameter("bias", torch.nn.Parameter(torch.zeros(8)))
    return "blocks.0.linear.bias"


def add_parameter(model):
    model.more = torch.nn.Parameter(torch.zeros(2))
    return "more"


def hide_in_an_object(model):
    class State:
        def __init__(self):
            self.inner = {"absmax": torch.zeros(3)}

    model.blocks[0].state = State()
    return "blocks.0.state.inner['absmax']"


def overwrite(model):
    with torch.no_grad():
        model.blocks[0].linear.weight.fill_(float("nan"))
    return "blocks.0.linear.weight"


def transpose(model):
    weight = model.blocks[0].linear.weight
    weight.data = weight.data.t()
    return "blocks.0.linear.weight"


@pytest.mark.parametrize(
    "change",
    [
        transpose,
        replace_parameter,
        replace_data,
        replace_buffer,
        replace_in_list,
        replace_at_the_same_address,
        add_parameter,
        hide_in_an_object,
        overwrite,
    ],
)
def test_what_came_after_the_load_is_changed(loaded, change):
    model, report = loaded
    assert loadstone.audit(model, report).changed == []
    name = change(model)
    result = loadstone.audit(model, report)
    assert result.changed == [name]
    assert result.ok  # a load guarantees only memory and origin, which are still correct
    since = "changed" if name in report.provenance else "added"
    assert len(repr(result)) < 200 and f", 1 {since} since the load" in repr(result)
    assert ("loaded tensors have" in repr(result)) == (since == "added")


def test_casts_and_moves_are_changes_and_a_wrapper_finds_the_load(loaded):
    model, _ = loaded
    wrapped = torch.nn.ModuleDict({"inner": model})
    assert loadstone.audit(wrapped).ok and not loadstone.audit(wrapped).changed
    model.half()
    result = loadstone.audit(wrapped)
    floating = [
        f"inner.{name}"
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if tensor.is_floating_point()
    ]
    assert result.ok and set(floating) <= set(result.changed)


def test_tensors_of_inference_mode_count_no_writes(tmp_path):
    save(randomise(Tiny()), tmp_path / "m.safetensors")
    with torch.inference_mode():
        model = Tiny()
    loadstone.load(model, tmp_path / "m.safetensors")
    result = loadstone.audit(model)
    assert result.ok and not result.changed


def test_a_model_loaded_inside_inference_mode_can_be_trained(tmp_path):
    save(randomise(Tiny()), tmp_path / "m.safetensors")
    with torch.inference_mode():
        with loadstone.skeleton():
            model = Tiny()
        loadstone.load(model, tmp_path / "m.safetensors")
    assert not any(parameter.is_inference() for parameter in model.parameters())
    sum(parameter.float().sum() for parameter in model.parameters()).backward()


def test_a_tensor_put_back_on_meta_is_found(loaded):
    model, _ = loaded
    model.blocks[0].freqs[0] = torch.empty(8, device="meta")
    assert loadstone.audit(model).on_meta == ["blocks.0.freqs[0]"]


def test_a_report_of_another_load_proves_nothing(loaded, tmp_path):
    model, _ = loaded
    with loadstone.skeleton():
        other = Tiny()
    report = loadstone.load(other, tmp_path / "m.safetensors")
    assert not loadstone.audit(model, report).ok


def test_the_report_does_not_keep_replaced_memory_alive(loaded):
    model, report = loaded
    storage = model.blocks[0].linear.weight.untyped_storage()
    weak = torch.multiprocessing.reductions.StorageWeakRef(storage)
    del storage
    assert not weak.expired()
    model.blocks[0].linear.weight = torch.nn.Parameter(torch.zeros(8, 8))
    gc.collect()
    assert weak.expired()
    assert report.provenance["blocks.0.linear.weight"].origin == "checkpoint"


def test_meta_by_name_is_an_exception(tmp_path):
    save(randomise(Tiny()), tmp_path / "m.safetensors")
    with loadstone.skeleton():
        model = Tiny()
    device_map = {"": "cpu", "blocks.1": "meta"}
    report = loadstone.load(model, tmp_path / "m.safetensors", device_map=device_map)
    result = loadstone.audit(model)
    assert result.ok
    assert "blocks.1.linear.weight" in result.not_held
    assert model.blocks[1].linear.weight.is_meta
    assert report.provenance["blocks.1.linear.weight"].origin == "excluded"


def test_the_record_of_a_load_keeps_no_other_model() -> None:
    from loadstone._execute import audit

    other, model = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for each in (other, model):
        audit._last_load[each] = audit._LoadRecord(None, {})  # type: ignore[arg-type]
    loads = audit.LoadRecords(model)
    seen = weakref.ref(other)
    del other
    gc.collect()
    assert seen() is None
    del audit._last_load[model]
    loads.restore()
    assert model in audit._last_load  # control: the record of the model itself remains
