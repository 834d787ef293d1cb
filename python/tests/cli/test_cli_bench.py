"""loadstone bench prints every figure, with the limit next to each load, and changes no file."""

import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from remote_server import Server
from safetensors.torch import save_file

torch = pytest.importorskip("torch")

MIB = 1 << 20
LIMITS = {"new_memory", "memory_copy", "page_cache", "page_cache_to_new_memory", "disk", "write"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keep the rates from the plans of other tests, which would show a duration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write two shards of 12 and 4 MiB; only the second has tensors off sector boundaries."""
    folder = tmp_path_factory.mktemp("model")
    save_file({f"a{i}": torch.randn(MIB) for i in range(3)}, folder / "a.safetensors")
    save_file({"b": torch.randn(MIB), "odd": torch.randn(3)}, folder / "b.safetensors")
    return folder


def bench(run, *words):
    return json.loads(run("bench", *words, "--seconds", 0, "--json", status=0).stdout)


def test_all_is_measured(run, model):
    before = {path: hashlib.sha256(path.read_bytes()).digest() for path in model.iterdir()}
    said = bench(run, model)
    assert said["sample_bytes"] == said["total_bytes"] == 16 * MIB + 12
    assert said["sample_targets"] == said["total_targets"] == 5
    assert said["rounds"] == 3
    assert said["limits"].keys() == LIMITS
    for name, rates in said["limits"].items():
        if rates is None:  # the file system is in memory, or does not support direct reads
            assert name in ("disk", "write") and said["not_measured"][f"limits.{name}"]
            continue
        assert 0 < rates["lowest"] <= rates["bytes_per_second"] <= rates["highest"]
    load = said["loads"]["page_cache"]
    share = load["bytes_per_second"] / said["limits"][load["limit"]]["bytes_per_second"]
    assert load["of_limit"] == pytest.approx(min(1, share))
    assert load["bound_by"] in {"page_cache_to_new_memory", "processor", "waiting"}
    assert before == {path: hashlib.sha256(path.read_bytes()).digest() for path in model.iterdir()}


def test_a_file_system_in_memory_has_no_disk(run, model):
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("no file system in memory here")
    copy = folder / f"loadstone-bench-{os.getpid()}.safetensors"
    try:
        copy.write_bytes((model / "a.safetensors").read_bytes())
        said = bench(run, copy)
    finally:
        copy.unlink(missing_ok=True)
    assert said["limits"]["disk"] is None
    assert said["loads"]["disk"] is None
    assert said["not_measured"].keys() >= {"limits.disk", "loads.disk"}


def test_a_sample_is_the_first_targets(run, model):
    said = bench(run, model, "--sample", "9MiB")
    assert said["sample_targets"] == 2
    assert said["sample_bytes"] == 8 * MIB


def test_only_a_part_of_a_large_target_is_measured(run, model, tmp_path):
    said = bench(run, model, "--sample", "5MiB")
    assert said["sample_targets"] == 2 and 5 * MIB - 16384 <= said["sample_bytes"] <= 5 * MIB
    stack = {
        "experts": torch.randn(2, 1024, 512).to(torch.bfloat16),
        "w": torch.randn(1024, 512).to(torch.bfloat16),
    }
    save_file(stack, tmp_path / "stack.safetensors")
    for sample in (1 * MIB, MIB // 4 + 5000, 100_000):
        for more in ([], ["--dtype", "f32"]):
            said = bench(run, tmp_path / "stack.safetensors", "--sample", sample, *more)
            assert 0.3 * sample < said["sample_bytes"] <= sample
    assert "none that fits in --sample" in run("bench", model, "--sample", 1, status=2).stderr


def test_options_of_the_plan_count(run, model):
    assert bench(run, model, "--dtype", "bf16")["sample_bytes"] == 16 * MIB + 12


def test_adapters_whose_files_have_one_name_are_measured(run, tmp_path):
    save_file({"l.weight": torch.ones(64, 32)}, tmp_path / "base.safetensors")
    words = [tmp_path / "base.safetensors"]
    for rank in (2, 4):
        folder = tmp_path / f"a{rank}"
        folder.mkdir()
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        left, right = torch.ones(rank, 32), torch.ones(64, rank)
        name = "base_model.model.l.lora_{}.weight"
        save_file(
            {name.format("A"): left, name.format("B"): right}, folder / "adapter_model.safetensors"
        )
        words += ["--lora", folder]
    assert bench(run, *words)["sample_bytes"] == 4 * (64 * 32 + (2 + 4) * (64 + 32))


def test_for_people(run, model):
    text = run("bench", model, "--seconds", 0, status=0).stdout
    assert text.startswith("a load from the page cache reaches ")
    cores = min(os.cpu_count(), len(os.sched_getaffinity(0)))
    assert f"medians of 3 rounds; 4 threads on {cores} core" in text or cores > 4
    assert " of page cache to new memory; " in text and " reader" in text
    for title in ("new memory", "copy from memory to memory", "page cache to new memory", "loads"):
        assert f"\n{title}" in text


def test_more_time_is_more_rounds(run, model):
    done = run("bench", model, "--seconds", 6, "--sample", "4MiB", "--json", status=0)
    assert json.loads(done.stdout)["rounds"] > 3


def test_nothing_to_measure_is_said(run, tmp_path):
    save_file({}, tmp_path / "empty.safetensors")
    assert "nothing to measure" in run("bench", tmp_path, status=2).stderr


def test_other_machines_are_refused(run, model):
    server = Server()
    server.add_folder(model)
    try:
        done = run("bench", server.url("/a.safetensors"), status=2)
    finally:
        server.close()
    assert "files on this machine" in done.stderr


def test_ctrl_c_ends_it(command, model):
    with subprocess.Popen(
        [command, "bench", model, "--seconds", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
