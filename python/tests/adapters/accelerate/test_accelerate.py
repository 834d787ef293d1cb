"""Compares loadstone.accelerate with accelerate itself, on plain models."""

from __future__ import annotations

import inspect
import json
import logging

import accelerate
import accelerate.utils.modeling
import pytest
import safetensors
import safetensors.torch
import torch
from accelerate_models import (
    TOKENS,
    Net,
    TiedNet,
    assert_alike,
    empty,
    facts,
    saved,
    tensors,
)
from models import assert_same, randomise, save_sharded
from pairs import pairs
from safetensors.torch import load_file, save_file

import loadstone
from loadstone import accelerate as ours

MIXED = {"embed": "cpu", "layers.0": "disk", "layers.1": "cpu", "layers.2": "disk", "head": "cpu"}
DISK = {"": "disk"}


@pytest.mark.parametrize(
    "name", ["load_checkpoint_in_model", "load_checkpoint_and_dispatch", "dispatch_model"]
)
def test_the_arguments_are_accelerates(name):
    theirs = inspect.signature(getattr(accelerate, name)).parameters
    mine = inspect.signature(getattr(ours, name)).parameters
    assert list(mine)[: len(theirs)] == list(theirs)
    for key, parameter in theirs.items():
        assert (mine[key].kind, mine[key].default) == (parameter.kind, parameter.default), key
    extra = list(mine.values())[len(theirs) :]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in extra)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, "float16", "torch.float64"])
@pytest.mark.parametrize(
    "device_map",
    [
        {"": "cpu"},
        MIXED,
        {**MIXED, "embed": "disk"},
        {"embed": "cpu", "layers": "cpu", "head": "cpu"},
    ],
)
def test_alike(tmp_path, device_map, dtype):
    _, path = saved(tmp_path)
    arguments = {"device_map": device_map, "dtype": dtype, "offload_buffers": True}
    models = [
        module.load_checkpoint_and_dispatch(
            empty(), path, offload_folder=tmp_path / module.__name__, **arguments
        )
        if module is ours
        else module.load_checkpoint_and_dispatch(
            empty(), str(path), offload_folder=str(tmp_path / "theirs"), **arguments
        )
        for module in (ours, accelerate)
    ]
    before = tensors(models[0])
    assert all(name in before for name in load_file(path))
    assert_alike(*models)


def test_the_comparison_sees_a_value_a_hook_and_a_dtype(tmp_path):
    _, path = saved(tmp_path)

    def model(**arguments):
        arguments = {"device_map": {"": "cpu"}} | arguments
        return ours.load_checkpoint_and_dispatch(empty(), path, **arguments)

    for other in (model(force_hooks=True), model(dtype=torch.float64), model()):
        if facts(other) == facts(model()):
            other.embed.weight.data[0, 0] += 1
        with pytest.raises(AssertionError):
            assert_alike(other, model())


@pytest.mark.parametrize("built", ["meta", "real"])
@pytest.mark.parametrize("file_dtype", [torch.float32, torch.bfloat16])
def test_alike_without_a_map(tmp_path, built, file_dtype):
    _, path = saved(tmp_path, dtype=file_dtype)
    mine, theirs = ((empty() if built == "meta" else randomise(Net(), 1)) for _ in range(2))
    parameters = dict(mine.named_parameters())
    assert ours.load_checkpoint_and_dispatch(mine, path) is mine
    accelerate.load_checkpoint_and_dispatch(theirs, str(path))
    assert mine.embed.weight.dtype == (file_dtype if built == "meta" else torch.float32)
    assert_alike(mine, theirs)
    if built == "real":  # references of an optimizer stay valid
        assert all(parameter is parameters[name] for name, parameter in mine.named_parameters())


@pytest.mark.parametrize("name", ["auto", "balanced", "balanced_low_0", "sequential"])
@pytest.mark.parametrize("whole", [None, ["Layer"]])
def test_maps_are_computed_by_accelerate(tmp_path, name, whole):
    reference, path = saved(tmp_path)
    size = sum(parameter.nbytes for parameter in reference.parameters())
    arguments = {
        "device_map": name,
        "max_memory": {"cpu": size // 2},
        "no_split_module_classes": whole,
        "offload_buffers": True,
    }
    mine = ours.load_checkpoint_and_dispatch(
        empty(), path, offload_folder=tmp_path / "a", **arguments
    )
    theirs = accelerate.load_checkpoint_and_dispatch(
        empty(), str(path), offload_folder=str(tmp_path / "b"), **arguments
    )
    assert set(mine.hf_device_map.values()) == {"cpu", "disk"}
    assert_alike(mine, theirs)
    assert torch.equal(mine(TOKENS), reference(TOKENS))


def test_everything_on_disk_and_nothing_written(tmp_path):
    """accelerate itself passes "disk" to safetensors as a device, which fails."""
    reference, path = saved(tmp_path)
    with pytest.raises(Exception, match="device disk is invalid"):
        accelerate.load_checkpoint_and_dispatch(
            empty(), str(path), device_map=DISK, offload_folder=str(tmp_path / "theirs")
        )
    for number, dtype in enumerate((None, torch.bfloat16)):
        folder = tmp_path / f"offload{number}"
        model = ours.load_checkpoint_and_dispatch(
            empty(), path, device_map=DISK, offload_folder=folder, dtype=dtype
        )
        assert all(parameter.is_meta for parameter in model.parameters())
        assert [file.name for file in folder.iterdir()] == ["index.json"]
        cast = reference.to(dtype) if dtype else reference
        assert loadstone.audit(model).ok
        assert torch.equal(model(TOKENS), cast(TOKENS))
        assert loadstone.audit(model).ok


def refuse_library_readers(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a library's own reader was called")

    for owner, name in [
        (safetensors, "safe_open"),
        (safetensors.torch, "load_file"),
        (safetensors.torch, "safe_open"),
        (safetensors.torch, "load"),
        (accelerate.utils.modeling, "safe_open"),
        (accelerate.utils.modeling, "safe_load_file"),
        (accelerate.utils.modeling, "load_state_dict"),
        (torch, "load"),
    ]:
        monkeypatch.setattr(owner, name, refuse)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, MIXED, DISK, "auto"])
def test_no_library_reads(tmp_path, monkeypatch, device_map):
    reference, path = saved(tmp_path)
    with monkeypatch.context() as patched:
        refuse_library_readers(patched)
        model = ours.load_checkpoint_and_dispatch(
            empty(), path, device_map=device_map, offload_folder=tmp_path / "offload"
        )
        with pytest.raises(AssertionError, match="own reader"):
            accelerate.load_checkpoint_and_dispatch(empty(), str(path), device_map={"": "cpu"})
    assert torch.equal(model(TOKENS), reference(TOKENS))


def test_saved_buffers_of_modules_on_disk_have_the_checkpoints_values(tmp_path):
    """accelerate alone would keep the constructor's values of saved buffers."""
    reference, path = saved(tmp_path)
    mine = ours.load_checkpoint_and_dispatch(
        empty(), path, device_map=MIXED, offload_folder=tmp_path / "a"
    )
    theirs = accelerate.load_checkpoint_and_dispatch(
        empty(), str(path), device_map=MIXED, offload_folder=str(tmp_path / "b")
    )
    assert facts(mine) == facts(theirs)
    offset = "layers.0.shift.offset"
    assert torch.equal(mine.get_buffer(offset), reference.get_buffer(offset))
    assert torch.equal(theirs.get_buffer(offset), Net().get_buffer(offset))
    assert torch.equal(mine(TOKENS), reference(TOKENS))
    assert not torch.equal(theirs(TOKENS), reference(TOKENS))


TIED_MAPS = [
    None,
    {"": "cpu"},
    DISK,
    {"embed": "cpu", "layers": "disk", "head": "cpu"},
    {"embed": "disk", "layers": "cpu", "head": "disk"},
    {"embed": "disk", "layers": "cpu", "head": "cpu"},
    {"embed": "cpu", "layers": "disk", "head": "disk"},
]


@pytest.mark.parametrize(
    ("device_map", "cast", "saved_as"),
    pairs(TIED_MAPS, [None, torch.bfloat16], ["embed.weight", "head.weight"]),
)
def test_ties_wherever_their_modules_are(tmp_path, device_map, cast, saved_as):
    reference, path = saved(tmp_path, TiedNet)
    state = load_file(path)
    state[saved_as] = state.pop("embed.weight")
    save_file(state, path)
    model = ours.load_checkpoint_and_dispatch(
        empty(TiedNet), path, device_map=device_map, dtype=cast, offload_folder=tmp_path / "offload"
    )
    assert model.head.weight is model.embed.weight
    assert loadstone.audit(model).ok
    reference = reference.to(cast) if cast else reference
    for _ in range(2):
        assert torch.equal(model(TOKENS), reference(TOKENS))
        assert loadstone.audit(model).ok


def test_a_tie_on_disk_alike(tmp_path):
    _, path = saved(tmp_path, TiedNet)
    device_map = {
        "embed": "cpu",
        "layers.0": "disk",
        "layers.1": "cpu",
        "layers.2": "cpu",
        "head": "cpu",
    }
    arguments = {"device_map": device_map, "offload_buffers": True}
    mine = ours.load_checkpoint_and_dispatch(
        empty(TiedNet), path, offload_folder=tmp_path / "a", **arguments
    )
    theirs = accelerate.load_checkpoint_and_dispatch(
        empty(TiedNet), str(path), offload_folder=str(tmp_path / "b"), **arguments
    )
    assert_alike(mine, theirs)


def without(path, *names):
    state = load_file(path)
    for name in names:
        del state[name]
    save_file(state, path)


def test_missing_on_meta_is_found_before_anything_is_read(tmp_path, monkeypatch):
    _, path = saved(tmp_path)
    without(path, "layers.1.linear.weight")
    monkeypatch.setattr(loadstone._core, "execute", lambda *args, **kwargs: pytest.fail("read"))
    model = empty()
    for arguments in ({}, {"device_map": {"": "cpu"}}, {"strict": True}, {"missing": "error"}):
        with pytest.raises(loadstone.PlanError) as caught:
            ours.load_checkpoint_and_dispatch(model, path, **arguments)
        assert caught.value.code == "plan.missing"
        finding = next(finding for finding in caught.value.findings if finding.severity == "error")
        assert finding.target == "layers.1.linear.weight"
        assert finding.sources == ["layers.1.linear.weight"]
        assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, MIXED])
def test_missing_in_a_real_model_stays_as_it_is(tmp_path, caplog, device_map):
    reference, path = saved(tmp_path)
    names = ("layers.0.linear.weight", "layers.0.shift.offset", "layers.1.linear.bias")
    without(path, *names)
    model = randomise(Net(), 1)
    expected = randomise(Net(), 1)
    expected.load_state_dict(load_file(path), strict=False)
    assert not torch.equal(expected(TOKENS), reference(TOKENS))
    ours.load_checkpoint_and_dispatch(
        model, path, device_map=device_map, offload_folder=tmp_path / "offload"
    )
    result = loadstone.audit(model)
    assert result.ok
    assert "3 tensors are not in the checkpoint and kept" in caplog.text
    for name in names:
        assert torch.equal(tensors(model)[name], expected.state_dict()[name])
        assert result.provenance[name].origin == "kept"
    assert result.provenance["layers.1.linear.bias"].kind == "parameter"
    assert torch.equal(model(TOKENS), expected(TOKENS))
    with pytest.raises(loadstone.PlanError):
        ours.load_checkpoint_in_model(Net(), path, strict=True)


def test_missing_can_be_initialised_or_zeros(tmp_path):
    _, path = saved(tmp_path)
    without(path, "head.weight")
    model = ours.load_checkpoint_and_dispatch(empty(), path, missing="zeros")
    assert not model.head.weight.any()
    model = ours.load_checkpoint_and_dispatch(empty(), path, missing="initialise")
    assert model.head.weight.any() and not model.head.weight.isnan().any()
    with pytest.raises(loadstone.Error, match="unknown policy"):
        ours.load_checkpoint_and_dispatch(empty(), path, missing="perhaps")


@pytest.mark.parametrize(
    "missing", ["initialise", "initialize", {"head.*": "initialize"}, {".*weight": "initialise"}]
)
@pytest.mark.parametrize("name", ["load_checkpoint_in_model", "load_checkpoint_and_dispatch"])
def test_missing_is_spelled_as_for_a_plan(name, missing, tmp_path):
    _, path = saved(tmp_path)
    without(path, "head.weight")
    model = empty()
    getattr(ours, name)(model, path, device_map={"": "cpu"}, missing=missing)
    assert model.head.weight.any() and not model.head.weight.isnan().any()
    for wrong in ({"head.*": "perhaps"}, {"tail.*": "zeros"}):
        with pytest.raises(loadstone.PlanError):
            getattr(ours, name)(empty(), path, device_map={"": "cpu"}, missing=wrong)


def test_unexpected_names_are_warned_of_by_accelerates_logger(tmp_path, caplog):
    _, path = saved(tmp_path)
    save_file(load_file(path) | {"other.weight": torch.ones(2)}, path)
    with caplog.at_level(logging.WARNING, logger="accelerate.utils.modeling"):
        ours.load_checkpoint_in_model(empty(), path, device_map={"": "cpu"})
    assert "other.weight" in caplog.text and "were not used" in caplog.text
    caplog.clear()
    with pytest.raises(loadstone.PlanError) as caught:
        ours.load_checkpoint_in_model(empty(), path, device_map={"": "cpu"}, strict=True)
    assert caught.value.code == "plan.unexpected"
    without(path, "other.weight")
    ours.load_checkpoint_in_model(empty(), path, strict=True)
    assert not caplog.text


def test_keep_in_fp32_modules_alike(tmp_path):
    _, path = saved(tmp_path)
    arguments = {
        "device_map": {"": "cpu"},
        "dtype": torch.float16,
        "keep_in_fp32_modules": ["norm", "layers.2.linear.bias"],
    }
    mine, theirs = empty(), empty()
    ours.load_checkpoint_in_model(mine, path, **arguments)
    accelerate.load_checkpoint_in_model(theirs, str(path), **arguments)
    assert_same(mine, theirs)
    assert mine.layers[0].norm.weight.dtype == torch.float32
    assert mine.layers[0].linear.weight.dtype == torch.float16


def test_buffers_on_meta_need_a_constructor(tmp_path):
    _, path = saved(tmp_path)
    with pytest.raises(loadstone.PlanError) as caught:
        ours.load_checkpoint_in_model(empty(include_buffers=True), path)
    assert caught.value.code == "plan.no_value"
    assert "ramp" in str(caught.value)


@pytest.mark.parametrize("form", ["folder", "file", "index", "map alone", "folder with bin"])
def test_every_form_of_a_checkpoint(tmp_path, form, caplog):
    reference, path = saved(tmp_path / "whole")
    folder = tmp_path / "sharded"
    save_sharded(load_file(path), folder)
    index = folder / "model.safetensors.index.json"
    if form == "map alone":
        index.write_text(json.dumps(json.loads(index.read_text())["weight_map"]))
    if form == "folder with bin":
        (folder / "pytorch_model.bin").write_bytes(b"never read")
    where = {"file": path, "index": index, "map alone": index}.get(form, folder)
    model = ours.load_checkpoint_and_dispatch(empty(), where, device_map={"": "cpu"})
    assert_same(model, reference)
    assert "by accelerate itself" not in caplog.text


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(loadstone.LoadError) as caught:
        ours.load_checkpoint_in_model(empty(), tmp_path / "nothing")
    assert caught.value.code == "io.not_found"
    with pytest.raises(loadstone.Error) as caught:
        ours.load_checkpoint_in_model(empty(), tmp_path)
    assert caught.value.code == "format.no_checkpoint"
    with pytest.raises(loadstone.Error, match="unknown device map"):
        ours.load_checkpoint_and_dispatch(empty(), tmp_path, device_map="sideways")


@pytest.mark.parametrize("is_read", [True, False])
def test_torchs_own_files(tmp_path, caplog, is_read):
    """loadstone leaves unsupported files to accelerate, then checks the model."""
    reference = randomise(Net())
    state = dict(reference.state_dict())
    if not is_read:
        state["sparse"] = torch.eye(2).to_sparse()
    torch.save(state, tmp_path / "pytorch_model.bin")
    for where in (tmp_path, tmp_path / "pytorch_model.bin"):
        caplog.clear()
        model = ours.load_checkpoint_and_dispatch(empty(), where, device_map={"": "cpu"})
        assert ("by accelerate itself" in caplog.text) is not is_read
        assert_same(model, reference)
    del state["head.weight"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    accelerate.load_checkpoint_in_model(empty(), str(tmp_path))  # no warning
    with pytest.raises(loadstone.PlanError) as caught:
        ours.load_checkpoint_in_model(empty(), tmp_path)
    assert caught.value.code == "plan.missing" and "head.weight" in str(caught.value)


@pytest.mark.parametrize("wrap", ["compiled", "inside"])
def test_wrapped_modules_are_left_to_accelerate(tmp_path, caplog, wrap):
    """loadstone does not support modules that torch.compile wraps."""
    reference, path = saved(tmp_path)
    model = randomise(Net(), 1)
    if wrap == "inside":
        model.layers[1] = torch.compile(model.layers[1])
    ours.load_checkpoint_in_model(torch.compile(model) if wrap == "compiled" else model, path)
    assert "OptimizedModule" in caplog.text
    assert torch.equal(model.layers[1].linear.weight, reference.layers[1].linear.weight)


def test_disk_needs_a_folder(tmp_path):
    _, path = saved(tmp_path)
    with pytest.raises(loadstone.PlanError) as caught:
        ours.load_checkpoint_and_dispatch(empty(), path, device_map=MIXED)
    assert caught.value.code == "plan.offload_folder"


@pytest.mark.parametrize(
    ("argument", "word"),
    [({"broadcast_from_rank0": True}, "broadcast"), ({"full_state_dict": False}, "full_state")],
)
def test_arguments_that_are_not_ours_reach_accelerate(
    tmp_path, monkeypatch, caplog, argument, word
):
    reference, path = saved(tmp_path)
    seen = {}

    def spy(model, checkpoint, **arguments):
        seen.update(arguments)
        model.load_state_dict(reference.state_dict(), assign=True)

    monkeypatch.setattr(accelerate.utils.modeling, "load_checkpoint_in_model", spy)
    ours.load_checkpoint_in_model(empty(), path, **argument)
    theirs = inspect.signature(accelerate.load_checkpoint_in_model).parameters
    assert set(seen) == set(theirs) - {"model", "checkpoint"}
    assert argument.items() <= seen.items()
    assert word in caplog.text


def test_dispatch_takes_what_load_put_into_a_folder(tmp_path):
    reference, path = saved(tmp_path)
    with loadstone.skeleton():
        model = Net()
    device_map = {"embed": "cpu", "layers": "disk", "head": "disk"}
    loadstone.load(model, path, device_map=device_map, offload_folder=tmp_path / "offload")
    with pytest.raises(loadstone.PlanError) as caught:
        ours.dispatch_model(model, device_map)
    assert caught.value.code == "plan.missing"
    ours.dispatch_model(model, device_map, offload_dir=tmp_path / "offload", offload_buffers=True)
    assert loadstone.audit(model).ok
    assert torch.equal(model(TOKENS), reference(TOKENS))


def test_what_hooks_hold_in_host_memory_is_accounted_for(tmp_path):
    """An offloaded module keeps its tensors in its hook, as on a machine with a GPU."""
    reference, path = saved(tmp_path)
    model = empty()
    device_map = {"embed": "cpu", "layers": "cpu", "head": "cpu"}
    ours.load_checkpoint_in_model(model, path, device_map=device_map)
    # accelerate does not recognise a torch.device as "cpu", so it offloads everything.
    main = torch.device("cpu")
    ours.dispatch_model(model, device_map, main_device=main, force_hooks=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert loadstone.audit(model).ok
    assert torch.equal(model(TOKENS), reference(TOKENS))
    model.head.weight = torch.nn.Parameter(torch.ones(16, 8))
    model.extra = torch.nn.Linear(2, 2)
    assert loadstone.audit(model).changed == ["extra.weight", "extra.bias"]
