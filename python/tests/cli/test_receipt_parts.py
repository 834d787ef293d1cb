"""Receipts of partly read sources: some columns, rows for several files, or nothing."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from command import output
from receipt_digests import convert, flip, verify, write


def test_a_tensor_whose_parts_are_in_two_files_has_a_digest_for_each(tmp_path: Path) -> None:
    name = "up.weight"
    source = tmp_path / "source"
    source.mkdir()
    data = random.Random(1).randbytes(640 * 2048)
    write(source / "model.safetensors", {name: ("I16", [640, 1024], data)})
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([
        {"op": "split", "sources": [name.replace(".", "[.]")], "targets": ["a", "b"], "dim": 0},
    ]))  # fmt: skip
    out = tmp_path / "out"
    convert(source, out, "--rules", rules, "--receipt", "xxh3-128", "--shard-size", "700kB")
    receipt = json.loads((out / "receipt.json").read_text())
    parts = [t["ranges"] for t in receipt["sources"][0]["tensors"] if t["name"] == name]
    assert parts == [[[0, 320 * 2048]], [[320 * 2048, 640 * 2048]]]
    assert verify(out, "--receipt", "--source", source) == []
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    begin = next(t["begin"] for t in receipt["sources"][0]["tensors"] if t["name"] == name)
    flip(copy / "model.safetensors", 8 * (begin + 500 * 2048))
    assert [each["name"] for each in verify(out, "--receipt", "--source", copy)] == [name]


def described(path: Path, **shapes: list[int]) -> Path:
    """Write a skeleton of F32 parameters with these shapes."""
    targets = [
        {"name": name, "kind": "parameter", "shape": shape, "dtype": "F32"}
        for name, shape in shapes.items()
    ]
    path.write_text(json.dumps({"targets": targets}))
    return path


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("kind", ["xxh3-128", "sha256-tree"])
def test_bytes_between_columns_are_hashed_as_they_are(
    tmp_path: Path, kind: str, threads: int
) -> None:
    """One system call reads across many holes between rows, and may begin or end in a hole."""
    data = random.Random(1).randbytes
    file = tmp_path / "model.safetensors"
    write(file, {"a": ("F32", [1], data(4)), "x": ("F32", [512, 1536], data(512 * 6144))})
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([
        {"op": "slice", "sources": ["x"], "targets": ["s"], "dim": 1, "start": 0, "sizes": [1024]},
    ]))  # fmt: skip
    model = described(tmp_path / "skeleton.json", a=[1], s=[512, 1024])
    receipt = tmp_path / "receipt.json"
    output("load", file, "--skeleton", model, "--rules", rules, "--threads", threads,
           "--receipt", kind, "--receipt-file", receipt)  # fmt: skip
    assert verify(file, "--receipt-file", receipt) == []


def test_a_tensor_of_which_nothing_is_read_is_not_listed(tmp_path: Path) -> None:
    data = random.Random(1).randbytes
    source = tmp_path / "source"
    source.mkdir()
    write(source / "model.safetensors", {"x": ("F32", [4, 8], data(128)),
                                         "y": ("F32", [4], data(16))})  # fmt: skip
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([
        {"op": "slice", "sources": ["x"], "targets": ["e"], "dim": 0, "start": 0, "sizes": [0]},
    ]))  # fmt: skip
    model = described(tmp_path / "skeleton.json", e=[0, 8], y=[4])
    receipt = tmp_path / "receipt.json"
    output("load", source, "--skeleton", model, "--rules", rules, "--receipt", "xxh3-128",
           "--receipt-file", receipt)  # fmt: skip
    assert verify(source, "--receipt-file", receipt) == []
    out, copy = tmp_path / "out", tmp_path / "copy"
    shutil.copytree(source, copy, copy_function=shutil.copyfile)
    for each in (source, copy):
        convert(each, out, "--rules", rules, "--part", "1/1", "--receipt", "xxh3-128")
    convert(source, out, "--rules", rules, "--finish", "--receipt", "xxh3-128")
    assert verify(out, "--receipt", "--source", source) == []


def test_the_same_rows_for_two_files_are_listed_once(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    row = 1 << 16
    write(file, {"x": ("F32", [4, row], random.Random(1).randbytes(16 * row))})
    targets = [
        [name, [2, row], "F32", [[0, 0, 0, row, 1, 1], [0, other * row, row, row, 1, 1]]]
        for name, other in (("a", 2), ("b", 3), ("c", 2))
    ]
    recipes = {"version": 2, "sources": [["x", "F32", [4, row]]], "targets": targets}
    rules, out = tmp_path / "rules.json", tmp_path / "out"
    rules.write_text(json.dumps(recipes))
    convert(file, out, "--rules", rules, "--shard-size", "600kB", "--receipt", "xxh3-128")
    assert len(list(out.glob("*.safetensors"))) == 3
    receipt = json.loads((out / "receipt.json").read_text())
    ranges = [tensor["ranges"] for tensor in receipt["sources"][0]["tensors"]]
    assert len(ranges) == 2
    assert verify(out, "--receipt", "--source", file) == []
