"""Loads to a real GPU through its driver: the same bytes as on the host.

pytest skips these tests unless torch finds an NVIDIA GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_files import CODECS
from compare import same
from gpu_marks import MARKS
from quantize_targets import quantizing

import loadstone
from loadstone import Quantization
from loadstone._execute import execute
from loadstone._execute.model_check import planned_slots
from loadstone._plan.planning import make_plan

pytestmark = MARKS


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        torch.cuda.empty_cache()


class Model(torch.nn.Module):
    """Matrices of several windows, and vectors that are copied together."""

    def __init__(self, width: int = 1024, count: int = 6) -> None:
        super().__init__()
        layers = [torch.nn.Linear(width, 2 * width) for _ in range(count)]
        self.layers = torch.nn.ModuleList(layers)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(50))
        self.scale = torch.nn.Parameter(torch.zeros(()))


def skeleton(**options: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return Model(**options)


def saved(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(7)
    state = {name: torch.randn_like(each).to(dtype) for name, each in Model().state_dict().items()}
    loadstone.torch.save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors"


def require_same(found: torch.nn.Module, expected: torch.nn.Module, device: str) -> None:
    states = found.state_dict(), expected.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, each in states[1].items():
        assert str(states[0][name].device) == device, name
        assert same(states[0][name].cpu(), each), name


@pytest.mark.parametrize("dtype", [None, "float32", "float16"], ids=["as it is", "f32", "f16"])
@pytest.mark.parametrize("staging", [256 << 10, 64 << 20])
def test_plain_and_cast(dtype: str | None, staging: int, tmp_path: Path) -> None:
    path = saved(tmp_path)
    plain, model = skeleton(), skeleton()
    options: dict[str, Any] = {"dtype": dtype, "receipt": "xxh3-128"}
    host = loadstone.load(plain, path, **options)
    report = loadstone.load(model, path, device_map="cuda:0", staging_bytes_max=staging, **options)
    require_same(model, plain, "cuda:0")
    assert host.receipt is not None and report.receipt is not None
    assert report.receipt.targets == host.receipt.targets  # digests of bytes read from the GPU


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_every_codec_is_decoded(codec: str, tmp_path: Path) -> None:
    path = CODECS[codec](tmp_path).path
    expected, found = loadstone.load_file(path), loadstone.load_file(path, "cuda:0")
    assert expected.keys() == found.keys() and expected
    for name, each in expected.items():
        assert found[name].is_cuda or not each.numel()
        assert same(found[name].cpu(), each), name


def test_many_small_tensors(tmp_path: Path) -> None:
    """The driver copies in batches; some targets are neighbours in one allocation, some are not."""
    sizes = (1, 3, 64, 128, 1000)
    state = {f"{i}": torch.randn(sizes[i % len(sizes)]) for i in range(20_000)}
    loadstone.torch.save_file(state, tmp_path / "model.safetensors")
    model = torch.nn.ParameterDict(
        {
            name: torch.nn.Parameter(torch.empty_like(each, device="meta"))
            for name, each in state.items()
        }
    )
    report = loadstone.load(model, tmp_path / "model.safetensors", device_map="cuda:0")
    print(f"20,000 small tensors: {report.seconds:.3f} s")
    assert all(same(model[name].detach().cpu(), each) for name, each in state.items())


def parts(path: Path, device: str, dialect: str, nested: bool) -> list[Any]:
    wanted = Quantization("nf4", dialect=dialect, nested=nested)
    recipes = quantizing((f"layers.{i}.weight" for i in range(6)), wanted)
    plan = make_plan(skeleton(), loadstone.inspect(path), recipes, device_map=device)
    slots = planned_slots(plan, skeleton())
    values = execute.read_values(plan, slots, execute.ExecuteOptions()).values
    return [each for each in values if isinstance(each, execute.ComponentTensors)]


@pytest.mark.parametrize("nested", [False, True])
def test_quantized_to_nf4_on_the_way(nested: bool, tmp_path: Path) -> None:
    path = saved(tmp_path)
    found, expected = parts(path, "cuda:0", "", nested), parts(path, "cpu", "bnb-cuda", nested)
    assert len(found) == len(expected) == 6
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(same(one[name].cpu(), other[name]) for name in other)


def test_nf4_has_the_bytes_that_bitsandbytes_makes_there(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    path = saved(tmp_path)
    weights = loadstone.load_file(path)
    for index, found in enumerate(parts(path, "cuda:0", "", False)):
        weight = weights[f"layers.{index}.weight"].cuda()
        data, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        held = {name: value.cpu().reshape(-1) for name, value in found.items()}
        wanted = [data.cpu().reshape(-1), state.absmax.cpu().reshape(-1)]
        for each in wanted:
            assert any(same(value, each) for value in held.values()), index


def test_cuda_is_the_current_device(tmp_path: Path) -> None:
    path, last = saved(tmp_path), torch.cuda.device_count() - 1
    torch.cuda.set_device(last)
    plain, model = skeleton(), skeleton()
    loadstone.load(plain, path)
    loadstone.load(model, path, device_map="cuda")
    require_same(model, plain, f"cuda:{last}")


def test_into_a_model_in_use(tmp_path: Path) -> None:
    """The load waits for work on the GPU, and addresses do not change."""
    path = saved(tmp_path)
    plain, model = skeleton(), Model().to("cuda:0", torch.float32)
    loadstone.load(plain, path)
    plan = loadstone.plan(skeleton(), path, device_map="cuda:0")
    addresses = [each.data_ptr() for each in model.parameters()]
    work = torch.ones(4096, 4096, device="cuda:0")
    for _ in range(20):
        work = work @ work / 4096
        model.layers[0].weight.data.add_(work[:2048, :1024])
    plan.execute(into=model)
    assert [each.data_ptr() for each in model.parameters()] == addresses
    require_same(model, plain, "cuda:0")


def test_without_memory_the_model_stays_as_it_was(tmp_path: Path) -> None:
    path, model = saved(tmp_path), skeleton()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-5)
    try:
        with pytest.raises(loadstone.LoadError) as caught:
            loadstone.load(model, path, device_map="cuda:0")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert caught.value.code == "memory.device"
    assert caught.value.tensor in dict(model.named_parameters())
    assert all(each.is_meta for each in model.parameters())
    loadstone.load(model, path, device_map="cuda:0")  # control
    assert not any(each.is_meta for each in model.parameters())


def test_speed_beside_that_of_pinned_memory(tmp_path: Path) -> None:
    """Print the ratio of two speeds, for a file in the page cache."""
    nbytes, count = 64 << 20, 16
    state = {
        f"{i}.weight": torch.ones(4096, nbytes // 8192, dtype=torch.bfloat16) for i in range(count)
    }
    loadstone.torch.save_file(state, tmp_path / "model.safetensors")
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
    rates: dict[str, list[float]] = {"loadstone": [], "pinned": []}
    for _ in range(5):
        with torch.device("meta"):
            layers = [torch.nn.Linear(nbytes // 8192, 4096, bias=False) for _ in range(count)]
        model = torch.nn.Sequential(*layers).to(torch.bfloat16)
        begin = time.perf_counter()
        loadstone.load(model, tmp_path / "model.safetensors", device_map="cuda:0")
        rates["loadstone"].append(count * nbytes / (time.perf_counter() - begin))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            there.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        rates["pinned"].append(count * nbytes / (time.perf_counter() - begin))
        assert all(same(model[i].weight.detach().cpu(), state[f"{i}.weight"]) for i in range(count))
        del model
    ours, limit = max(rates["loadstone"]), max(rates["pinned"])
    print(f"{ours / 1e9:.1f} GB/s, {ours / limit:.0%} of {limit / 1e9:.1f} GB/s from pinned memory")
