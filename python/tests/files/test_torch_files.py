"""Tests that torch's files (.bin, .pt, .pth, .ckpt) are read as by torch, without running code."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from command import COMMAND
from safetensors.torch import load_file, save_file
from torch_values import DTYPES, LAYOUTS, same, some, views

import loadstone

# Dtypes that torch's old layout does not support.
UNTYPED = {torch.uint16, torch.uint32, torch.uint64} | {
    dtype for dtype in DTYPES if "float8" in str(dtype)
}


class Holder(torch.nn.Module):
    """A module with buffers of these names, shapes and dtypes."""

    def __init__(self, like: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in like.items():
            self.register_buffer(name, torch.zeros(tensor.shape, dtype=tensor.dtype))


def loaded(path: Path, like: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    with loadstone.skeleton():
        model = Holder(like)
    loadstone.load(model, path, **options)
    return model.state_dict()


def assert_loads(path: Path, weights_only: bool = True, **options: Any) -> None:
    expected = torch.load(path, weights_only=weights_only)
    catalog = loadstone.inspect(path)
    assert set(catalog.tensors) == set(expected)
    assert {name: info.shape for name, info in catalog.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    found = loaded(path, expected, **options)
    assert [name for name in expected if not same(found[name], expected[name])] == []


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_dtypes_are_torch_loads(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    dtypes = [dtype for dtype in DTYPES if layout != "legacy" or dtype not in UNTYPED]
    state = {f"x_{str(dtype)[6:]}": some(dtype, 3, 5) for dtype in dtypes}
    torch.save(state, path, **LAYOUTS[layout])
    assert_loads(path, weights_only=layout not in ("protocol 4", "protocol 5"))
    assert loadstone.inspect(path).findings == []


@pytest.mark.parametrize("layout", ["zip", "legacy"])
def test_views_are_torch_loads(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "views.bin"
    torch.save(views(), path, **LAYOUTS[layout])
    assert_loads(path)
    tensors = loadstone.inspect(path).tensors
    assert tensors["transposed"].strides == (1, 8)
    assert tensors["rows"].strides == ()
    ranges = {(each.offset_begin, each.offset_end) for each in (tensors["whole"], tensors["tie"])}
    assert len(ranges) == 1


def test_views_are_cast_on_the_way(tmp_path: Path) -> None:
    path = tmp_path / "views.pt"
    state = {name: tensor for name, tensor in views().items() if tensor.dtype == torch.float32}
    torch.save(state, path)
    found = loaded(path, state, dtype=torch.bfloat16)
    assert all(torch.equal(found[name], state[name].bfloat16()) for name in state)


def test_files_as_views_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "views.pt"
    torch.save(views(), path)
    assert_loads(path, mmap=True)


def test_rules_see_through_strides(tmp_path: Path) -> None:
    path = tmp_path / "experts.pt"
    state = {f"e.{i}.w": torch.randn(5, 3).t() for i in range(4)} | {"q": torch.randn(4, 6).t()}
    torch.save(state, path)
    like = {"experts": torch.zeros(4, 5, 3), "q_a": torch.zeros(2, 4), "q_b": torch.zeros(4, 4)}
    rules = [
        {"op": "stack", "sources": [r"e\.(\d+)\.w"], "targets": ["experts"], "dim": 0,
         "then": [{"op": "transpose", "dims": [1, 2]}]},
        {"op": "split", "sources": ["q"], "targets": ["q_a", "q_b"], "dim": 0, "sizes": [2, 4]},
    ]  # fmt: skip
    found = loaded(path, like, rules=rules)
    stacked = torch.stack([state[f"e.{i}.w"] for i in range(4)]).transpose(1, 2)
    assert torch.equal(found["experts"], stacked)
    assert torch.equal(torch.cat([found["q_a"], found["q_b"]]), state["q"])


def test_conversion_gives_the_same_tensors(tmp_path: Path) -> None:
    path, target = tmp_path / "model.ckpt", tmp_path / "model.safetensors"
    state = views() | {
        f"x_{str(dtype)[6:]}": some(dtype, 3, 5) for dtype in DTYPES if dtype != torch.complex128
    }
    torch.save(state, path)
    loadstone.convert(path, target)
    found = load_file(target)
    assert set(found) == set(state)
    assert [name for name in state if not same(found[name], state[name])] == []
    for first, second in ((path, target), (target, path)):
        done = subprocess.run([COMMAND, "verify", first, second], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    state["transposed"] = state["transposed"].clone()
    state["transposed"][3, 2] += 1
    torch.save(state, path)
    done = subprocess.run([COMMAND, "verify", path, target], capture_output=True, text=True)
    assert done.returncode == 1
    assert "transposed" in done.stdout


def test_a_model_and_its_training_state(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    training = {
        "epoch": 3, "loss": 0.25, "name": "run", "done": None,
        "optimizer_state": optimizer.state_dict(), "state_dict": model.state_dict(),
        "args": pytest.approx, "path": Path("x"), "big": 1 << 80,
    }  # fmt: skip
    path = tmp_path / "last.ckpt"
    torch.save(training, path)
    with loadstone.skeleton():
        again = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    loadstone.load(again, path)
    found = again.state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    assert [finding.code for finding in loadstone.inspect(path).findings] == ["pt.ignored"]


@pytest.mark.parametrize("state", [{"amax": 3.5}, 7, "text", [1, 2], {"scale": torch.ones(2)}])
def test_a_conversion_warns_of_extra_state_that_it_loses(state: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(2), "a._extra_state": state}, path)
    for options in ({}, {"dtype": "float16"}, {"dry_run": True}):
        told = loadstone.convert(path, tmp_path / "out.safetensors", **options).findings
        lost = [each for each in told if each.code == "pt.ignored"]
        assert [each.severity for each in lost] == ["warning"]
        assert "'a._extra_state'" in lost[0].message
    assert {each.severity for each in loadstone.inspect(path).findings} == {"info"}
    torch.save({"w": torch.ones(2), "a._extra_state": torch.ones(2)}, path)  # control
    assert loadstone.convert(path, tmp_path / "control.safetensors").findings == []


def test_parameters_and_ordered_dicts(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    state = OrderedDict(w=torch.nn.Parameter(torch.randn(3, 4)), b=torch.randn(3))
    torch.save(state, path)
    assert_loads(path)


def test_a_saved_plan_notices_another_pickle(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    state = {"w": torch.randn(4, 4)}
    torch.save(state, path)
    with loadstone.skeleton():
        model = Holder(state)
    plan = loadstone.plan(model, path)
    time = path.stat().st_mtime_ns
    data = path.read_bytes()
    # Change strides, but neither the number of bytes nor the modification time.
    before = b"K\x04K\x04\x86q\x08K\x04K\x01\x86"
    at = data.find(b"K\x04K\x01\x86")
    assert at > 0, before
    path.write_bytes(data[:at] + b"K\x01K\x04\x86" + data[at + 5 :])
    os.utime(path, ns=(time, time))
    with pytest.raises(loadstone.Error) as caught:
        plan.execute()
    assert caught.value.code == "io.changed"


class Evil:
    def __reduce__(self) -> Any:
        return (os.system, ("exit 3",))


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ({"w": Evil()}, "pt.global_refused"),
        (torch.nn.Linear(2, 2), "pt.global_refused"),
        ({"w": torch.eye(3).to_sparse()}, "pt.unsupported"),
        ({"w": torch.randn(2, dtype=torch.complex64).conj()}, "pt.unsupported"),
        ("no dict", "pt.top_level"),
    ],
)
def test_what_is_no_state_dict_is_refused(value: object, code: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(saved(value))
    with pytest.raises(loadstone.FormatError) as caught:
        loadstone.inspect(path)
    assert caught.value.code == code


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_plain_pickles_and_torchscript_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.bin"
    path.write_bytes(pickle.dumps({"w": 1}, protocol=2))
    with pytest.raises(loadstone.FormatError) as caught:
        loadstone.inspect(path)
    assert caught.value.code == "pt.not_torch"
    path = tmp_path / "script.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    with pytest.raises(loadstone.FormatError) as caught:
        loadstone.inspect(path)
    assert caught.value.code == "pt.torchscript"


def test_every_prefix_is_refused(tmp_path: Path) -> None:
    for layout in ("zip", "legacy"):
        path = tmp_path / f"{layout}.pt"
        torch.save({"w": torch.randn(2, 2), "v": torch.randn(3).half()}, path, **LAYOUTS[layout])
        data = path.read_bytes()
        cut = tmp_path / "cut.pt"
        for length in range(len(data)):
            cut.write_bytes(data[:length])
            with pytest.raises(loadstone.Error):
                loadstone.inspect(cut)
        cut.write_bytes(data)
        assert set(loadstone.inspect(cut).tensors) == {"w", "v"}  # control


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "packed.pt"
    with (
        zipfile.ZipFile(io.BytesIO(saved({"w": torch.zeros(100)}))) as whole,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    with pytest.raises(loadstone.FormatError) as caught:
        loadstone.inspect(path)
    assert caught.value.code == "pt.compressed"


def test_shards_with_an_index(tmp_path: Path) -> None:
    state = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    names = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    for name, file in names.items():
        torch.save({name: state[name]}, tmp_path / file)
    index = {"metadata": {"total_size": 68}, "weight_map": names}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    found = loaded(tmp_path, state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert loadstone.inspect(tmp_path).findings == []


SHARES = (
    "zero_pp_rank_0_mp_rank_00_model_states.pt",
    "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
)


def test_folders_and_files_of_zero_name_the_script_that_joins_them(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint" / "global_step5"
    folder.mkdir(parents=True)
    for name in SHARES:
        torch.save({"module": {"weight": torch.zeros(0)}}, folder / name)
    (folder.parent / "zero_to_fp32.py").write_text("")
    for path in (folder.parent, folder, folder / SHARES[0], [folder / SHARES[1]]):
        with pytest.raises(loadstone.FormatError, match=r"zero_to_fp32\.py") as caught:
            loadstone.inspect(path)
        assert caught.value.code == "format.no_checkpoint"
    # Control: after the script has written its file, the folder is a checkpoint.
    torch.save({"weight": torch.ones(2, 3)}, folder.parent / "pytorch_model.bin")
    assert loadstone.inspect(folder.parent).tensors["weight"].shape == (2, 3)


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_an_empty_tensor_of_zero_names_the_script(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{kind}"
    write = torch.save if kind == "bin" else save_file
    model = torch.nn.Linear(3, 2, bias=False)
    for shape, is_named in (((0,), True), ((4,), False)):
        write({"weight": torch.zeros(shape)}, path)
        (finding,) = loadstone.plan(model, path).findings
        assert finding.code == "plan.shape"
        assert ("zero_to_fp32.py" in finding.suggestion) == is_named
