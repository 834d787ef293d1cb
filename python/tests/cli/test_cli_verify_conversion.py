"""`loadstone verify A B` with a conversion's options compares B with the conversion's output."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

RULES = [
    {"op": "rename", "sources": [r"^layers\.(\d+)\.up$"], "targets": ["blk.$1.ffn_up.weight"]},
    {"op": "transpose", "sources": ["^down$"], "targets": ["transposed.weight"], "dims": [1, 0]},
]
QUANTIZE = ["--quantize", "q4_k", "--include", "ffn_up"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    tensors = {f"layers.{i}.up": random.standard_normal((8, 256), np.float32) for i in range(3)}
    tensors["down"] = random.standard_normal((64, 32), np.float32)
    save_file(tensors, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


@pytest.fixture
def options(tmp_path: Path) -> list[object]:
    (tmp_path / "rules.json").write_text(json.dumps(RULES))
    return ["--rules", tmp_path / "rules.json", *QUANTIZE]


def differences(run: Callable, *arguments: object) -> list[tuple[str, str]]:
    done = run("verify", *arguments, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1), done.stderr
    return [(each["name"], each["kind"]) for each in report["differences"]]


def test_a_conversion_to_gguf_is_compared(run, source, options, tmp_path):
    target = tmp_path / "b.gguf"
    run("convert", source, target, *options, "--arch", "test", status=0)
    options += ["--arch", "test"]
    assert differences(run, source, target, *options) == []
    assert "ok; " in run("verify", source, target, *options, status=0).stdout
    # Control: one wrong bit of a tensor that the rules transpose.
    reader = gguf.GGUFReader(target)
    (tensor,) = (each for each in reader.tensors if each.name == "transposed.weight")
    offset = int(tensor.data_offset) + 100
    data = bytearray(target.read_bytes())
    data[offset] ^= 1
    target.write_bytes(data)
    assert differences(run, source, target, *options) == [("transposed.weight", "bytes")]
    text = run("verify", source, target, *options, status=1).stdout
    assert "first at byte 100 of the tensor" in text


def test_split_files_are_compared(run, source, options, tmp_path):
    options += ["--arch", "test"]
    run("convert", source, tmp_path / "b.gguf", *options, "--shard-size", "5KB", status=0)
    parts = sorted(tmp_path.glob("b-*.gguf"))
    assert len(parts) > 1
    assert differences(run, source, parts[0], *options) == []


def test_other_options_are_differences(run, source, options, tmp_path):
    target = tmp_path / "b.gguf"
    run("convert", source, target, *options, "--arch", "test", status=0)
    found = differences(run, source, target, *options[:2], "--arch", "test")
    assert found == [(f"blk.{i}.ffn_up.weight", "encoding") for i in range(3)]
    found = dict(differences(run, source, target, "--arch", "test"))
    assert found["down"] == "missing" and found["transposed.weight"] == "unexpected"


def test_a_folder_of_safetensors_is_compared(run, source, options, tmp_path):
    target = tmp_path / "b"
    run("convert", source, target, *options[:2], "--dtype", "bf16", "--shard-size", "5KB", status=0)
    assert differences(run, source, target, *options[:2], "--dtype", "bf16") == []
    assert differences(run, source, target, *options[:2], "--dtype", "f16") != []


def test_without_the_options_a_warning_names_them(run, source, options, tmp_path):
    target = tmp_path / "b.gguf"
    run("convert", source, target, *options, "--arch", "test", status=0)
    done = run("verify", source, target, status=1)
    assert "[verify.names]" in done.stdout
    assert "4 of 4 names" in done.stdout
    assert "--rules FILE" in done.stdout and "--converter DIR" in done.stdout
    # Control: the same names with other values get no such warning.
    run("convert", source, tmp_path / "c.gguf", "--arch", "test", "--dtype", "f16", status=0)
    assert "verify.names" not in run("verify", source, tmp_path / "c.gguf", status=0).stdout


# Runs a command from a small process, because a child inherits the peak memory of its parent.
PEAK = """
import os, sys
child = os.fork()
if child == 0:
    os.execv(sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(child, 0)
print("peak", usage.ru_maxrss * 1024)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_large_tensor_is_compared_window_by_window(command, run, write_safetensors, tmp_path):
    source = write_safetensors(tmp_path / "a.safetensors", {"large": ("BF16", [160, 1 << 20])})
    target = tmp_path / "b.safetensors"
    run("convert", source, target, "--dtype", "f16", status=0)
    words = [sys.executable, "-S", "-E", "-c", PEAK, command, "verify", source, target]
    done = subprocess.run([*words, "--dtype", "f16"], capture_output=True, text=True, check=True)
    assert "ok; " in done.stdout
    assert int(done.stdout.split()[-1]) < 200 << 20
    with target.open("r+b") as file:  # control: the last byte
        file.seek(-1, 2)
        file.write(b"\1")
    report = json.loads(run("verify", source, target, "--dtype", "f16", "--json", status=1).stdout)
    (difference,) = report["differences"]
    assert difference["found"] == f"different bytes, first at byte {(320 << 20) - 1} of the tensor"


@pytest.mark.parametrize("words", [[], ["B", "--receipt"], ["B", "--digests"]])
def test_a_conversion_needs_its_output(run, source, words):
    words = [source if word == "B" else word for word in words]
    done = run("verify", source, *words, "--dtype", "f16", status=2)
    assert "--dtype describes the conversion of A that made B" in done.stderr


def test_an_impossible_conversion_is_an_error(run, source, options, tmp_path):
    target = tmp_path / "b.gguf"
    run("convert", source, target, *options, "--arch", "test", status=0)
    done = run("verify", source, target, *options, status=1)
    assert "[convert.architecture]" in done.stderr
