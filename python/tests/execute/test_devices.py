"""Loads to devices: the same bytes as on the host, no second copy, no partial results.

The test machines have no GPU: see ``fake_devices``.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_files import CODECS
from compare import same
from fake_devices import FakeDevices
from quantize_targets import quantizing

import loadstone
from loadstone import Quantization, _core
from loadstone._model import devices as _devices

DEVICES = ["cuda:0", "xpu:0"]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> FakeDevices:
    return FakeDevices(monkeypatch)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_every_codec_has_the_bytes_of_the_host(
    codec: str, devices: FakeDevices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare load_file, torch.load_file and open, which read in different ways."""
    path = CODECS[codec](tmp_path).path
    for name in ("_files.open", "torch"):
        monkeypatch.setattr(f"loadstone.{name}.device_argument", lambda wanted: str(wanted))
    host = loadstone.open(path)
    loads = [loadstone.load_file, *[loadstone.torch.load_file] * path.is_file()]
    wanted = [load(path) for load in loads]
    for device in reversed(DEVICES):
        for load, expected in zip(loads, wanted, strict=True):
            found = load(path, device)
            assert expected.keys() == found.keys() and expected
            assert all(same(found[name], expected[name]) for name in expected)
        opened = loadstone.open(path, device=device)
        assert all(same(opened[name][...], host[name][...]) for name in host)
        devices.require_clean()
        copies = ("cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync_v2")
        assert any(map(devices.calls, copies)) == device.startswith("cuda")


def test_a_device_without_addresses(
    devices: FakeDevices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor needs several windows, and the boundaries of windows depend on the staging."""
    state = {name: torch.randn(512, 1024) for name in "abcd"}
    loadstone.torch.save_file(state, tmp_path / "model.safetensors")
    model = torch.nn.Module()
    for name in state:
        model.register_parameter(name, torch.nn.Parameter(torch.empty(512, 1024, device="meta")))
    for staging in (1 << 20, 64 << 20):
        loadstone.load(
            model,
            tmp_path / "model.safetensors",
            device_map="mps:0",
            staging_bytes_max=staging,
            receipt="xxh3-128",
        )
        assert all(same(model.state_dict()[name], each) for name, each in state.items())


class Model(torch.nn.Module):
    """Matrices, vectors, a scalar, a tie, and a tensor that no file contains."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(500, 128)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(4))
        self.head = torch.nn.Linear(128, 500, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.zeros(()))
        self.register_buffer("empty", torch.zeros(0))


def saved(path: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(3)
    state = {name: torch.randn_like(each).to(dtype) for name, each in Model().state_dict().items()}
    state.pop("head.weight")
    loadstone.torch.save_file(state, path / "model.safetensors")
    return path / "model.safetensors"


def skeleton() -> torch.nn.Module:
    with torch.device("meta"):
        return Model()


MAPS: list[Any] = [
    "cuda:0",
    "xpu:0",
    "mps:0",
    {"": "cpu", "blocks.1": "cuda:1", "blocks.2": "cuda:0", "embed": "cuda:0", "head": "cuda:0"},
    {"": "cuda:1", "blocks.0": "xpu:0"},  # device types with different drivers
    {"": "cuda:0", "blocks.3": "disk"},
]


@pytest.mark.parametrize("device_map", MAPS, ids=str)
@pytest.mark.parametrize("threads", [1, 4])
def test_a_model_has_the_bytes_of_the_host(
    device_map: Any, threads: int, devices: FakeDevices, tmp_path: Path
) -> None:
    path = saved(tmp_path)
    plain, model = skeleton(), skeleton()
    host = loadstone.load(plain, path, receipt="xxh3-128").receipt
    options = {"offload_folder": str(tmp_path / "disk")} if "disk" in str(device_map) else {}
    report = loadstone.load(
        model, path, device_map=device_map, threads=threads, receipt="xxh3-128", **options
    )
    for name, expected in plain.state_dict().items():
        found = model.state_dict()[name]
        assert found.is_meta or same(found, expected), name
        assert found.is_meta == (report.provenance[name].device == "disk")
    assert report.bytes_read <= path.stat().st_size  # each byte is read at most once
    assert host is not None and report.receipt is not None
    assert report.receipt.targets.items() <= host.targets.items() and report.receipt.targets
    devices.require_clean()


def test_a_plan_says_what_passes_through_the_host(devices: FakeDevices, tmp_path: Path) -> None:
    path = saved(tmp_path)
    plan = loadstone.plan(skeleton(), path, device_map="cuda:0", threads=2)
    assert devices.calls("cuInit") == 0  # a plan does not use the device
    values = sum(t.nbytes for t in plan.targets if t.delivery == "memory")
    assert plan.peak_bytes["cuda:0"] == values
    report = plan.execute(model=skeleton())
    assert 0 < devices.pinned_bytes_peak() <= report.staging_bytes_peak
    assert report.staging_bytes_peak <= plan.peak_bytes["cpu"]
    assert devices.waited_for == ["cuda:0"]  # the load waited for transfers in flight
    small = loadstone.plan(skeleton(), path, device_map="cuda:0", staging_bytes_max=256 << 10)
    assert small.peak_bytes["cpu"] < plan.peak_bytes["cpu"]
    small.execute(model=skeleton())
    devices.require_clean()


def test_small_tensors_are_copied_together(devices: FakeDevices, tmp_path: Path) -> None:
    state = {f"{i}": torch.randn(128) for i in range(2000)}
    loadstone.torch.save_file(state, tmp_path / "model.safetensors")
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.empty(128, device="meta")) for name in state}
    )
    loadstone.load(model, tmp_path / "model.safetensors", device_map="cuda:0", threads=2)
    assert all(same(model[name].detach(), each) for name, each in state.items())
    copies = ("cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync_v2", "cuEventSynchronize")
    assert 0 < sum(map(devices.calls, copies)) < 40
    devices.require_clean()


def test_ranks_of_a_machine_share_what_is_pinned(
    devices: FakeDevices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, state = tmp_path / "model.safetensors", {"weight": torch.randn(4096, 1024)}
    loadstone.torch.save_file(state, path)
    peaks, pinned = {}, {}
    for ranks in (0, 1, 2, 8):
        if ranks:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        model = torch.nn.Linear(1024, 4096, bias=False, device="meta")
        plan = loadstone.plan(
            model, path, device_map="cuda:0", threads=4, staging_bytes_max=8 << 20
        )
        peaks[ranks] = plan.peak_bytes["cpu"]
        devices.driver.fake_cuda_reset()
        report = plan.execute(model=model)
        pinned[ranks] = devices.pinned_bytes_peak()
        assert pinned[ranks] <= report.staging_bytes_peak <= peaks[ranks]
        assert pinned[ranks] <= (8 << 20) // max(ranks, 1)
        assert same(model.weight.detach(), state["weight"])
        assert json.loads(plan.to_json()).get("local_ranks", 1) == max(ranks, 1)
    assert (peaks[0], pinned[0]) == (
        peaks[1],
        pinned[1],
    )  # one rank is like a load without torchrun
    assert pinned[8] < pinned[2] < pinned[1] and peaks[8] < peaks[1]


def test_who_counts_as_a_rank_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from loadstone._model.ranks import local_ranks

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert local_ranks() == 1
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 16)
    assert local_ranks() == 16  # all ranks may be on this machine
    for told, count in (("8", 8), ("1", 1), ("0", 16), ("many", 16), ("", 16), ("9" * 11, 1 << 20)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
        assert local_ranks() == count


def test_ranks_share_in_loads_of_files_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check the plan that ``loadstone.open`` and ``load_file`` make."""
    from loadstone._files.read import plan_for

    path = tmp_path / "model.safetensors"
    loadstone.torch.save_file({"weight": torch.randn(4, 4)}, path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    targets = [_core.Target("weight", (4, 4), "F32")]
    made = plan_for(loadstone.inspect(path), targets, device="cuda:0")
    assert json.loads(made.to_json())["local_ranks"] == 8


@pytest.mark.parametrize("encoding", ["nf4", "int8", "fp8", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("device", DEVICES)
def test_quantized_on_the_way(
    encoding: str, device: str, devices: FakeDevices, tmp_path: Path
) -> None:
    """The components have the same bytes as those made on the host for the device's library."""
    from loadstone._execute import execute

    path = saved(tmp_path)
    dialect = "bnb-cuda" if encoding in ("nf4", "int8") and device.startswith("cuda") else ""
    found, expected = (
        _values(_quantizing(path, encoding, each, named))
        for each, named in ((device, ""), ("cpu", dialect))
    )
    count = 0
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, execute.ComponentTensors):
            count += 1
            assert one.keys() == other.keys()
            assert all(same(one[name], other[name]) for name in other)
    assert count == 4
    devices.require_clean()


def _values(plan: Any) -> list[Any]:
    from loadstone._execute import execute
    from loadstone._execute.model_check import planned_slots

    slots = planned_slots(plan, skeleton())
    return execute.read_values(plan, slots, execute.ExecuteOptions()).values


def _quantizing(path: Path, encoding: str, device: str, dialect: str) -> Any:
    from loadstone._plan.planning import make_plan

    wanted = Quantization(encoding, dialect=dialect)
    recipes = quantizing((f"blocks.{i}.weight" for i in range(4)), wanted)
    return make_plan(skeleton(), loadstone.inspect(path), recipes, device_map=device)


FAILURES = [
    ("cuMemHostAlloc", 2, "memory.host"),
    ("cuStreamCreate", 2, "memory.device"),
    ("cuMemcpyHtoDAsync_v2", 700, "device.driver"),
    ("cuMemcpyBatchAsync_v2", 700, "device.driver"),
    ("cuEventSynchronize", 719, "device.driver"),
]


@pytest.mark.parametrize(("function", "result", "code"), FAILURES)
def test_a_failure_leaves_the_model_as_it_was(
    function: str, result: int, code: str, devices: FakeDevices, tmp_path: Path
) -> None:
    path = saved(tmp_path)
    model = skeleton()
    devices.fail(function, 0, result)
    with pytest.raises(loadstone.LoadError) as caught:
        loadstone.load(model, path, device_map="cuda:1")
    assert caught.value.code == code
    assert caught.value.field == "cuda:1"
    assert function == "cuMemHostAlloc" or caught.value.tensor in dict(model.named_parameters())
    assert all(each.is_meta for each in model.parameters())
    devices.require_clean()
    loadstone.load(model, path, device_map="cuda:1")  # a load after the failure succeeds
    assert not any(each.is_meta for each in model.parameters())


def test_a_full_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nMore")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(loadstone.LoadError) as caught:
        _devices.empty("blocks.0.weight", (1 << 28,), "F32", "cuda:0")
    assert caught.value.code == "memory.device"
    assert (caught.value.tensor, caught.value.field) == ("blocks.0.weight", "cuda:0")
    assert "1.00 GiB" in str(caught.value)


def test_memory_that_ends_is_told_from_other_errors() -> None:
    with pytest.raises(loadstone.LoadError) as caught, _devices.memory_for("w", "mps:0"):
        raise RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)")
    assert (caught.value.code, caught.value.tensor) == ("memory.device", "w")
    with pytest.raises(RuntimeError, match="another"), _devices.memory_for("w", "cpu"):
        raise RuntimeError("another")


def test_a_driver_that_says_no_is_no_driver_that_is_absent(
    devices: FakeDevices, tmp_path: Path
) -> None:
    devices.fail("cuInit", 0, 100)
    with pytest.raises(loadstone.LoadError, match="cuInit failed"):
        loadstone.load(skeleton(), saved(tmp_path), device_map="cuda:0")


def test_without_memory_for_the_ring(
    devices: FakeDevices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise MemoryError("the host is full")

    monkeypatch.setattr(_devices._TorchCopies, "allocate", full)
    with pytest.raises(loadstone.LoadError) as caught:
        loadstone.load(skeleton(), saved(tmp_path), device_map="xpu:0")
    assert caught.value.code == "memory.host"


def test_what_torch_cannot_copy_is_named(
    devices: FakeDevices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(_devices._TorchCopies, "copy", lost)
    model = skeleton()
    with pytest.raises(loadstone.LoadError) as caught:
        loadstone.load(model, saved(tmp_path), device_map="xpu:0")
    assert (caught.value.code, caught.value.field) == ("device.driver", "xpu:0")
    assert caught.value.tensor and "the device is lost" in str(caught.value)
    assert all(each.is_meta for each in model.parameters())


def test_without_cudas_driver_torch_copies(
    devices: FakeDevices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path)
    monkeypatch.setattr(_devices, "CUDA_LIBRARY", "libno_such_driver.so.1")
    plain, model = skeleton(), skeleton()
    loadstone.load(plain, path)
    loadstone.load(model, path, device_map="cuda:0")
    assert all(same(model.state_dict()[k], v) for k, v in plain.state_dict().items())
    assert devices.calls("cuInit") == 0


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    """Control: without the fake devices, this machine has no device."""
    with pytest.raises(loadstone.PlanError, match="this device") as caught:
        loadstone.load(skeleton(), saved(tmp_path), device_map="cuda:0")
    assert caught.value.code == "plan.device_map"


MEASURED = """
import sys
import pytest, torch
sys.path.insert(0, {tests!r})
from fake_devices import FakeDevices
import loadstone

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

fake = FakeDevices(pytest.MonkeyPatch())
with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, bias=False) for _ in range(8)])
model.to(getattr(torch, {dtype!r}))
loadstone.load(torch.nn.Linear(1, 1, bias=False, device="meta"), {small!r}, device_map={device!r})
plan = loadstone.plan(model, {path!r}, device_map={device!r}, threads=2)
before = peak()
plan.execute(model=model)
values = sum(each.nbytes for each in model.parameters())
print(peak() - before - values, plan.peak_bytes["cpu"], values)
fake.require_clean()
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file of 256 MB, and a small file."""
    folder = tmp_path_factory.mktemp("large")
    state = {f"{i}.weight": torch.ones(4096, 4096, dtype=torch.bfloat16) for i in range(8)}
    loadstone.torch.save_file(state, folder / "model.safetensors")
    loadstone.torch.save_file({"weight": torch.ones(1, 1)}, folder / "small.safetensors")
    return folder


@pytest.mark.parametrize(
    ("device", "dtype"),
    [*itertools.product(DEVICES, ["bfloat16", "float32"]), ("cpu", "bfloat16")],
)
def test_no_second_copy_is_held_on_the_host(device: str, dtype: str, large: Path) -> None:
    """Fake devices use this process's memory, which the measurement subtracts."""
    path, small = large / "model.safetensors", large / "small.safetensors"
    tests = str(Path(__file__).parents[1] / "support")
    program = MEASURED.format(
        tests=tests, path=str(path), small=str(small), device=device, dtype=dtype
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    beyond, promised, values = map(int, done.stdout.split())
    print(f"{device} {dtype}: {beyond / 1e6:.1f} MB beyond {values / 1e6:.0f} MB")
    if device == "cpu":  # control: the peak of a plan for the host includes the values
        assert promised >= values
    else:
        assert beyond <= promised + (4 << 20) and promised < values // 3
