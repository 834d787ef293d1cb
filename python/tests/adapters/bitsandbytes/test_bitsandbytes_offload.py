"""Tests accelerate's ways to place a model, on weights that bitsandbytes quantized.

Each way also runs without loadstone and must fail with the error in CELLS, so that the tests report
when the libraries fix it.
"""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch
from accelerate.hooks import attach_align_device_hook, remove_hook_from_submodules
from bitsandbytes_models import FOUR_BIT, KINDS, copied, inputs, net, on_meta, same_bytes

import loadstone
import loadstone.bitsandbytes as ours

LAST_ON_DISK = {"body.0": "cpu", "body.1": "cpu", "body.2": "disk"}


def cpu_offload(model, folder):
    return accelerate.cpu_offload(model, execution_device="cpu")


def cpu_offload_to_a_device(model, folder):
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def cpu_offload_with_a_state_dict(model, folder):
    state = copied(model.state_dict())
    return accelerate.cpu_offload(model, execution_device="cpu", state_dict=state)


def disk_offload(model, folder):
    return accelerate.disk_offload(model, folder, execution_device="cpu")


def dispatch_to_cpu_and_disk(model, folder):
    return accelerate.dispatch_model(model, dict(LAST_ON_DISK), offload_dir=folder)


def dispatch_twice(model, folder):
    dispatch_to_cpu_and_disk(model, folder / "1")
    return dispatch_to_cpu_and_disk(model, folder / "2")


def dispatch_again_with_force_hooks(model, folder):
    dispatch_to_cpu_and_disk(model, folder)
    remove_hook_from_submodules(model)
    return accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


def force_hooks(model, folder):
    return accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


def attach(model, folder):
    attach_align_device_hook(model, execution_device="cpu", offload=True)
    return model


def attach_and_remove(model, folder):
    attach(model, folder)
    remove_hook_from_submodules(model)
    return model


def attach_with_a_map_and_remove(model, folder):
    state = copied(model.state_dict())
    attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=state)
    remove_hook_from_submodules(model)
    return model


def move_to_meta_and_drop(model, folder):
    for layer in model.quantized():
        layer.weight.to("meta")
    return model


def move_a_copy_to_meta(model, folder):
    moved = copy.deepcopy(model).to("meta")
    assert len(on_meta(moved)) == len(list(moved.parameters())) + len(attributes(moved))
    return model


def move_to_meta_after_a_copy(model, folder):
    kept = copy.deepcopy(model)
    model.to("meta")
    assert on_meta(model) and not on_meta(kept)
    return kept


def attributes(model):
    names = [name for name, _ in model.named_parameters()]
    return [name for name in on_meta(model) if name not in names]


META = "Cannot copy out of meta tensor"
GPU = "Cannot access accelerator"
DETACH = "requires that detach"
FINE = ""
ANY = "."
# A function that places a model, and the errors of the libraries alone for 4 bits and for int8.
CELLS = [
    (cpu_offload, META, GPU),
    (cpu_offload_to_a_device, META, FINE),
    (cpu_offload_with_a_state_dict, META, GPU),
    (disk_offload, META, GPU),
    (dispatch_to_cpu_and_disk, META, GPU),
    (dispatch_twice, f"{META}|item.. cannot be called on meta", META),
    (dispatch_again_with_force_hooks, META, FINE),
    (force_hooks, FINE, FINE),
    (attach, META, GPU),
    (attach_and_remove, META, ANY),
    (attach_with_a_map_and_remove, META, FINE),
    (move_to_meta_and_drop, ANY, FINE),
    (move_a_copy_to_meta, DETACH, DETACH),
    (move_to_meta_after_a_copy, DETACH, DETACH),
]
cells = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell[0].__name__)
kinds = pytest.mark.parametrize("kind", KINDS)


def outputs(place, model, folder):
    """Run three forward passes of a placed model; return the model with its outputs."""
    model = place(model, folder)
    return model, [model(inputs()) for _ in range(3)]


@cells
@kinds
def test_a_healed_model_gives_the_outputs_of_the_one_that_was_never_placed(cell, kind, tmp_path):
    expected = net(kind)(inputs())
    stored = copied(net(kind).state_dict())
    model, found = outputs(cell[0], ours.heal(net(kind)), tmp_path)
    assert all(torch.equal(each, expected) for each in found)
    remove_hook_from_submodules(model)
    assert on_meta(model) == []
    assert torch.equal(model(inputs()), expected)
    assert same_bytes(stored, model.state_dict())


@pytest.mark.parametrize("place", [cpu_offload, dispatch_to_cpu_and_disk])
@pytest.mark.parametrize("kind", FOUR_BIT)
def test_outputs_are_the_same_where_the_forward_pass_decodes_the_weight(kind, place, tmp_path):
    """On a CPU without AVX512-BF16, the forward pass decodes the weight."""
    expected = net(kind, plain=True)(inputs())
    found = outputs(place, ours.heal(net(kind, plain=True)), tmp_path)[1]
    assert all(torch.equal(each, expected) for each in found)


@cells
@kinds
def test_inside_patch_nothing_has_to_be_healed(cell, kind, tmp_path):
    expected = net(kind)(inputs())
    stored = copied(net(kind).state_dict())
    model = net(kind)
    with loadstone.patch("bitsandbytes", "accelerate"):
        model, found = outputs(cell[0], model, tmp_path)
    found.append(model(inputs()))  # modules used under the patch still work
    assert all(torch.equal(each, expected) for each in found)
    remove_hook_from_submodules(model)
    assert on_meta(model) == []
    with loadstone.patch("bitsandbytes"):
        assert same_bytes(stored, model.state_dict())


@cells
@kinds
def test_control_the_libraries_alone_fail_as_they_are_known_to(cell, kind, tmp_path):
    place, four_bit, int8 = cell
    known = int8 if kind == "int8" else four_bit
    if known == GPU and torch.accelerator.is_available():
        pytest.skip("fails without an accelerator")
    expected = net(kind)(inputs())
    if known == FINE:
        assert all(torch.equal(each, expected) for each in outputs(place, net(kind), tmp_path)[1])
        return
    with pytest.raises(Exception, match=known):
        found = outputs(place, net(kind), tmp_path)[1]
        assert all(torch.equal(each, expected) for each in found), "."


@kinds
@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_three_times_attached_run_and_detached(kind, offload, tmp_path):
    model = ours.heal(net(kind))
    expected = net(kind)(inputs())
    for turn in range(3):
        offload(model, tmp_path / str(turn))
        assert {"body.0.weight", "body.2.weight"} <= set(on_meta(model))
        assert torch.equal(model(inputs()), expected)
        remove_hook_from_submodules(model)
        assert on_meta(model) == []
        assert torch.equal(model(inputs()), expected)


@kinds
def test_what_is_offloaded_holds_no_memory_in_the_model(kind, tmp_path):
    """Codes and scales leave memory, including copies that a forward pass stored elsewhere."""
    model = ours.heal(net(kind))
    disk_offload(model, tmp_path)
    assert len(on_meta(model)) == len({*on_meta(model)})
    first = on_meta(model)
    model(inputs())
    assert on_meta(model) == first
    real = [slot.name for slot in loadstone._model.walk.walk(model) if not slot.tensor.is_meta]
    assert real == []


@kinds
def test_the_folder_holds_the_quantized_bytes(kind, tmp_path):
    stored = copied(net(kind).state_dict())
    disk_offload(ours.heal(net(kind)), tmp_path)
    loader = accelerate.utils.OffloadedWeightsLoader(save_folder=tmp_path)
    assert same_bytes({name: loader[name].view(stored[name].shape) for name in stored}, stored)


@kinds
@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_the_state_dict_of_an_offloaded_model_is_that_of_the_model(kind, offload, tmp_path):
    stored = copied(net(kind).state_dict())
    model = offload(ours.heal(net(kind)), tmp_path)
    assert same_bytes(model.state_dict(), stored)
    before = on_meta(model)
    assert before and on_meta(model) == before  # state_dict left no tensor in memory
    assert torch.equal(model(inputs()), net(kind)(inputs()))


@pytest.mark.parametrize("kind", KINDS)
def test_control_the_state_dict_of_an_offloaded_model(kind):
    model = cpu_offload(net(kind), None)
    if kind == "nf4+double":
        with pytest.raises(RuntimeError, match="meta"):
            model.state_dict()
        return
    state = model.state_dict()
    empty = [name for name, tensor in state.items() if tensor.is_meta]
    assert (len(empty), len(state)) == ((6, 8) if kind == "int8" else (8, 10))


@kinds
def test_a_model_that_accelerate_offloaded_before_is_healed_where_its_map_has_all(kind, tmp_path):
    model = disk_offload(net(kind), tmp_path)
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(inputs())
    ours.heal(model)
    assert torch.equal(model(inputs()), net(kind)(inputs()))
    remove_hook_from_submodules(model)
    assert on_meta(model) == []


@pytest.mark.parametrize("kind", FOUR_BIT)
def test_scales_that_are_gone_are_refused_by_name_and_nothing_is_changed(kind):
    model = net(kind)
    model.body[2].weight.to("meta")
    with pytest.raises(loadstone.FormatError) as caught:
        ours.heal(model)
    assert caught.value.code == "q.scale_missing"
    assert caught.value.tensor == "body.2.weight"
    assert not any(hasattr(layer, "_present") for layer in model.quantized())
    model = ours.heal(net(kind))  # as the message advises
    model.body[2].weight.to("meta")
    assert torch.equal(model(inputs()), net(kind)(inputs()))


@pytest.mark.parametrize("kind", FOUR_BIT)
def test_a_map_without_the_scales_is_refused_by_name(kind):
    model = ours.heal(net(kind))
    state = copied(model.state_dict())
    for name in [name for name in state if "quant_map" in name]:
        del state[name]
    accelerate.cpu_offload(model, execution_device="cpu", state_dict=state)
    with pytest.raises(loadstone.FormatError) as caught:
        model(inputs())
    assert caught.value.code == "q.scale_missing"


@kinds
def test_preloaded_blocks_work_inside_patch(kind, tmp_path):
    """accelerate's hook on a block also loads and offloads the quantized modules in it."""
    expected = net(kind)(inputs())
    for offload in ("cpu", "disk"):
        model = net(kind)
        with loadstone.patch("bitsandbytes", "accelerate"):
            options = {"execution_device": "cpu", "preload_module_classes": ["Sequential"]}
            if offload == "cpu":
                accelerate.cpu_offload(model, **options)
            else:
                accelerate.disk_offload(model, tmp_path, **options)
        assert on_meta(model)
        assert torch.equal(model(inputs()), expected)
        assert torch.equal(model(inputs()), expected)


@kinds
def test_hooks_in_a_row_and_hooks_removed_keep_the_healed_forward(kind):
    model = ours.heal(net(kind))
    expected = net(kind)(inputs())
    cpu_offload(model, None)
    cpu_offload(model, None)  # adds a second hook to each module
    assert torch.equal(model(inputs()), expected)
    remove_hook_from_submodules(model)
    assert all(not hasattr(layer, "_hf_hook") for layer in model.quantized())
    assert torch.equal(model(inputs()), expected)
