"""vLLM's load format without vLLM: options, the stream of tensors, and who wrote what.

``serving/test_serving.py`` runs vLLM itself, where it is installed (``make test-vllm``).
"""

from __future__ import annotations

import gc
import importlib.metadata
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_files import CODECS

import loadstone.vllm
from loadstone._sites.vllm import SITES
from loadstone._vllm.options import Options
from loadstone._vllm.stream import Stream
from loadstone._vllm.written import Hole, Writes

# --- the plugin -----------------------------------------------------------------------------------


def test_a_vllm_that_is_not_known_goes_on_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would start no server else, whatever format is asked for."""
    other = types.ModuleType("vllm")
    other.__version__ = "99.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", other)
    SITES.forget()
    try:
        loadstone.vllm.register()
    finally:
        SITES.forget()
    assert "unsupported version of vllm" in caplog.text and "99.0" in caplog.text


def test_vllm_finds_the_plugin() -> None:
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="loadstone")
    assert [each.load() for each in found] == [loadstone.vllm.register]


# --- options --------------------------------------------------------------------------------------


def test_options_are_read() -> None:
    assert Options.of({}) == Options()
    given = {"threads": 3, "staging_bytes_max": "16MiB", "dequantize": True}
    assert Options.of(given) == Options(3, 16 << 20, True)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"thread": 3}, "'thread'"),
        ({"threads": 0}, "0"),
        ({"threads": True}, "True"),
        ({"threads": "many"}, "'many'"),
        ({"staging_bytes_max": 0}, "0"),
        ({"staging_bytes_max": "much"}, "'much'"),
        ({"dequantize": "yes"}, "'yes'"),
        ({"dequantize": 1}, "1"),
        ({"missing": "ignore"}, "'ignore'"),
        (["threads"], "list"),
    ],
)
def test_other_options_are_refused(given: Any, found: str) -> None:
    with pytest.raises(loadstone.PlanError) as caught:
        Options.of(given)
    assert (caught.value.code, caught.value.found) == ("plan.options", found)


# --- the stream -----------------------------------------------------------------------------------


def stream(path: Path, **options: Any) -> Stream:
    return Stream(loadstone.inspect(path), Options(**options), "BF16")


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    kinds = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    both = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found, expected)]
    return kinds and torch.equal(*both)


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("dequantize", [False, True])
def test_every_codec_comes_as_it_is_or_as_numbers(
    codec: str, dequantize: bool, tmp_path: Path
) -> None:
    written = CODECS[codec](tmp_path)
    for staging in (4096, 64 << 20):
        found = dict(stream(written.path, dequantize=dequantize, staging_bytes_max=staging))
        opened = loadstone.open(written.path)
        if dequantize:
            assert found.keys() == set(opened)
            for name, tensor in found.items():
                dtype = torch.bfloat16 if name in written.quantized else tensor.dtype
                assert tensor.dtype == dtype
                assert same(tensor, opened.get(name, dtype=dtype)), name
        else:
            assert found.keys() == set(loadstone.inspect(written.path).tensors)


def saved(path: Path, count: int, numel: int) -> Path:
    state = {f"t{i}": torch.full((numel,), i, dtype=torch.int32) for i in range(count)}
    loadstone.torch.save_file(state, path / "model.safetensors")
    return path / "model.safetensors"


def test_who_keeps_all_has_all(tmp_path: Path) -> None:
    """No memory is used twice: a model may collect the stream before it looks at it."""
    kept = list(stream(saved(tmp_path, 50, 1000), staging_bytes_max=16384))
    assert {name for name, _ in kept} == {f"t{i}" for i in range(50)}
    assert all((tensor == int(name[1:])).all() for name, tensor in kept)


def test_who_stops_early_leaves_nothing_behind(tmp_path: Path) -> None:
    tensors = iter(stream(saved(tmp_path, 50, 1000), staging_bytes_max=16384))
    assert next(tensors)[0] == "t0"
    tensors.close()  # type: ignore[attr-defined]
    gc.collect()


def test_what_is_not_wanted_is_not_read(tmp_path: Path) -> None:
    path = saved(tmp_path, 50, 1000)
    wanted = Stream(loadstone.inspect(path), Options(), "BF16", lambda name: name == "t7")
    assert [name for name, _ in wanted] == ["t7"] and wanted.bytes_read == 4000
    nothing = Stream(loadstone.inspect(path), Options(), "BF16", lambda name: False)
    assert list(nothing) == []


MEASURED = """
import sys, torch, loadstone
from loadstone._vllm.options import Options
from loadstone._vllm.stream import Stream

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

catalog = loadstone.inspect(sys.argv[1])
before, kept = peak(), []
for name, tensor in Stream(catalog, Options(), "BF16"):
    if sys.argv[2] == "keeps":
        kept.append(tensor)
print(peak() - before)
"""


@pytest.mark.parametrize("way", ["drops", "keeps"])
def test_memory_is_bounded(way: str, tmp_path: Path) -> None:
    """400 MB by 64 MiB; the control keeps them."""
    path = saved(tmp_path, 40, 2_500_000)
    command = [sys.executable, "-c", MEASURED, str(path), way]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(f"{way}: {int(done.stdout) / 1e6:.0f} MB")
    assert (int(done.stdout) <= 72 << 20) == (way == "drops")


# --- who wrote what -------------------------------------------------------------------------------


def test_all_that_is_written_is_seen() -> None:
    whole, rows, columns, turned = (torch.empty(6, 8) for _ in range(4))
    with Writes() as writes:
        whole.data.copy_(torch.ones(6, 8))
        rows.data[:4].copy_(torch.ones(4, 8))
        rows.data[4:].fill_(0)
        for half in columns.data.chunk(2, dim=1):
            half.copy_(torch.ones(6, 4))
        turned.data.t().copy_(torch.ones(8, 6))
    assert [writes.hole(each) for each in (whole, rows, columns, turned)] == [None] * 4


def test_what_is_left_is_seen() -> None:
    nothing, rows, columns = torch.empty(6, 8), torch.empty(6, 8), torch.empty(6, 8)
    stack, scalar, empty = torch.empty(4, 3, 5), torch.empty(()), torch.empty(0, 3)
    with Writes() as writes:
        rows.data[:5].copy_(torch.ones(5, 8))
        columns.data.narrow(1, 0, 7).copy_(torch.ones(6, 7))
        for expert in (0, 1, 3):
            stack.data[expert].copy_(torch.ones(3, 5))
        torch.ones(9)  # elsewhere
    assert writes.hole(nothing) == Hole((0, 0), 48)
    assert writes.hole(rows) == Hole((5, 0), 8)
    assert writes.hole(columns) == Hole((0, 7), 6)
    assert writes.hole(stack) == Hole((2, 0, 0), 15)
    assert writes.hole(scalar) == Hole((), 1)
    assert writes.hole(empty) is None
    assert writes.hole(rows[:5]) is None and writes.hole(columns[:, 2:7]) is None


def test_what_a_model_keeps_counts_by_its_values() -> None:
    """Parameters that are replaced: by results of operations, by lists of them, by nothing."""
    first, second, third, fourth = (torch.nn.Parameter(torch.empty(4, 6)) for _ in range(4))
    with Writes() as writes:
        first.data = torch.ones(6, 4, dtype=torch.float64).t().to(torch.float32)
        second.data = torch.cat([torch.ones(2, 6), torch.zeros(2, 6)])
        third.data = torch.empty(4, 6)
        third.data.narrow(0, 0, 4)  # a look is no write
        torch._foreach_copy_([fourth.data[:1], fourth.data[1:]], [torch.ones(1, 6)] * 2)
    assert [writes.hole(each) for each in (first, second, fourth)] == [None] * 3
    assert writes.hole(third) == Hole((0, 0), 24)


def test_memory_that_is_used_again_begins_anew() -> None:
    with Writes() as writes:
        written = [torch.ones(300, 500) for _ in range(20)]
        places = {each.data_ptr() for each in written}
        assert [writes.hole(each) for each in written] == [None] * 20
        written.clear()
        blanks = [torch.empty(300, 500) for _ in range(20)]
    assert places & {each.data_ptr() for each in blanks}
    assert {writes.hole(each) for each in blanks} == {Hole((0, 0), 150_000)}


def test_random_writes_are_counted() -> None:
    """Against a mask of the elements."""
    random = torch.Generator().manual_seed(5)

    def below(bound: int) -> int:
        return int(torch.randint(bound, (), generator=random))

    for _ in range(300):
        shape = [1 + below(5) for _ in range(1 + below(4))]
        tensor, mask = torch.empty(shape), torch.zeros(shape, dtype=torch.bool)
        order = torch.randperm(len(shape), generator=random).tolist()
        tensor = tensor.permute(order)
        mask = mask.permute(order)
        with Writes() as writes:
            for _ in range(below(4)):
                box = [slice(begin := below(n), begin + 1 + below(n), 1 + below(2))
                       for n in tensor.shape]  # fmt: skip
                tensor.data[tuple(box)].fill_(1)
                mask[tuple(box)] = True
        hole, left = writes.hole(tensor), int((~mask).sum())
        assert (hole is None) == (left == 0)
        if hole is not None:
            assert hole.count == left and not mask[hole.index]
