"""Plan, execute and audit in Python, on a model with each kind of tensor."""

from __future__ import annotations

import inspect
import json
import os
import shutil

import pytest
import torch
from models import Tiny, all_tensors, assert_same, randomise, save, save_sharded
from safetensors.torch import save_file

import loadstone


@pytest.fixture
def reference():
    return randomise(Tiny())


@pytest.fixture
def file(reference, tmp_path):
    path = tmp_path / "model.safetensors"
    save(reference, path)
    return path


def skeleton(width=8):
    with loadstone.skeleton():
        return Tiny(width)


def test_every_tensor_is_equal_and_has_a_provenance(reference, file):
    model = skeleton()
    report = loadstone.load(model, file)
    assert_same(model, reference)
    origins = {name: item.origin for name, item in report.provenance.items()}
    assert origins["embed.weight"] == "checkpoint"
    assert origins["head.weight"] == "tie"
    assert origins["blocks.0.angles"] == "constructor"
    assert origins["blocks.1.freqs[0]"] == "constructor"
    assert model.head.weight is model.embed.weight
    source = report.provenance["blocks.0.linear.weight"].sources[0]
    assert source.tensor == "blocks.0.linear.weight"
    assert source.offset_end - source.offset_begin == 8 * 8 * 4
    assert report.bytes_read == sum(t.nbytes for t in reference.state_dict().values()) - 16 * 8 * 4


def test_sharded_checkpoint(reference, tmp_path):
    state = save(reference, tmp_path / "whole.safetensors")
    save_sharded(state, tmp_path / "sharded")
    model = skeleton()
    loadstone.load(model, tmp_path / "sharded")
    assert_same(model, reference)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_thread_count_changes_nothing(reference, file, threads):
    model = skeleton()
    loadstone.load(model, file, threads=threads)
    assert_same(model, reference)


def test_the_loaded_model_computes(reference, file):
    model = skeleton()
    loadstone.load(model, file)
    tokens = torch.arange(10).view(2, 5)
    assert torch.equal(model(tokens), reference(tokens))
    model(tokens).sum().backward()
    assert model.blocks[0].linear.weight.grad is not None


def test_requires_grad_and_attributes_of_parameters_are_kept(file):
    model = skeleton()
    model.embed.weight.requires_grad_(False)
    model.embed.weight.quality = "kept"
    loadstone.load(model, file)
    assert not model.embed.weight.requires_grad
    assert model.embed.weight.quality == "kept"
    assert model.blocks[0].linear.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_casts_parameters_and_persistent_buffers_only(reference, file, dtype):
    model = skeleton()
    loadstone.load(model, file, dtype=dtype)
    for name, tensor in all_tensors(model).items():
        expected = all_tensors(reference)[name]
        if not name.endswith("angles"):
            expected = expected.to(dtype)
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name
    assert model.blocks[0].freqs[0].dtype == torch.float64


def test_dtype_auto_is_that_of_the_file(reference, tmp_path):
    save(reference, tmp_path / "half.safetensors", torch.float16)
    model = skeleton()
    loadstone.load(model, tmp_path / "half.safetensors", dtype="auto")
    assert model.embed.weight.dtype == torch.float16
    assert model.blocks[0].angles.dtype == torch.float32


def test_a_narrower_file_is_cast_to_the_skeleton_and_says_so(reference, tmp_path):
    save(reference, tmp_path / "half.safetensors", torch.bfloat16)
    model = skeleton()
    plan = loadstone.plan(model, tmp_path / "half.safetensors")
    assert "plan.cast" in {finding.code for finding in plan.findings}
    plan.execute()
    expected = reference.embed.weight.to(torch.bfloat16).float()
    assert torch.equal(model.embed.weight, expected)


def test_rules_stack_experts(tmp_path):
    experts = {f"layer.experts.{i}.{w}": torch.randn(4, 6) for i in range(12) for w in ("w1", "w3")}
    save_file(experts, tmp_path / "experts.safetensors")
    model = torch.nn.Module()
    model.fused = torch.nn.Parameter(torch.empty(12, 8, 6, device="meta"))
    rule = {
        "op": "stack_concat",
        "sources": [r"layer\.experts\.(\d+)\.w1", r"layer\.experts\.(\d+)\.w3"],
        "targets": ["fused"],
        "dims": [0, 1],
    }
    loadstone.load(model, tmp_path / "experts.safetensors", rules=[rule])
    gate = torch.stack([experts[f"layer.experts.{i}.w1"] for i in range(12)])
    up = torch.stack([experts[f"layer.experts.{i}.w3"] for i in range(12)])
    assert torch.equal(model.fused, torch.cat([gate, up], 1))


def test_parameters_that_hold_memory_can_be_written_in_place(reference, file):
    model = Tiny()
    address = model.embed.weight.data_ptr()
    version = model.embed.weight._version
    plan = loadstone.plan(model, file, in_place=True)
    assert "plan.in_place" in {finding.code for finding in plan.findings}
    plan.execute()
    assert model.embed.weight.data_ptr() == address
    assert model.embed.weight._version > version
    assert_same(model, reference)


def test_missing_initialise_runs_the_modules_own_initialiser(reference, tmp_path):
    state = save(reference, tmp_path / "all.safetensors")
    del state["blocks.1.norm.weight"], state["blocks.0.linear.bias"]
    save_file(state, tmp_path / "some.safetensors")
    model = skeleton()
    report = loadstone.load(model, tmp_path / "some.safetensors", missing="initialise")
    assert torch.equal(model.blocks[1].norm.weight, torch.ones(8))  # LayerNorm's own initialiser
    # Linear's own initialiser is uniform within this bound.
    assert model.blocks[0].linear.bias.abs().max() <= 1 / 8**0.5
    assert report.provenance["blocks.1.norm.weight"].origin == "initialiser"
    named = {f.target for f in report.findings if f.code == "plan.missing"}
    assert named == {"blocks.1.norm.weight", "blocks.0.linear.bias"}
    assert torch.equal(model.blocks[1].norm.bias, reference.blocks[1].norm.bias)


def test_missing_initialise_without_an_initialiser_is_refused(tmp_path):
    model = torch.nn.Module()
    model.table = torch.nn.Parameter(torch.empty(3, device="meta"))
    save_file({"other": torch.zeros(1)}, tmp_path / "x.safetensors")
    plan = loadstone.plan(model, tmp_path / "x.safetensors", missing="initialise")
    assert "plan.no_initialiser" in {finding.code for finding in plan.findings}
    assert not plan.ok


def test_missing_zeros(reference, tmp_path):
    state = save(reference, tmp_path / "all.safetensors")
    del state["blocks.1.linear.weight"]
    save_file(state, tmp_path / "some.safetensors")
    model = skeleton()
    report = loadstone.load(model, tmp_path / "some.safetensors", missing="zeros")
    assert torch.equal(model.blocks[1].linear.weight, torch.zeros(8, 8))
    assert report.provenance["blocks.1.linear.weight"].origin == "zeros"


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [("dytpe", "dtype"), ("device_mpa", "device_map"), ("progess", "progress"), ("zzzz", "")],
)
def test_a_mistyped_argument_is_one_of_load(file, mistyped, meant):
    with pytest.raises(TypeError) as caught:
        loadstone.load(Tiny(), file, **{mistyped: None})
    near = f"; did you mean '{meant}'?" if meant else ""
    assert str(caught.value) == f"load() got an unexpected keyword argument '{mistyped}'{near}"


def test_load_takes_the_arguments_of_plan_and_of_execute():
    of_plan = inspect.signature(loadstone.plan).parameters
    of_execute = inspect.signature(loadstone.Plan.execute).parameters
    known = {**of_execute, **of_plan}
    for name in ("self", "into"):
        del known[name]
    found = dict(inspect.signature(loadstone.load).parameters)
    assert "os.PathLike" in str(known.pop("model")) and "Module" in str(found.pop("model"))
    assert {name: str(each) for name, each in found.items()} == {
        name: str(each) for name, each in known.items()
    }


def test_report_as_json(file):
    report = loadstone.load(skeleton(), file)
    document = json.loads(report.to_json())
    assert {"provenance", "seconds", "bytes_read", "peak_bytes", "findings"} <= document.keys()
    assert document["provenance"]["embed.weight"]["origin"] == "checkpoint"


def test_mmap_hands_out_views_that_never_write_to_the_file(reference, file):
    before = file.read_bytes()
    model = skeleton()
    report = loadstone.load(model, file, mmap=True)
    assert_same(model, reference)
    views = [n for n, item in report.provenance.items() if item.delivery == "file_view"]
    assert "embed.weight" in views
    with torch.no_grad():
        model.embed.weight.add_(1)
    assert torch.equal(model.embed.weight, reference.embed.weight + 1)
    assert file.read_bytes() == before


def test_a_saved_plan_is_carried_out_on_another_model(reference, file, tmp_path):
    loadstone.plan(skeleton(), file).save(tmp_path / "plan.json")
    model = skeleton()
    plan = loadstone.Plan.load(tmp_path / "plan.json")
    with pytest.raises(loadstone.Error, match="pass model="):
        plan.execute()
    plan.execute(model=model)
    assert_same(model, reference)


def test_a_skeleton_file_is_planned_without_a_model(file, tmp_path):
    loadstone.save_skeleton(skeleton(), tmp_path / "skeleton.json")
    plan = loadstone.plan(tmp_path / "skeleton.json", file)
    assert plan.ok
    reasons = {t.name: t.reason for t in plan.targets if t.origin == "excluded"}
    assert "a skeleton file does not contain" in reasons["blocks.0.angles"]


def test_a_plan_edited_to_write_out_of_bounds_is_refused(file, tmp_path):
    loadstone.plan(skeleton(), file).save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    boxes = next(t["recipe"]["boxes"] for t in document["targets"] if "boxes" in t["recipe"])
    boxes[0]["target_offset"] += 1
    (tmp_path / "edited.json").write_text(json.dumps(document))
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.Plan.load(tmp_path / "edited.json")
    assert caught.value.code == "plan.box"


def test_a_plan_from_a_file_writes_only_where_the_caller_says(file, tmp_path):
    evil, mine = tmp_path / "evil", tmp_path / "mine"
    model = skeleton()
    plan = loadstone.plan(
        model, file, dtype=torch.bfloat16, device_map={"": "disk"}, offload_folder=evil
    )
    plan.save(tmp_path / "plan.json")
    with pytest.raises(loadstone.PlanError, match="evil") as caught:
        loadstone.Plan.load(tmp_path / "plan.json")
    assert caught.value.code == "plan.offload_folder"
    loadstone.Plan.load(tmp_path / "plan.json", offload_folder=mine).execute(model=model)
    assert (mine / "index.json").exists()
    assert not evil.exists()


def test_a_plan_goes_on_with_a_copy_of_its_checkpoint(reference, file, tmp_path):
    loadstone.plan(skeleton(), file).save(tmp_path / "plan.json")
    for place in (tmp_path / "copy", tmp_path / "beside"):
        place.mkdir()
        shutil.copyfile(file, place / file.name)
        os.utime(place / file.name, (1, 1))
    shutil.copyfile(tmp_path / "plan.json", tmp_path / "beside" / "plan.json")
    kept = file.rename(tmp_path / "kept")
    try:
        with pytest.raises(loadstone.LoadError):
            loadstone.Plan.load(tmp_path / "plan.json")
        by_word = loadstone.Plan.load(tmp_path / "plan.json", root=tmp_path / "copy")
        for plan in (by_word, loadstone.Plan.load(tmp_path / "beside" / "plan.json")):
            assert "io.time" in {finding.code for finding in plan.findings}
            model = skeleton()
            plan.execute(model=model)
            assert_same(model, reference)
    finally:
        kept.rename(file)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_offloaded_tensors_are_not_held_and_their_ties_neither(file, tmp_path, dtype):
    model = skeleton()
    folder = tmp_path / "offload"
    report = loadstone.load(
        model, file, device_map={"": "disk"}, offload_folder=folder, dtype=dtype
    )
    result = loadstone.audit(model)
    assert result.ok
    assert result.not_held["head.weight"] == result.not_held["embed.weight"] == "offloaded"
    assert model.embed.weight.is_meta
    # Tensors that only need a cast stay in the checkpoint, and the index refers to them.
    assert report.bytes_written == 0
    assert [file.name for file in folder.iterdir()] == ["index.json"]


def test_load_file(reference, file):
    tensors = loadstone.torch.load_file(file)
    for name, tensor in save(reference, file.with_name("again.safetensors")).items():
        assert torch.equal(tensors[name], tensor)


def test_progress_reaches_the_total(file):
    seen = []
    loadstone.load(skeleton(), file, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
