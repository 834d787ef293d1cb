"""A conversion with page_cache="release" leaves the system's page cache unchanged."""

from __future__ import annotations

import ctypes
import json
import mmap
import subprocess
from pathlib import Path

import pytest
import torch
from command import COMMAND
from page_cache import drop
from safetensors.torch import load_file, save_file

import loadstone

ROWS = 4 << 10  # 4 KB per row, so 16 MB per tensor


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write two shards whose pages are not in the cache."""
    folder = tmp_path / "model"
    folder.mkdir()
    for shard in (1, 2):
        path = folder / f"model-{shard:05d}-of-00002.safetensors"
        save_file({f"{shard}.{i}": torch.randn(ROWS, 1024) for i in range(2)}, path)
        drop(path)
    if cached(folder) > 0.05:
        pytest.skip("this file system keeps its pages")
    return folder


def files(place: Path) -> list[Path]:
    return sorted(place.glob("*.safetensors")) if place.is_dir() else [place]


def cached(place: Path) -> float:
    """Return the fraction of the files' pages that are in the cache."""
    pages = found = 0
    for path in files(place):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
            count = -(-len(view) // mmap.PAGESIZE)
            resident = (ctypes.c_ubyte * count)()
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
            assert libc.mincore(address, len(view), resident) == 0
            pages += count
            found += sum(page & 1 for page in resident)
    return found / pages


def same(source: Path, target: Path) -> bool:
    return all(
        torch.equal(tensor, numbers[name].bfloat16())
        for path in files(source)
        if (numbers := load_file(path))
        for name, tensor in load_file(target).items()
        if name in numbers
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_pages_are_released(source: Path, tmp_path: Path, threads: int) -> None:
    target = tmp_path / "out.safetensors"
    report = loadstone.convert(
        source, target, dtype="bfloat16", page_cache="release", threads=threads
    )
    assert report.page_cache == "release"
    assert cached(source) < 0.05 and cached(target) < 0.05
    assert same(source, target)


def test_control_they_stay(source: Path, tmp_path: Path) -> None:
    report = loadstone.convert(source, tmp_path / "out.safetensors", page_cache="keep")
    assert report.page_cache == "keep"
    assert cached(source) > 0.95 and cached(tmp_path / "out.safetensors") > 0.95


def test_what_fits_the_machine_stays(source: Path, tmp_path: Path) -> None:
    report = loadstone.convert(source, tmp_path / "out.safetensors")
    assert report.page_cache == "keep"
    assert cached(source) > 0.95


def test_a_source_that_somebody_has_cached_stays(source: Path, tmp_path: Path) -> None:
    theirs, ours = files(source)
    theirs.read_bytes()
    loadstone.convert(source, tmp_path / "out", page_cache="release", shard_size="20MB")
    assert cached(theirs) > 0.95
    assert cached(ours) < 0.05
    assert cached(tmp_path / "out") < 0.05


def test_quantized_and_merged(source: Path, tmp_path: Path) -> None:
    loadstone.convert(source, tmp_path / "q.gguf", page_cache="release", quantize={"": "q8_0"},
                      include=".", metadata={"general.architecture": "x"})  # fmt: skip
    assert cached(source) < 0.05 and cached(tmp_path / "q.gguf") < 0.05
    loadstone.merge([source, source], tmp_path / "sum.safetensors", page_cache="release")
    assert cached(source) < 0.05 and cached(tmp_path / "sum.safetensors") < 0.05


def test_the_command(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    words = [COMMAND, "convert", source, target, "--page-cache", "release", "--json"]
    said = subprocess.run(words, capture_output=True, check=True).stdout
    assert json.loads(said)["page_cache"] == "release"
    assert cached(source) < 0.05 and cached(target) < 0.05


def test_another_word_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(loadstone.Error, match="this is not a choice for the page cache") as caught:
        loadstone.convert(source, tmp_path / "out.safetensors", page_cache="drop")
    assert caught.value.code == "plan.options"
