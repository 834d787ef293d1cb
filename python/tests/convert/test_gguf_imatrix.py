"""Mixes, with and without importance matrices, against digests of llama-quantize's output for a
small model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import imatrix_files
import llama_cpp_oracle as oracle
import llama_quantize
import numpy as np
import pytest
from budget_files import MIB, Stored, write_tensors
from command import COMMAND, run

import loadstone

GOLDEN: dict[str, dict[str, str]] = json.loads(llama_quantize.GOLDEN.read_text())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_quantize.write_small(tmp_path_factory.mktemp("small") / "small.safetensors")


@pytest.fixture(scope="module")
def imatrix(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | None]:
    folder = tmp_path_factory.mktemp("imatrix")
    entries = imatrix_files.measured(llama_quantize.shapes())
    files = {
        kind: write(folder / f"imatrix.{kind}", entries)
        for kind, write in imatrix_files.WRITERS.items()
    }
    return files | {"None": None}


@pytest.mark.parametrize("kind", GOLDEN)
def test_every_mix_is_that_of_llama_quantize(
    small: Path, imatrix: dict[str, Path | None], kind: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.gguf"
    found = {}
    for mix in GOLDEN[kind]:
        try:
            loadstone.convert(
                small, out, metadata=llama_quantize.METADATA, quantize=mix, imatrix=imatrix[kind]
            )
        except loadstone.Error as error:
            assert error.code == "convert.importance"
            found[mix] = "refused"
        else:
            found[mix] = llama_quantize.digest(out)
    assert found == GOLDEN[kind]


def test_all_doors_write_the_same_file(
    small: Path, imatrix: dict[str, Path | None], tmp_path: Path
) -> None:
    """Python, the command and a merge write equal bytes, for any number of threads."""
    keys = llama_quantize.write_keys(tmp_path / "keys.json", llama_quantize.METADATA)
    options: dict[str, Any] = {"quantize": "q4_k_m", "imatrix": imatrix["gguf"]}
    loadstone.convert(small, tmp_path / "call.gguf", metadata=keys, **options)
    expected = (tmp_path / "call.gguf").read_bytes()
    given = ["--metadata", keys, "--quantize", "q4_k_m", "--imatrix", imatrix["gguf"]]
    done = run("convert", small, tmp_path / "command.gguf", *given)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "command.gguf").read_bytes() == expected
    loadstone.merge([(small, 0.5), (small, 0.5)], tmp_path / "m.gguf", metadata=keys, **options)
    done = run("merge", f"{small}:0.5", f"{small}:0.5", "-o", tmp_path / "merged.gguf", *given)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "merged.gguf").read_bytes() == expected
    for threads in (1, 3):
        loadstone.convert(small, tmp_path / "t.gguf", metadata=keys, threads=threads, **options)
        assert (tmp_path / "t.gguf").read_bytes() == expected


def test_what_does_not_fit_is_refused(
    small: Path, imatrix: dict[str, Path | None], tmp_path: Path
) -> None:
    out = tmp_path / "out.gguf"
    sums, counts = np.ones((1, 255), np.float32), np.ones(1, np.float32)
    entries = {"blk.0.attn_q.weight": (sums, counts), "other": (sums, counts)}
    for write in imatrix_files.WRITERS.values():
        bad = write(tmp_path / "bad", entries)
        with pytest.raises(loadstone.Error, match="255 numbers, but the tensor has 256 columns"):
            loadstone.convert(
                small, out, metadata=llama_quantize.METADATA, quantize="q4_k_m", imatrix=bad
            )
        whole = bad.read_bytes()
        bad.write_bytes(whole[:-100])
        with pytest.raises(loadstone.FormatError, match="bad"):
            loadstone.convert(
                small, out, metadata=llama_quantize.METADATA, quantize="q4_k_m", imatrix=bad
            )
    good = imatrix["dat"]
    with pytest.raises(loadstone.Error, match="imatrix"):
        loadstone.convert(small, tmp_path / "out", quantize="nf4", imatrix=good)
    for arguments in (["--imatrix", good], ["--quantize", "nf4", "--imatrix", good]):
        done = run("convert", small, tmp_path / "out", *arguments)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert "--imatrix" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["bad"]


def test_one_pass_is_small_and_writes_one_file(tmp_path: Path) -> None:
    """Convert a model larger than the memory limit, without a temporary file."""
    tensors: Stored = {
        "token_embd.weight": ("BF16", [32_000, 2048], None),
        "output.weight": ("BF16", [32_000, 2048], None),
        "blk.0.ffn_down.weight": ("BF16", [2048, 16_384], None),
    }
    checkpoint = write_tensors(tensors, tmp_path / "model")
    assert checkpoint.stat().st_size > 300 * MIB
    out, temporary = tmp_path / "out.gguf", tmp_path / "temporary"
    temporary.mkdir()
    keys = llama_quantize.write_keys(tmp_path / "keys.json", llama_quantize.METADATA)
    given = ["convert", checkpoint, out, "--metadata", keys, "--quantize", "q4_k_m", "--json"]

    def converted(file_bytes_max: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["prlimit", f"--fsize={file_bytes_max}", COMMAND, *map(str, given)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"TMPDIR": str(temporary)},
        )

    planned = json.loads(run(*given, "--dry-run").stdout)["bytes_to_write"]
    assert planned < checkpoint.stat().st_size / 2
    assert converted(planned - 1).returncode != 0  # control
    done = converted(planned)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["process"]["resident_bytes_peak"] < 256 * MIB
    assert document["bytes_written"] == planned == out.stat().st_size
    assert {each.tensor_type.name for each in oracle.read(out).tensors} == {"Q4_K", "Q6_K"}
    assert not list(temporary.iterdir())
