"""A receipt covers the ranges of a tensor that were read, and every byte of an output."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import output, run, verified
from receipt_digests import flip, tree
from safetensors.torch import save_file

import loadstone

torch = pytest.importorskip("torch")

ROWS, COLUMNS = 96, 2048
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}
# First column and number of columns of a slice; the holes between its rows are 0.1 to 16 KiB.
CUTS = {"left": (0, 1024), "right": (1024, 1024), "middle": (3, 2000), "narrow": (512, 100)}


def by_load(folder: Path, dtype: str, begin: int, size: int, threads: int) -> Path:
    target = {
        "name": "w",
        "shape": [ROWS, COLUMNS],
        "dtype": dtype,
        "slice": {"begin": [0, begin], "shape": [ROWS, size]},
    }
    skeleton, receipt = folder / "skeleton.json", folder / "receipt.json"
    skeleton.write_text(json.dumps({"targets": [target]}))
    output("load", folder / "in", "--skeleton", skeleton, "--threads", threads,
           "--receipt", "sha256-tree", "--receipt-file", receipt)  # fmt: skip
    return receipt


def by_saved_plan(folder: Path, dtype: str, begin: int, size: int, threads: int) -> Path:
    by_load(folder, dtype, begin, size, threads)
    plan, receipt = folder / "plan.json", folder / "again.json"
    output("plan", folder / "in", "--skeleton", folder / "skeleton.json", "-o", plan)
    output("load", "--plan", plan, "--threads", threads,
           "--receipt", "sha256-tree", "--receipt-file", receipt)  # fmt: skip
    return receipt


def by_convert(folder: Path, dtype: str, begin: int, size: int, threads: int) -> Path:
    rule = {"op": "slice", "sources": ["w"], "targets": ["w"], "dim": 1}
    rules = folder / "rules.json"
    rules.write_text(json.dumps([{**rule, "start": begin, "sizes": [size]}]))
    output("convert", folder / "in", folder / "out", "--rules", rules, "--threads", threads,
           "--receipt", "sha256-tree")  # fmt: skip
    return folder / "out/receipt.json"


WAYS = {"load": by_load, "saved plan": by_saved_plan, "convert": by_convert}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_digests_of_column_slices(
    tmp_path: Path, way: str, dtype: str, cut: str, threads: int
) -> None:
    (tmp_path / "in").mkdir()
    noise = torch.randint(0, 256, (ROWS, COLUMNS * DTYPES[dtype].itemsize), dtype=torch.uint8)
    file = tmp_path / "in/model.safetensors"
    save_file({"w": noise.view(DTYPES[dtype])}, file)
    receipt = WAYS[way](tmp_path, dtype, *CUTS[cut], threads)
    (source,) = json.loads(receipt.read_text())["sources"]
    (tensor,) = source["tensors"]
    raw = file.read_bytes()[tensor["begin"] : tensor["end"]]
    assert tensor["digest"] == tree(raw, tensor["ranges"])
    arguments: list[object] = [tmp_path / "in", "--receipt-file", receipt]
    if way == "convert":
        arguments = [tmp_path / "out", "--receipt", "--source", tmp_path / "in"]
    assert verified(*arguments)[0] == 0
    # Control: a changed byte changes the digest, in a column and in a hole.
    flip(file, 8 * (tensor["begin"] + tensor["ranges"][0][0] + 5000))
    status, report = verified(*arguments)
    assert (status, [each["name"] for each in report["differences"]]) == (1, ["w"])


# For each format: target of the conversion, path to verify, and options.
FORMATS: dict[str, tuple[str, str, list[str]]] = {
    "safetensors": ("out", "out", []),
    "shards": ("out", "out", ["--shard-size", "3KB"]),
    "one file": ("out/m.safetensors", "out/m.safetensors", []),
    "gguf": ("out/m.gguf", "out/m.gguf", ["--metadata", "metadata.json"]),
    "split gguf": ("out/m.gguf", "out", ["--metadata", "metadata.json", "--shard-size", "3KB"]),
    "nf4": ("out", "out", ["--quantize", "nf4", "--include", "up"]),
}
METADATA = {
    "format": "loadstone-gguf-metadata",
    "version": 1,
    "entries": [{"key": "general.architecture", "type": "string", "value": "llama"}],
}


@pytest.fixture(params=FORMATS)
def converted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """Convert, and return the paths of an output and its receipt."""
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("metadata.json").write_text(json.dumps(METADATA))
    torch.manual_seed(1)
    tensors = {f"layers.{i}.up.weight": torch.randn(16, 64).bfloat16() for i in range(3)}
    tensors["norm"] = torch.randn(32).bfloat16()
    save_file(tensors, "in/model.safetensors")
    target, verified_path, options = FORMATS[request.param]
    if "/" in target:
        Path("out").mkdir()
    output("convert", "in", target, *options, "--receipt", "sha256-tree")
    (receipt,) = Path("out").glob("*receipt.json")
    return tmp_path / verified_path, tmp_path / receipt


def tensors_of(document: Any) -> list[Any]:
    """Return the entries of the first output that has tensors."""
    return next(file["tensors"] for file in document["outputs"] if file["tensors"])


def without_last(document: Any) -> None:
    tensors_of(document).pop()


def without_all(document: Any) -> None:
    tensors_of(document).clear()


def without_bytes(document: Any) -> None:
    tensor = tensors_of(document)[0]
    tensor["end"] = tensor["begin"]


def with_no_ranges(document: Any) -> None:
    tensors_of(document)[0]["ranges"] = []


def with_a_part(document: Any) -> None:
    tensor = tensors_of(document)[0]
    tensor["ranges"] = [[0, 8]]


def with_header_twice(document: Any) -> None:
    document["outputs"][0]["header_ranges"][0][1] += 1


def with_output_twice(document: Any) -> None:
    document["outputs"].append(copy.deepcopy(document["outputs"][0]))


# Changes after which a receipt omits bytes or covers them twice.
INCOMPLETE: list[Callable[[Any], None]] = [
    without_last, without_all, without_bytes, with_no_ranges, with_a_part, with_header_twice,
    with_output_twice,
]  # fmt: skip


@pytest.mark.parametrize("change", INCOMPLETE)
def test_a_receipt_covers_each_byte_once(
    converted: tuple[Path, Path], change: Callable[[Any], None]
) -> None:
    out, receipt = converted
    assert verified(out, "--receipt-file", receipt)[0] == 0
    document = json.loads(receipt.read_text())
    change(document)
    receipt.write_text(json.dumps(document))
    done = run("verify", out, "--receipt-file", receipt)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "receipt.json]" in done.stderr
    with pytest.raises(loadstone.Error) as caught:
        loadstone.Receipt.load(receipt)
    assert caught.value.code == "receipt.json"


def other(tensor: Any, field: str) -> None:
    if field == "shape":
        tensor["shape"] = [*tensor["shape"], 1]
    else:
        tensor[field] = {"name": "no.such.tensor", "encoding": "I16"}[field]


@pytest.mark.parametrize(
    ("field", "kind"), [("name", "missing"), ("encoding", "encoding"), ("shape", "shape")]
)
def test_a_receipt_has_the_headers_tensors(
    converted: tuple[Path, Path], field: str, kind: str
) -> None:
    out, receipt = converted
    document = json.loads(receipt.read_text())
    tensor = tensors_of(document)[0]
    name = tensor["name"]
    other(tensor, field)
    receipt.write_text(json.dumps(document))
    status, report = verified(out, "--receipt-file", receipt)
    assert status == 1
    kinds = {each["name"]: each["kind"] for each in report["differences"]}
    assert kinds == (
        {"no.such.tensor": "missing", name: "unexpected"} if field == "name" else {name: kind}
    )


def test_two_tensors_have_the_places_of_each_other(converted: tuple[Path, Path]) -> None:
    """Detect two tensors whose names are exchanged, although all digests are correct."""
    out, receipt = converted
    document = json.loads(receipt.read_text())
    for file in document["outputs"]:
        pairs = [each for each in file["tensors"] if each["shape"] == file["tensors"][0]["shape"]]
        if len(pairs) > 1:
            break
    else:
        pytest.skip("no file has two tensors of one shape")
    first, second = pairs[:2]
    first["name"], second["name"] = second["name"], first["name"]
    receipt.write_text(json.dumps(document))
    status, report = verified(out, "--receipt-file", receipt)
    assert status == 1
    assert {each["name"] for each in report["differences"]} == {first["name"], second["name"]}


def test_a_header_that_cannot_be_read_is_one_difference(converted: tuple[Path, Path]) -> None:
    out, receipt = converted
    files = json.loads(receipt.read_text())["outputs"]
    file = next(each for each in files if each["tensors"])
    path = out / file["path"] if out.is_dir() else out
    flip(path, 8 * 9 if path.suffix == ".safetensors" else 0)
    status, report = verified(out, "--receipt-file", receipt)
    assert status == 1
    assert [each["name"] for each in report["differences"]] == [f"{file['path']} (header)"]


def test_a_huge_receipt_is_rejected_unread(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    huge, small = tmp_path / "huge.json", tmp_path / "small.json"
    for path, size in ((huge, 2 << 30), (small, 1000)):
        with path.open("wb") as file:
            file.truncate(size)
    done = run("verify", tmp_path / "model.safetensors", "--receipt-file", huge)
    assert done.returncode == 1
    assert "too long" in done.stderr and "receipt.json]" in done.stderr
    with pytest.raises(loadstone.Error, match="too long") as caught:
        loadstone.Receipt.load(huge)
    assert caught.value.code == "receipt.json" and str(huge) in str(caught.value)
    # Control: verify reads the small file and reports that it is not JSON.
    done = run("verify", tmp_path / "model.safetensors", "--receipt-file", small)
    assert done.returncode == 1 and "not JSON" in done.stderr
    shutil.copyfile(small, tmp_path / "latin.json")
    (tmp_path / "latin.json").write_bytes(b'{"format": "\xe9"}')
    with pytest.raises(loadstone.Error, match="UTF-8"):
        loadstone.Receipt.load(tmp_path / "latin.json")


@pytest.mark.parametrize("named", ["out", "out/m-00001-of-00002.gguf", "out/m.gguf"])
@pytest.mark.parametrize("others", [[], ["mmproj.gguf", "notes.txt"]], ids=["alone", "others"])
def test_the_receipt_of_a_split_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, others: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("out").mkdir()
    Path("metadata.json").write_text(json.dumps(METADATA))
    tensors = {f"layers.{i}.up.weight": torch.randn(16, 64).bfloat16() for i in range(2)}
    save_file(tensors, "in/model.safetensors")
    output("convert", "in", *FORMATS["split gguf"][0:1], *FORMATS["split gguf"][2],
           "--receipt", "xxh3-128")  # fmt: skip
    assert len(list(Path("out").glob("*.gguf"))) == 2
    for other in others:
        (Path("out") / other).write_bytes(b"x")
    status, report = verified(named, "--receipt")
    unexpected = others if named == "out" else []  # verify checks all files of a folder
    assert sorted(each["name"] for each in report["differences"]) == unexpected
    assert status == (1 if unexpected else 0)
    # Control: verify detects a changed byte in each part.
    for part in Path("out").glob("m-*.gguf"):
        flip(part, 8 * (part.stat().st_size - 1))
        assert verified(named, "--receipt")[0] == 1
        flip(part, 8 * (part.stat().st_size - 1))
    Path("out/m-00002-of-00002.gguf").unlink()
    found = verified(named, "--receipt")[1]["differences"]
    assert "missing" in [each["kind"] for each in found]
