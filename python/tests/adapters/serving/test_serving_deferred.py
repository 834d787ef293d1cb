"""Tests that code which gets deferred tensors has the same results as with real tensors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_files import CODECS
from compare import same

import loadstone
from loadstone._adapters.serving.deferred import (
    DeferredCheckpoint,
    DeferredTensor,
    PendingCopies,
    materialize,
)
from loadstone._adapters.serving.options import Options
from loadstone._adapters.serving.write_tracking import WriteTracker


class Load:
    """Runs a model's own loading code on a checkpoint, and records reads and writes."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.copies = PendingCopies()
        given = Options(**options)
        noted = self.copies if given.deferred else None
        self.named = "stored" if given.deferred else "tensors"
        self.checkpoint = DeferredCheckpoint(loadstone.inspect(path), given, "BF16", noted)
        self.writes = WriteTracker(self.copies.before_operation)

    def run(self, code: Callable[[dict[str, torch.Tensor]], None]) -> None:
        with self.writes:
            code(dict(getattr(self.checkpoint, self.named)()))
        self.copies.flush()


def saved(folder: Path, **state: torch.Tensor) -> Path:
    path = folder / "model.safetensors"
    loadstone.torch.save_file(state, path)
    return path


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("staging", [4096, 64 << 20])
def test_every_codec_comes_as_it_is_or_as_numbers(
    codec: str, dequantize: bool, staging: int, tmp_path: Path
) -> None:
    written = CODECS[codec](tmp_path)
    load = Load(written.path, dequantize=dequantize, staging_bytes_max=staging)
    found: dict[str, torch.Tensor] = {}

    def take(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            found[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            found[name].copy_(tensor)

    load.run(take)
    is_gguf = written.path.suffix == ".gguf"
    decoded = loadstone.open(written.path)
    stored = loadstone.torch.load_file(written.path)
    assert found.keys() == (decoded.keys() if dequantize else stored.keys())
    for name, tensor in found.items():
        # GGUF blocks stay F32, because transformers computes with some of the tensors.
        if is_gguf or not dequantize:
            assert same(tensor, stored[name]), name
        else:
            dtype = torch.bfloat16 if name in written.quantized else tensor.dtype
            assert same(tensor, decoded.get(name, dtype=dtype)), name


def test_numbers_of_four_bits_come_in_pairs(tmp_path: Path) -> None:
    codes = torch.arange(64, dtype=torch.uint8).reshape(4, 16)
    pairs = codes.view(torch.float4_e2m1fn_x2)
    path = saved(tmp_path, w=pairs)
    load = Load(path)
    place = torch.zeros_like(codes).view(torch.float4_e2m1fn_x2)
    load.run(lambda tensors: place.view(torch.uint8).copy_(tensors["w"].view(torch.uint8)))
    assert same(place, pairs)


# --- use of deferred tensors ----------------------------------------------------------------------


def test_a_rank_reads_its_share(tmp_path: Path) -> None:
    """A rank may copy rows, columns, or fused parts of a tensor."""
    weight = torch.randn(512, 256)
    path = saved(tmp_path, weight=weight, other=torch.randn(512, 256))
    rows, columns, fused = torch.empty(128, 256), torch.empty(512, 64), torch.empty(256, 256)
    load = Load(path)

    def take(tensors: dict[str, torch.Tensor]) -> None:
        rows.copy_(tensors["weight"].narrow(0, 128, 128))
        fused.data[:128].copy_(tensors["weight"].chunk(4, 0)[3])
        fused.data[128:].copy_(tensors["weight"][:128])

    load.run(take)
    assert same(rows, weight[128:256]) and same(fused, torch.cat([weight[384:], weight[:128]]))
    assert load.checkpoint.bytes_read == 3 * 128 * 256 * 4
    load = Load(path)
    load.run(lambda tensors: columns.copy_(tensors["weight"][:, 64:128]))
    assert same(columns, weight[:, 64:128].contiguous())
    assert load.checkpoint.bytes_read <= weight.nbytes


def test_nothing_is_read_before_the_end(tmp_path: Path) -> None:
    path = saved(tmp_path, weight=torch.randn(64, 64, dtype=torch.float64))
    load = Load(path)
    place = torch.zeros(64, 64, dtype=torch.bfloat16)
    with load.writes:
        for _, tensor in load.checkpoint.tensors():
            place.copy_(tensor.t().contiguous())
    assert load.writes.unwritten(place) is None
    assert load.checkpoint.bytes_read == 0 and not place.any()
    load.copies.flush()
    assert place.any() and load.checkpoint.bytes_read == 64 * 64 * 8


def test_who_looks_sees_values(tmp_path: Path) -> None:
    weight = torch.randn(16, 8)
    path = saved(tmp_path, weight=weight, scale=torch.tensor(3.0), ids=torch.arange(5))
    place, other = torch.zeros(16, 8), torch.zeros(16, 8)
    seen: list[Any] = []

    def take(tensors: dict[str, torch.Tensor]) -> None:
        # Scalars are real tensors, because code reads them at once.
        assert not isinstance(tensors["scale"], DeferredTensor)
        seen.append(tensors["scale"].item())
        seen.append(tensors["ids"].tolist())
        seen.append(bool((tensors["weight"] == weight).all()))
        place.copy_(tensors["weight"])
        seen.append(bool((place == weight).all()))  # the pending copy must run before the read
        other.copy_(tensors["weight"] * 2 + weight)

    Load(path).run(take)
    assert seen == [3.0, [0, 1, 2, 3, 4], True, True]
    assert same(other, weight * 2 + weight) and same(place, weight)


def test_the_last_write_counts(tmp_path: Path) -> None:
    """Copies and other writes overwrite earlier copies, wholly or in part."""
    first, second = torch.randn(8, 8), torch.randn(8, 8)
    path = saved(tmp_path, first=first, second=second)
    whole, part, filled, transposed = (torch.zeros(8, 8) for _ in range(4))

    def take(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("first", "second"):
            whole.copy_(tensors[name])
        part.copy_(tensors["first"])
        part.data[2:5].copy_(tensors["second"][:3])
        part.data[3:4].copy_(tensors["first"][7:])
        filled.copy_(tensors["first"])
        filled.data[1].fill_(7)
        transposed.copy_(tensors["first"])
        transposed.t().data[:, 2:4].copy_(tensors["second"][:, :2])  # not a contiguous row

    Load(path).run(take)
    assert same(whole, second)
    expected = first.clone()
    expected[2:5] = second[:3]
    expected[3] = first[7]
    assert same(part, expected)
    expected = first.clone()
    expected[1] = 7
    assert same(filled, expected)
    expected = first.clone()
    expected[2:4] = second[:, :2].t()
    assert same(transposed, expected)


def test_changes_where_they_stand_are_refused_by_name(tmp_path: Path) -> None:
    weight = torch.randn(8, 8)
    path = saved(tmp_path, weight=weight)
    place = torch.zeros(8, 8)

    def take(tensors: dict[str, torch.Tensor]) -> None:
        tensors["weight"][2:4].mul_(2)
        place.copy_(tensors["weight"])

    with pytest.raises(loadstone.PlanError, match="deferred") as caught:
        Load(path).run(take)
    assert caught.value.code == "plan.untraceable" and caught.value.tensor == "weight"
    Load(path, deferred=False).run(take)
    expected = weight.clone()
    expected[2:4] *= 2
    assert same(place, expected)


def test_what_a_model_keeps_gets_values(tmp_path: Path) -> None:
    weight, bias = torch.randn(8, 8), torch.randn(8)
    path = saved(tmp_path, weight=weight, bias=bias)
    model = torch.nn.Linear(8, 8)
    load = Load(path)

    def take(tensors: dict[str, torch.Tensor]) -> None:
        model.weight = torch.nn.Parameter(tensors["weight"].t(), requires_grad=False)
        model.register_buffer("kept", tensors["bias"][:4])
        materialize(model, load.writes.note)
        assert load.writes.unwritten(model.weight) is None

    load.run(take)
    assert type(model.weight) is torch.nn.Parameter and same(model.weight, weight.t().contiguous())
    assert same(model.get_buffer("kept"), bias[:4])


STEPS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t.t() if t.dim() == 2 else t,
    lambda t: t.reshape(-1),
    lambda t: t.reshape(2, -1) if t.numel() % 2 == 0 else t,
    lambda t: t.unsqueeze(0),
    lambda t: t.flip(0),
    lambda t: t.chunk(2, 0)[-1],
    lambda t: t.narrow(-1, t.shape[-1] // 3, max(t.shape[-1] // 2, 1)),
    lambda t: t[::2],
    lambda t: torch.cat([t, t], -1),
    lambda t: torch.stack([t, t.flip(-1)]),
    lambda t: t.to(torch.float64),
    lambda t: t.to(torch.float16),
    lambda t: t.clone(),
    lambda t: t * 2,
    lambda t: t - t.max(),
    lambda t: t.sort(-1).values,
    lambda t: t.permute(*reversed(range(t.dim()))),
    lambda t: t.unbind(0)[0] if t.dim() > 1 else t,
    lambda t: t.reshape(-1).contiguous().view(torch.uint8),
]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_code_does_is_as_with_real_tensors(seed: int, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(seed)

    def below(bound: int) -> int:
        return int(torch.randint(bound, (), generator=random))

    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    state = {
        f"t{i}": torch.randn(2 + below(9), 2 + below(9), generator=random).to(dtypes[below(3)])
        for i in range(6)
    }
    path = saved(tmp_path, **state)
    chains = [[STEPS[below(len(STEPS))] for _ in range(below(6))] for _ in range(30)]
    sources = [f"t{below(6)}" for _ in chains]
    kinds = [below(4) for _ in chains]

    def made(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        places = []
        for chain, source, kind in zip(chains, sources, kinds, strict=True):
            tensor = tensors[source]
            for step in chain:
                tensor = step(tensor)
            dtype = torch.bfloat16 if kind == 1 else tensor.dtype
            place = (
                torch.zeros((*tensor.shape, 2), dtype=dtype)
                if kind == 2
                else torch.zeros(tensor.shape, dtype=dtype)
            )
            view = place[..., 1] if kind == 2 else place  # kind 2: only every other element
            view.copy_(tensor)
            places.append(place)
        return places

    expected = made(state)
    found: list[torch.Tensor] = []
    Load(path).run(lambda tensors: found.extend(made(tensors)))
    assert [same(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(chains)


# --- memory ---------------------------------------------------------------------------------------

MEASURED = """
import sys, torch, loadstone
from loadstone._adapters.serving.deferred import PendingCopies, DeferredCheckpoint
from loadstone._adapters.serving.options import Options

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

catalog = loadstone.inspect(sys.argv[1])
copies = PendingCopies()
warm = torch.zeros(1 << 20).to(torch.bfloat16)
before, made, total = peak(), [], 0
noted = copies if sys.argv[2] == "late" else None
for name, tensor in DeferredCheckpoint(catalog, Options(), "BF16", noted).tensors():
    made.append(torch.empty(tensor.shape, dtype=torch.bfloat16))
    made[-1].copy_(tensor)
    total += made[-1].nbytes
copies.flush()
print(peak() - before - total)
"""


@pytest.mark.parametrize("way", ["late", "at once"])
def test_memory_is_the_model_and_what_is_on_its_way(way: str, tmp_path: Path) -> None:
    """Load 200 MB of F32 as BF16; a limit of 72 MiB leaves room for a few whole tensors."""
    state = {f"t{i}": torch.full((2_500_000,), i, dtype=torch.float32) for i in range(20)}
    path = saved(tmp_path, **state)
    command = [sys.executable, "-c", MEASURED, str(path), way]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(f"{way}: {int(done.stdout) / 1e6:.0f} MB in addition to the model")
    assert int(done.stdout) <= 72 << 20
