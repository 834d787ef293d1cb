"""Tests of predictions, resumed work and messages that jobs of hours need, in both entry points."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command import COMMAND, output, run
from remote_fixtures import no_environment
from remote_server import Fault, Seen, Server
from safetensors.torch import save_file

import loadstone

__all__ = ["no_environment"]

ROWS, COLUMNS = 2048, 1024
SHARD = 4_200_000  # one matrix


def write_model(folder: Path, layers: int = 3, seed: int = 0) -> Path:
    """Write one matrix of 4 MiB, and a norm, for each layer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        weight = torch.randn(ROWS, COLUMNS, generator=generator).bfloat16()
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = weight
        tensors[f"model.layers.{layer}.norm.weight"] = torch.ones(8).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("long") / "model")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("long") / "other", seed=1)


def document(*words: object, status: int = 0) -> Any:
    done = run(*words, "--json")
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout)


# ---- bytes to read


@pytest.mark.parametrize("quantize", ["fp8", "nvfp4", "nf4"])
@pytest.mark.parametrize("memory", ["14MB", "200MB"])
def test_a_dry_run_counts_the_second_read_of_measured_tensors(
    model: Path, tmp_path: Path, quantize: str, memory: str
) -> None:
    words = ["convert", model, tmp_path / "out", "--quantize", quantize, "--max-memory", memory]
    planned = document(*words, "--dry-run")["bytes_to_read"]
    assert planned == document(*words)["bytes_read"]
    keywords: dict[str, Any] = {"quantize": quantize, "max_memory": memory}
    dry = loadstone.convert(model, tmp_path / "python", dry_run=True, **keywords)
    assert dry.bytes_read == planned
    is_twice = planned > 1.5 * (model / "model.safetensors").stat().st_size
    assert is_twice == (quantize != "nf4" and memory == "14MB")


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        (["--method", "task-arithmetic"], 1),
        (["--method", "slerp"], 2),
        (["--method", "ties", "--density", "0.5"], 3),
        (["--method", "ties", "--density", "0.5", "--quantize", "fp8"], 4),
    ],
)
def test_a_dry_run_counts_the_passes_of_a_merge(
    model: Path, other: Path, tmp_path: Path, words: list[str], passes: int
) -> None:
    merge = ["merge", model, f"{other}:0.5", "-o", tmp_path / "out", "--max-memory", "16MB", *words]
    planned = document(*merge, "--dry-run")["bytes_to_read"]
    assert planned == document(*merge)["bytes_read"]
    size = 2 * (model / "model.safetensors").stat().st_size
    assert round(planned / size) == passes


# ---- resume


def interrupted(model: Path, target: Path) -> None:
    """Leave one of three finished shards, as a killed run does."""
    output("convert", model, target, "--shard-size", SHARD, "--part", "1/3")


def test_a_dry_run_of_a_resumed_job_tells_what_is_kept(model: Path, tmp_path: Path) -> None:
    interrupted(model, tmp_path / "out")
    words = ["convert", model, tmp_path / "out", "--shard-size", SHARD, "--resume"]
    text = output(*words, "--dry-run")
    assert "an earlier run finished 1 of 3 files" in text
    assert "8.4 MB are left to write" in text
    dry = loadstone.convert(model, tmp_path / "out", shard_size=SHARD, resume=True, dry_run=True)
    assert [each.code for each in dry.findings] == ["convert.resumed"]
    output(*words)
    assert "convert.resumed" not in output(*words, "--dry-run")


def test_a_dry_run_counts_the_work_that_is_left(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    words = ["convert", model, target, "--shard-size", SHARD]
    whole = document(*words, "--dry-run")
    part = document(*words, "--part", "1/3", "--dry-run")
    written = document(*words, "--part", "1/3")["bytes_written"]
    assert part["bytes_to_write"] == written < whole["bytes_to_write"] / 2
    left = document(*words, "--resume", "--dry-run")
    assert left["bytes_to_write"] == whole["bytes_to_write"] - written
    report = document(*words, "--resume")
    read = report["bytes_read"] + report["bytes_checked"]
    assert left["bytes_to_read"] == pytest.approx(read, rel=0.01)
    dry = document(*words, "--resume", "--dry-run")
    assert dry["bytes_to_read"] == dry["bytes_to_write"] == 0
    text = output(*words, "--resume", "--dry-run")
    assert "0 B to read, 0 B to write" in text and "is already complete" in text
    report = loadstone.convert(model, target, shard_size=SHARD, resume=True, dry_run=True)
    assert report.bytes_read == report.bytes_written == 0


@pytest.mark.parametrize("way", ["--resume", "--finish"])
def test_the_report_counts_the_bytes_that_check_shards(
    model: Path, tmp_path: Path, way: str
) -> None:
    words = ["convert", model, tmp_path / "out", "--shard-size", SHARD]
    for part in ("1/2", "2/2"):
        assert document(*words, "--part", part)["bytes_checked"] == 0
    shards = tmp_path / ".loadstone-out.part" / "files"
    size = sum(each.stat().st_size for each in shards.iterdir())
    copy = tmp_path / "copy"
    shutil.copytree(shards.parent, tmp_path / ".loadstone-copy.part")
    report = document(*words, way)
    assert (report["bytes_read"], report["bytes_checked"]) == (0, size)
    words[2] = copy
    assert "checked   12.6 MB" in output(*words, way)


def test_a_new_kind_of_receipt_counts_the_sources(model: Path, tmp_path: Path) -> None:
    words = ["convert", model, tmp_path / "out", "--shard-size", SHARD]
    document(*words, "--part", "1/1")
    shards = tmp_path / ".loadstone-out.part" / "files"
    size = sum(each.stat().st_size for each in shards.iterdir())
    again = document(*words, "--resume", "--receipt", "sha256-tree")
    assert again["bytes_kept"] == size and again["bytes_checked"] > 2 * size


# ---- verify by samples


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, many: Path) -> Path:
    target = tmp_path_factory.mktemp("quantized") / "out"
    output("convert", many, target, "--quantize", "fp8")
    return target


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("many") / "model", layers=8)


def test_the_progress_of_samples_ends_at_the_bytes_read(many: Path, quantized: Path) -> None:
    progress = ["--progress", "json", "--progress-interval", "0"]
    done = run("verify", many, quantized, "--json", *progress)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    report = json.loads(done.stdout)
    assert report["sampled"] == 8
    size = (many / "model.safetensors").stat().st_size
    assert lines[-1]["bytes_done"] == lines[-1]["bytes_total"] <= report["bytes_read"] < size / 2
    assert all(line["bytes_total"] < size / 2 for line in lines)


def test_samples_of_a_remote_checkpoint_are_read_in_parallel(many: Path, quantized: Path) -> None:
    server = Server()
    server.add_folder(many, "/m")
    lock, in_flight, at_once = threading.Lock(), [0], list[int]()

    def route(_: Seen) -> None:
        with lock:
            in_flight[0] += 1
            at_once.append(in_flight[0])
        time.sleep(0.01)
        with lock:
            in_flight[0] -= 1

    server.route = route
    try:
        assert run("verify", server.url("/m/model.safetensors"), quantized).returncode == 0
    finally:
        server.close()
    # The eight norms, which are not sampled, are read in parallel too.
    assert sum(count > 2 for count in at_once) > len(at_once) / 2 > 16


def test_a_dry_run_fails_as_the_resumed_job_does(model: Path, tmp_path: Path) -> None:
    interrupted(model, tmp_path / "out")
    words = ["convert", model, tmp_path / "out", "--shard-size", SHARD, "--resume"]
    for more in (["--dtype", "f16"], ["--name", "other"]):
        job = document(*words, *more, status=1)
        dry = document(*words, *more, "--dry-run", status=1)
        assert dry == job and "convert.state" in str(dry)
    with pytest.raises(loadstone.Error, match="different options") as caught:
        loadstone.convert(
            model, tmp_path / "out", dtype="float16", shard_size=SHARD, resume=True, dry_run=True
        )
    assert caught.value.code == "convert.state"
    stray = tmp_path / ".loadstone-out.part" / "files" / "stray"
    stray.touch()
    assert document(*words, "--dry-run", status=1) == document(*words, status=1)


def test_a_single_file_tells_before_it_starts_that_it_cannot_be_resumed(
    model: Path, tmp_path: Path
) -> None:
    words = ["convert", model, tmp_path / "out.safetensors", "--resume"]
    said = "the target is a single file, which has no shards to keep"
    assert said in output(*words, "--dry-run")
    assert not (tmp_path / "out.safetensors").exists()
    dry = loadstone.convert(model, tmp_path / "out.safetensors", resume=True, dry_run=True)
    assert said in dry.findings[0].message
    done = run(*words)
    assert said in done.stderr
    assert "already complete" in output(*words) and said not in output(*words)


def test_a_lost_shard_of_a_finished_job_is_named(model: Path, tmp_path: Path) -> None:
    words = ["convert", model, tmp_path / "out", "--shard-size", SHARD, "--resume"]
    output(*words)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / "model-00002-of-00003.safetensors").unlink()
    said = "in which 'model-00002-of-00003.safetensors' is missing or changed"
    dry = loadstone.convert(model, tmp_path / "out", shard_size=SHARD, resume=True, dry_run=True)
    assert said in dry.findings[0].message and dry.findings[0].code == "convert.replaced"
    assert said in output(*words, "--dry-run")
    assert "the run writes all files again" in output(*words)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


# ---- the plan and this machine


def test_a_plan_for_other_devices_does_not_say_that_the_load_can_begin(model: Path) -> None:
    text = output("plan", model, "--device-map", "cuda:99")
    assert "The load can begin" not in text
    assert "The load cannot begin on this machine, which lacks devices." in text


def test_a_plan_counts_the_limit_of_the_address_space(model: Path) -> None:
    def limit() -> None:
        bytes_max = 100 << 20
        resource.setrlimit(resource.RLIMIT_AS, (bytes_max, bytes_max))

    done = subprocess.run(
        [COMMAND, "plan", model], preexec_fn=limit, capture_output=True, text=True, check=False
    )
    assert " are free on this machine\n" in done.stdout
    huge = model.parent / "huge.safetensors"
    header = json.dumps({"a": {"dtype": "U8", "shape": [1 << 28], "data_offsets": [0, 1 << 28]}})
    with huge.open("wb") as file:  # the tensor is a hole
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + (1 << 28))
    done = subprocess.run(
        [COMMAND, "plan", huge], preexec_fn=limit, capture_output=True, text=True, check=False
    )
    assert done.returncode == 5 and "memory.host" in done.stdout


# ---- sources


def split(model: Path, folder: Path) -> list[Path]:
    folder.mkdir()
    output("convert", model, folder / "x.gguf", "--arch", "wan", "--shard-size", SHARD)
    return sorted(folder.glob("*.gguf"))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_missing_part_of_a_split_gguf_is_named(model: Path, tmp_path: Path, lost: int) -> None:
    parts = split(model, tmp_path / "parts")
    parts.pop(lost).unlink()
    name = f"x-0000{lost + 1}-of-00003.gguf"
    for source in [[parts[0]], [tmp_path / "parts"], [tmp_path / "parts/*.gguf"], parts]:
        error = document("inspect", *source, status=3)["error"]
        assert error["code"] == "gg.split" and Path(error["path"]).name == name, source
        assert name in error["found"]
    with pytest.raises(loadstone.Error, match=f"{name}.*this part of the split checkpoint"):
        loadstone.open(parts[0])


def test_an_index_as_the_source_carries_the_files_of_its_folder(
    model: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    output("convert", model, source, "--shard-size", SHARD)
    (source / "tokenizer.json").write_text("{}")
    index = source / "model.safetensors.index.json"
    output("convert", source, tmp_path / "folder", "--dtype", "f16")
    output("convert", index, tmp_path / "command", "--dtype", "f16")
    loadstone.convert(index, tmp_path / "python", dtype="float16")
    with contextlib.closing(Server()) as server:
        server.add_folder(source)
        output("convert", server.url("/model.safetensors.index.json"), tmp_path / "remote",
               "--dtype", "f16")  # fmt: skip

    def content(folder: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}

    assert {"config.json", "tokenizer.json"} < set(content("folder"))
    assert content("folder") == content("command") == content("python") == content("remote")


# ---- verify


def test_missing_shards_come_first_and_all_are_named(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert = ["convert", model, out, "--quantize", "nf4", "--receipt", "xxh3-128"]
    output(*convert, "--shard-size", 1)
    receipt = json.loads((out / "receipt.json").read_text())
    entry = receipt["outputs"][-1]
    names = [f"lost-{i}.safetensors" for i in range(30)]
    receipt["outputs"] += [entry | {"path": name} for name in names]
    (out / "receipt.json").write_text(json.dumps(receipt))
    for path in out.glob("model-*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])  # damages a tensor of each file
    text = output("verify", out, "--receipt", status=1)
    lines = text.splitlines()
    assert lines[0].startswith("  missing    'lost-0.safetensors'")
    assert all(f"'{name}'" in text for name in names)
    differences = document("verify", out, "--receipt", status=1)["differences"]
    assert [each["name"] for each in differences[:30]] == names


@pytest.mark.parametrize("form", ["values", "copy", "receipt"])
def test_verify_reads_a_remote_file_with_more_connections_than_cores(
    tmp_path: Path, form: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {f"w{i}": torch.randn(100, 100) for i in range(40)}
    save_file(tensors, folder / "model.safetensors")
    output("convert", folder, tmp_path / "copy", "--receipt", "xxh3-128")
    running, most = 0, 0
    changed = threading.Condition()

    def late(_: Seen) -> None:
        nonlocal running, most
        with changed:
            running += 1
            most = max(most, running)
            changed.notify_all()
            changed.wait_for(lambda: most > 8, timeout=1)
            running -= 1

    with contextlib.closing(Server()) as server:
        server.add_folder(tmp_path / "copy")
        server.route = late
        words: dict[str, list[object]] = {
            "values": [],
            "copy": [folder],
            "receipt": ["--receipt-file", tmp_path / "copy" / "receipt.json"],
        }
        output("verify", server.url("/model.safetensors"), *words[form])
    assert most > 8  # the limit for local files


# ---- names of transformers in a GGUF mix


def test_experts_that_a_mix_leaves_unquantized_are_a_finding(tmp_path: Path) -> None:
    tensors = {"model.layers.0.self_attn.q_proj.weight": torch.randn(256, 256).bfloat16()}
    for expert in range(4):
        for part, shape in {"gate": (512, 256), "up": (512, 256), "down": (256, 512)}.items():
            name = f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
            tensors[name] = torch.randn(shape).bfloat16()
    save_file(tensors, tmp_path / "moe.safetensors")
    metadata = {"general.architecture": "qwen3moe", "qwen3moe.block_count": 1}
    (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    words = ["convert", tmp_path / "moe.safetensors", tmp_path / "moe.gguf", "--dry-run",
             "--metadata", tmp_path / "metadata.json", "--quantize", "q4_k_m"]  # fmt: skip
    said = "3.1 MB of 3.3 MB are not quantized, because llama.cpp quantizes only tensors whose"
    text = output(*words, "--experts", "fused")
    assert said in text and "experts.down_proj' and 1 other" in text
    assert said not in output(*words)
    fused = [*words, "--experts", "fused", "--include", r"experts\."]
    assert "are not quantized" not in output(*fused)
    keywords: dict[str, Any] = {"metadata": metadata, "quantize": "q4_k_m", "experts": "fused"}
    dry = loadstone.convert(
        tmp_path / "moe.safetensors", tmp_path / "moe.gguf", dry_run=True, **keywords
    )
    assert any(said in each.message for each in dry.findings)


# ---- logs and retries


@pytest.mark.parametrize("form", ["auto", "plain", "json"])
def test_retries_are_printed_once_per_interval(model: Path, tmp_path: Path, form: str) -> None:
    with contextlib.closing(Server()) as server:
        server.add_folder(model)
        server.faults = [Fault("status", times=3)]
        url = server.url("/model.safetensors")
        words = ["convert", url, tmp_path / "out", "--progress", form]
        done = run(*words)
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stderr.splitlines() if "retry" in line]
        assert len(lines) == 1
        if form == "json":
            retry = json.loads(lines[0])["retry"]
            assert 0 < retry.pop("wait_seconds") <= 0.25
            assert retry == {"path": url, "reason": "status 503", "retries": 1}
        else:
            assert lines[0].startswith(f"loadstone: retry: '{url}' failed (status 503)")
        server.faults = [Fault("status", times=3)]
        done = run(*words, "--progress-interval", 0)
        assert sum("retry" in line for line in done.stderr.splitlines()) == 3
        server.faults = [Fault("status", times=1)]
        assert "retry" not in run("inspect", url, "--quiet").stderr  # control


def test_the_log_has_a_line_for_each_retry(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    with contextlib.closing(Server()) as server:
        server.add_folder(model, "/secret")
        server.faults = [Fault("status", times=2)]
        url = server.url("/secret/model.safetensors")
        output("convert", url, tmp_path / "out", "--log", log)
    lines = [line for line in log.read_text().splitlines() if " retry: " in line]
    assert len(lines) == 2
    for line in lines:
        assert f"'{url}' failed (status 503); the next attempt begins in 0." in line
