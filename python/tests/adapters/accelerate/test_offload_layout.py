"""Tests that accelerate itself can read the tensors that loadstone places on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate.utils import OffloadedWeightsLoader
from offload_folders import left_over, raw_value, written
from safetensors.torch import save_file

import loadstone
from loadstone import _core

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, because NaN does not equal NaN."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


class Holder(torch.nn.Module):
    """A model with one tensor of each dtype, and one tensor without dimensions."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        for dtype in dtypes:
            name = "buffer_" + str(dtype).removeprefix("torch.")
            self.register_buffer(name, torch.zeros(3, 5).to(dtype))
        self.weight = torch.nn.Parameter(torch.zeros(4, 6))
        self.gain = torch.nn.Parameter(torch.zeros(()))


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {name: torch.randn(3, 5).mul(9) for name in Holder(DTYPES).state_dict()}
    tensors |= {"weight": torch.randn(4, 6), "gain": torch.randn(())}
    like = Holder(DTYPES).state_dict()
    return {name: tensor.to(like[name].dtype) for name, tensor in tensors.items()}


def planned(state, tmp_path, **options):
    """Return a model and its plan with all tensors on disk; the caller must keep the model."""
    save_file(state, tmp_path / "model.safetensors")
    with loadstone.skeleton():
        model = Holder(DTYPES)
    return model, loadstone.plan(
        model,
        tmp_path / "model.safetensors",
        device_map={"": "disk"},
        offload_folder=tmp_path / "offload",
        **options,
    )


def offload(state, tmp_path, **options):
    """Execute a plan with all tensors on disk; return the plan, the report and the folder."""
    _model, plan = planned(state, tmp_path, **options)
    return plan, plan.execute(), tmp_path / "offload"


TURN = [{"op": "transpose", "sources": ["weight"], "targets": ["weight"], "dims": [0, 1]}]


def test_accelerate_reads_what_was_written(state, tmp_path):
    stored = state | {"weight": state["weight"].T.contiguous()}
    _, report, folder = offload(stored, tmp_path, dtype=torch.bfloat16, rules=TURN)
    loader = OffloadedWeightsLoader(save_folder=folder)
    for name, tensor in state.items():
        wanted = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        if name not in loader:
            assert not report.provenance[name].reason
            continue
        value = loader[name]
        assert value.dtype == wanted.dtype, name
        assert value.shape == wanted.shape, name
        assert torch.equal(bits(value), bits(wanted)), name
    assert "weight" in loader and "gain" in loader
    assert raw_value(folder, "weight") == bytes(bits(state["weight"].bfloat16()).numpy())
    assert report.provenance["weight"].reason == "offloaded"
    assert report.provenance["weight"].origin == "checkpoint"
    assert written(folder) == {"weight"}
    assert left_over(folder) == []
    assert report.sync_seconds > 0


def test_what_needs_no_change_stays_in_its_shard(state, tmp_path):
    _, report, folder = offload(state, tmp_path)
    index = json.loads((folder / "index.json").read_text())
    assert index["weight"]["safetensors_file"] == str(tmp_path / "model.safetensors")
    assert [file.name for file in folder.iterdir()] == ["index.json"]
    loader = OffloadedWeightsLoader(save_folder=folder)
    for name in index:
        assert torch.equal(bits(loader[name]), bits(state[name])), name
    assert report.bytes_written == 0 or not index


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_is_only_cast_stays_in_its_shard(state, tmp_path, dtype):
    save_file(state, tmp_path / "model.safetensors")
    with loadstone.skeleton():
        model = Holder(DTYPES)
    plan = loadstone.plan(
        model, tmp_path / "model.safetensors", device_map={"": "disk"}, dtype=dtype
    )
    report = plan.execute()
    assert report.bytes_written == report.bytes_read == 0
    loader = OffloadedWeightsLoader(index=_core.offload_index(plan._planned.core))
    assert set(loader) == set(state)
    for name, tensor in state.items():
        wanted = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert loader[name].dtype == wanted.dtype, name
        assert torch.equal(bits(loader[name]), bits(wanted)), name
    assert list(tmp_path.iterdir()) == [tmp_path / "model.safetensors"]


def test_the_plans_index_is_the_folders(state, tmp_path):
    stored = state | {"weight": state["weight"].T.contiguous()}
    plan, _, folder = offload(stored, tmp_path, rules=TURN)
    index = json.loads((folder / "index.json").read_text())
    file = Path(index["weight"].pop("safetensors_file"))
    assert file.parent == folder.resolve()
    assert index["weight"].pop("weight_name") == "weight"
    assert index == _core.offload_index(plan._planned.core)
    assert index["weight"] == {"dtype": "float32", "shape": [4, 6]}


def test_a_failed_load_leaves_no_folder(state, tmp_path):
    state["weight"] = state["weight"].T.contiguous()
    _model, plan = planned(state, tmp_path, rules=TURN)
    (tmp_path / "model.safetensors").write_bytes(b"another file")
    with pytest.raises(loadstone.LoadError) as caught:
        plan.execute()
    assert caught.value.code == "io.changed"
    assert not (tmp_path / "offload").exists()
