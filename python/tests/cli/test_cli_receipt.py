"""Receipts of conversions: written, verified, and trusted by `--resume`."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import COMMAND, output
from receipt_digests import convert, flip, tree, verify, write


def bf16(generator: random.Random, count: int) -> bytes:
    """Return random BF16 values around one, which every encoding can quantize."""
    data = bytearray(generator.randbytes(2 * count))
    data[1::2] = bytes(0x3C + (each & 0x83) for each in data[1::2])
    return bytes(data)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("receipt") / "source"
    folder.mkdir()
    generator = random.Random(5)
    tensors = {}
    for layer in range(6):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        tensors[name] = ("BF16", [640, 1024], bf16(generator, 640 * 1024))
        tensors[f"model.layers.{layer}.norm.weight"] = ("BF16", [64], bf16(generator, 64))
    tensors["model.empty"] = ("BF16", [0, 4], b"")
    write(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return folder


FORMS = {
    "copy": [],
    "cast": ["--dtype", "f16"],
    "nf4": ["--quantize", "nf4"],
    "nvfp4": ["--quantize", "nvfp4"],
    "fp8": ["--quantize", "fp8"],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["xxh3-128", "sha256-tree"])
def test_a_receipt_is_true_and_does_not_depend_on_threads(
    source: Path, tmp_path: Path, form: str, kind: str
) -> None:
    receipts = []
    for threads, memory in ((1, "24MiB"), (1, "400MiB"), (4, "400MiB")):
        out = tmp_path / f"{threads}-{memory}"
        convert(source, out, *FORMS[form], "--shard-size", "3MB", "--receipt", kind,
                "--threads", threads, "--max-memory", memory)  # fmt: skip
        receipts.append((out / "receipt.json").read_bytes())
        assert verify(out, "--receipt", "--source", source) == []
    assert receipts[0] == receipts[1] == receipts[2]
    receipt = json.loads(receipts[0])
    assert receipt["digest"] == kind
    if kind != "sha256-tree":
        return
    for root, files in ((source, receipt["sources"]), (out, receipt["outputs"])):
        for file in files:
            raw = (root / file["path"]).read_bytes()
            assert len(raw) == file["bytes"]
            header = b"".join(raw[begin:end] for begin, end in file["header_ranges"])
            assert len(header) + sum(t["end"] - t["begin"] for t in file["tensors"]) == len(raw)
            assert file["header_digest"] == tree(raw, file["header_ranges"])
            for tensor in file["tensors"]:
                assert "ranges" not in tensor
                assert tensor["digest"] == tree(raw[tensor["begin"] : tensor["end"]])


def test_every_flipped_bit_is_named(source: Path, tmp_path: Path) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy"
    convert(source, out, "--quantize", "nf4", "--shard-size", "3MB", "--receipt", "xxh3-128")
    shutil.copytree(source, copy)
    receipt = json.loads((out / "receipt.json").read_text())
    generator = random.Random(7)
    for root, files in ((out, receipt["outputs"]), (copy, receipt["sources"])):
        for file in files:
            spots = [(t["name"], t["begin"], t["end"]) for t in file["tensors"]]
            header = f"{file['path']} (header)" if spots else file["path"]
            spots += [(header, begin, end) for begin, end in file["header_ranges"]]
            for name, begin, end in spots:
                if begin == end:
                    continue
                for bit in {8 * begin, 8 * end - 1, generator.randrange(8 * begin, 8 * end)}:
                    flip(root / file["path"], bit)
                    found = verify(out, "--receipt", "--source", copy)
                    flip(root / file["path"], bit)
                    assert [each["name"] for each in found] == [name]
                    side = "output" if root == out else "source"
                    assert f"in {side} '{root / file['path']}'" in found[0]["found"]
    assert verify(out, "--receipt", "--source", copy) == []


def test_what_stands_in_one_of_both_is_named(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source, out, "--shard-size", "3MB", "--receipt", "xxh3-128")
    (out / "more.bin").write_bytes(b"x")
    (out / "config.json").unlink()
    found = {each["name"]: each["kind"] for each in verify(out, "--receipt")}
    assert found == {"more.bin": "unexpected", "config.json": "missing"}
    convert(source, tmp_path / "other", "--shard-size", "3MB", "--dtype", "f32")
    text = output("verify", out, "--receipt", "--source", tmp_path / "other", status=1)
    name = "model.safetensors"
    assert f"'{name}': found no source '{tmp_path / 'other' / name}'; expected a file of" in text
    assert f"'config.json': found no output '{out / 'config.json'}'; expected a file of" in text
    shard = sorted(out.glob("*.safetensors"))[0]
    text = output("verify", shard, "--receipt-file", out / "receipt.json", status=2)
    assert "the receipt lists several files of the output: pass their folder" in text


def test_what_is_added_to_a_folder_below_is_named(source: Path, tmp_path: Path) -> None:
    model = shutil.copytree(source, tmp_path / "model")
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text("{}")
    modules = [{"path": path, "type": "any"} for path in ("", "1_Pooling")]
    (model / "modules.json").write_text(json.dumps(modules))
    out = tmp_path / "out"
    convert(model, out, "--receipt", "xxh3-128")
    assert verify(out, "--receipt") == []  # control
    (out / "1_Pooling" / "more.json").write_text("{}")
    (out / "1_Pooling" / "receipt.json").write_text("{}")
    (out / "2_Dense").mkdir()
    found = {each["name"]: each["kind"] for each in verify(out, "--receipt")}
    more = ("1_Pooling/more.json", "1_Pooling/receipt.json", "2_Dense")
    assert found == dict.fromkeys(more, "unexpected")
    shutil.rmtree(out / "1_Pooling")
    found = {each["name"]: each["kind"] for each in verify(out, "--receipt")}
    assert found == {"1_Pooling/config.json": "missing", "2_Dense": "unexpected"}


def test_one_file(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    convert(source, target, "--receipt", "sha256-tree")
    assert verify(target, "--receipt", "--source", source) == []
    convert(source, target, "--dtype", "f32")  # replaces the file and deletes its receipt
    assert not (tmp_path / "out.safetensors.receipt.json").exists()


@pytest.mark.parametrize("kind", ["xxh3-128", "sha256-tree"])
@pytest.mark.parametrize("options", [[], ["--dtype", "f32"], ["--threads", "1"]])
def test_a_load_says_what_it_read(
    source: Path, tmp_path: Path, kind: str, options: list[str]
) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    file = tmp_path / "load.json"
    output("load", copy, *options, "--receipt", kind, "--receipt-file", file)
    receipt = json.loads(file.read_text())
    assert len(receipt["targets"]) == 13 and receipt["outputs"] == []
    assert verify(copy, "--receipt-file", file) == []
    tensor = receipt["sources"][0]["tensors"][3]
    flip(copy / "model.safetensors", 8 * tensor["begin"])
    assert [each["name"] for each in verify(copy, "--receipt-file", file)] == [tensor["name"]]
    output("load", copy, "--receipt", kind, status=2)


def test_a_saved_plan_says_it_too(source: Path, tmp_path: Path) -> None:
    plan, file = tmp_path / "plan.json", tmp_path / "load.json"
    output("load", source, "--receipt", "sha256-tree", "--receipt-file", file)
    output("plan", source, "-o", plan)
    again = tmp_path / "again.json"
    output("load", "--plan", plan, "--receipt", "sha256-tree", "--receipt-file", again)
    assert again.read_bytes() == file.read_bytes()


def test_a_source_that_no_receipt_has_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source, out, "--receipt", "xxh3-128")
    twice = output("verify", out, "--receipt", "--source", source, "--source", source, status=2)
    assert "the receipt does not list source 2: pass fewer sources" in twice
    file = tmp_path / "load.json"
    output("load", source, "--receipt", "xxh3-128", "--receipt-file", file)
    output("verify", source, "--receipt-file", file, "--source", source, status=2)


@pytest.mark.parametrize("target", ["out", "out.safetensors"])
def test_a_second_conversion_leaves_nothing_of_the_first(
    source: Path, tmp_path: Path, target: str
) -> None:
    out = tmp_path / target
    convert(source, out, "--receipt", "xxh3-128")
    names = sorted(each.name for each in tmp_path.iterdir())
    convert(source, out, "--dtype", "f16", "--receipt", "xxh3-128")
    assert sorted(each.name for each in tmp_path.iterdir()) == names
    assert verify(out, "--receipt", "--source", source) == []


def test_a_strangers_file_of_the_receipts_name_is_set_aside(source: Path, tmp_path: Path) -> None:
    """Control: loadstone does not delete a file that only has the name of a receipt."""
    out = tmp_path / "out"
    convert(source, out)
    (out / "receipt.json").write_text('{"paid": true}')
    convert(source, out, "--receipt", "xxh3-128")
    (aside,) = tmp_path.glob(".loadstone-*.part/receipt.json")
    assert aside.read_text() == '{"paid": true}'


def test_partial_reads_list_their_ranges(source: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([
        {"op": "slice", "sources": [name.replace(".", "[.]")], "targets": ["w"], "dim": 0,
         "start": 10, "sizes": [200]},
    ]))  # fmt: skip
    out = tmp_path / "out"
    convert(source, out, "--rules", rules, "--receipt", "sha256-tree")
    receipt = json.loads((out / "receipt.json").read_text())
    (tensor,) = [t for t in receipt["sources"][0]["tensors"] if t["name"] == name]
    assert tensor["ranges"] == [[10 * 2048, 210 * 2048]]
    raw = (source / "model.safetensors").read_bytes()[tensor["begin"] : tensor["end"]]
    assert tensor["digest"] == tree(raw, tensor["ranges"])
    assert verify(out, "--receipt", "--source", source) == []


def test_transposed(source: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([
        {"op": "transpose", "sources": ["(.*up_proj.weight)"], "targets": ["$1"], "dims": [0, 1]},
    ]))  # fmt: skip
    texts = []
    for threads in (1, 4):
        out = tmp_path / f"out{threads}"
        convert(source, out, "--rules", rules, "--receipt", "xxh3-128", "--threads", threads,
                "--max-memory", "32MiB")  # fmt: skip
        assert verify(out, "--receipt", "--source", source) == []
        texts.append((out / "receipt.json").read_text())
    assert texts[0] == texts[1]


def files_of(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir())}


RESUMED = ["--quantize", "nf4", "--shard-size", "700KB", "--receipt", "sha256-tree"]


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    convert(source, out, *RESUMED)
    return files_of(out)


def begun(source: Path, out: Path, seconds: float) -> bool:
    """Run and kill a conversion; return False if it finished first."""
    process = subprocess.Popen(
        [COMMAND, "convert", str(source), str(out), *RESUMED, "--resume", "--threads", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    return process.wait() != 0


def test_killed_50_times_and_resumed_elsewhere(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    generator = random.Random(11)
    place = tmp_path / "0"
    place.mkdir()
    shutil.copytree(source, place / "source")
    kills = 0
    while kills < 50:
        kills += begun(place / "source", place / "out", generator.uniform(0.0, 0.25))
        if (place / "out").exists():
            assert files_of(place / "out") == whole
            shutil.rmtree(place / "out")
        # Move to a new folder, which changes the path, inode and time of all files.
        moved = tmp_path / str(kills + 1)
        if not moved.exists():
            shutil.copytree(place, moved, copy_function=shutil.copyfile)
            shutil.rmtree(place)
            place = moved
    convert(place / "source", place / "out", *RESUMED, "--resume")
    assert files_of(place / "out") == whole


def finished(source: Path, out: Path) -> Path:
    """Finish one of two parts; return the folder of its shards."""
    convert(source, out, *RESUMED, "--part", "1/2")
    return out.parent / f".loadstone-{out.name}.part" / "files"


def test_a_flipped_byte_in_a_finished_shard_is_named_and_made_again(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    files = finished(source, out)
    shard = sorted(files.iterdir())[0]
    flip(shard, 8 * (shard.stat().st_size - 100))
    report = json.loads(convert(source, out, *RESUMED, "--resume", "--json").stdout)
    (finding,) = [each for each in report["findings"] if each["code"] == "convert.redone"]
    assert finding["target"] == shard.name
    assert "tensor 'model.layers" in finding["message"]
    assert report["bytes_kept"] > 0 or len(list(files.parent.glob("*"))) == 0
    assert files_of(out) == whole


def test_another_byte_in_a_copy_of_the_source_is_named(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy"
    finished(source, out)
    shutil.copytree(source, copy)
    receipts = sorted((out.parent / f".loadstone-{out.name}.part").glob("*.receipt.json"))
    tensor = json.loads(receipts[0].read_text())["sources"][0]["tensors"][0]
    flip(copy / "model.safetensors", 8 * tensor["begin"])
    report = json.loads(convert(copy, out, *RESUMED, "--resume", "--json").stdout)
    named = [each for each in report["findings"] if each["code"] == "convert.redone"]
    assert any(tensor["name"] in each["message"] for each in named)
    assert verify(out, "--receipt", "--source", copy) == []
    assert [each["name"] for each in verify(out, "--receipt", "--source", source)] == [
        tensor["name"]
    ]


def test_parts_on_copies(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    for part in (1, 2, 3):
        copy = tmp_path / f"copy{part}"
        shutil.copytree(source, copy, copy_function=shutil.copyfile)
        convert(copy, out, *RESUMED, "--part", f"{part}/3")
    convert(source, out, *RESUMED, "--finish")
    assert files_of(out) == whole


def test_files_of_a_hub_cache_are_those_that_were_published(source: Path, tmp_path: Path) -> None:
    data = (source / "model.safetensors").read_bytes()
    blob = tmp_path / "models--org--name/blobs" / hashlib.sha256(data).hexdigest()
    snapshot = tmp_path / "models--org--name/snapshots/0123abc"
    for folder in (blob.parent, snapshot):
        folder.mkdir(parents=True)
    blob.write_bytes(data)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob.name}")
    output("verify", snapshot, "--digests")
    flip(blob, 8 * (len(data) - 1))
    done = json.loads(output("verify", snapshot, "--digests", "--json", status=1))
    (difference,) = done["differences"]
    assert difference["name"] == "model.safetensors"
    assert difference["expected"] == blob.name
    assert difference["found"] == hashlib.sha256(blob.read_bytes()).hexdigest()
    assert "verify.no_digest" in output("verify", source, "--digests", status=1)
    output("verify", snapshot, source, "--digests", status=2)


def published(folder: Path, snapshot: Path) -> None:
    """Write a folder's files as a snapshot in a Hugging Face cache."""
    blobs = snapshot.parent.parent / "blobs"
    for made in (blobs, snapshot):
        made.mkdir(parents=True)
    for file in folder.iterdir():
        data = file.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        name = hashlib.sha256(data).hexdigest() if file.suffix == ".safetensors" else git
        (blobs / name).write_bytes(data)
        (snapshot / file.name).symlink_to(f"../../blobs/{name}")


def changed(snapshot: Path) -> str:
    path = snapshot / "config.json"
    path.resolve().write_text(path.read_text().replace("1", "2"))
    return "config.json"


def added(name: str) -> Callable[[Path], str]:
    def add(snapshot: Path) -> str:
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).write_text("x = 1")
        return name

    return add


@pytest.mark.parametrize(
    "change", [changed, added("modeling.py"), added("pytorch_model.bin"), added("1_Pooling/a.json")]
)
def test_all_files_of_a_snapshot_are_those_that_were_published(
    change: Callable[[Path], str], source: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(source, tmp_path / "folder")
    (folder / "config.json").write_text('{"rms_norm_eps": 1e-6}')
    snapshot = tmp_path / "models--org--name/snapshots/0123abc"
    published(folder, snapshot)
    count = len(list(folder.iterdir()))
    right = f"ok; the digests of {count} of {count} files are right; "
    assert output("verify", snapshot, "--digests").startswith(right)
    name = change(snapshot)
    text = output("verify", snapshot, "--digests", status=1)
    assert name in text
    files = sum(path.is_file() for path in snapshot.rglob("*"))
    assert f"not ok; the digests of {files - 1} of {files} files are right; " in text
    output("verify", snapshot / "model.safetensors", "--digests")  # checks only this file


def emptied(receipt: dict[str, Any]) -> None:
    receipt["sources"][0]["tensors"] = []


def set_field(field: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(receipt: dict[str, Any]) -> None:
        receipt["sources"][0]["tensors"][0][field] = value

    return change


def listed_twice(receipt: dict[str, Any]) -> None:
    receipt["sources"].append(receipt["sources"][0])


def overlapping(receipt: dict[str, Any]) -> None:
    tensors = receipt["sources"][0]["tensors"]
    tensors.append(tensors[0] | {"name": "again"})


WRONG = [emptied, listed_twice, overlapping, set_field("name", "n")]
WRONG += [set_field("shape", [1 << 63] * 2), set_field("encoding", "I8")]


@pytest.mark.parametrize("change", WRONG)
def test_a_receipt_of_a_load_lists_what_was_read(
    change: Callable[[dict[str, Any]], None], source: Path, tmp_path: Path
) -> None:
    """verify rejects a receipt whose list of tensors differs from the tensors that were read."""
    file = tmp_path / "load.json"
    output("load", source, "--receipt", "xxh3-128", "--receipt-file", file)
    output("verify", source, "--receipt-file", file)
    receipt = json.loads(file.read_text())
    change(receipt)
    file.write_text(json.dumps(receipt))
    output("verify", source, "--receipt-file", file, status=1)
