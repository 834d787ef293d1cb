"""Plans and dry runs estimate their duration from the rates that `loadstone bench` has measured."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from remote_server import Server
from safetensors.torch import save_file

import loadstone

torch = pytest.importorskip("torch")

GB = 10**9


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "loadstone" / "bench.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file({"a": torch.randn(1250, 800)}, tmp_path / "a.safetensors")  # 4 MB
    return tmp_path / "a.safetensors"


def mount_of(path: Path) -> str:
    """Return the folder at which the file system of an existing path is mounted."""
    path = path.resolve()
    while not path.is_mount():
        path = path.parent
    return str(path)


@pytest.fixture
def rates(run: Callable, model: Path, cache: Path) -> dict:
    """Return the rates that bench wrote, and rates with which a read takes 40 s."""
    run("bench", model, "--seconds", 0, "--json", status=0)
    rates = json.loads(cache.read_text())
    assert rates["rates"] == []  # 4 MB are too few
    rate = {"mount": mount_of(model), "is_disk": True, "date": "2026-11-30"}
    rates["rates"] = [
        rate | {"is_write": False, "bytes_per_second": 100_000},
        rate | {"is_write": True, "bytes_per_second": 200_000},
    ]
    return rates


def duration(run: Callable, *words: object) -> dict:
    return json.loads(run(*words, "--json", status=0).stdout)["duration"]


def test_bench_saves_the_rates_of_each_file_system(run, cache, tmp_path):
    data = tmp_path / "large.safetensors"
    header = json.dumps({"a": {"dtype": "U8", "shape": [1 << 28], "data_offsets": [0, 1 << 28]}})
    with data.open("wb") as file:  # the tensor is a hole
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + (1 << 28))
    words = ["bench", data, "--seconds", 0, "--json"]
    document = json.loads(run(*words, "--write", tmp_path, status=0).stdout)
    rates = json.loads(cache.read_text())
    assert rates["host"] == os.uname().nodename
    read, write = sorted(rates["rates"], key=lambda rate: rate["is_write"])
    assert read["mount"] == write["mount"] == mount_of(data)
    assert write["bytes_per_second"] == int(document["limits"]["write"]["bytes_per_second"])
    assert [path.name for path in cache.parent.iterdir()] == ["bench.json"]
    # A run without --write keeps the rate of writes, and those of other file systems.
    other = read | {"mount": "/nowhere", "bytes_per_second": 7}
    cache.write_text(json.dumps(rates | {"rates": [read | {"bytes_per_second": 1}, write, other]}))
    assert run(*words[:-1], status=0).stderr == ""
    kept = json.loads(cache.read_text())["rates"]
    assert write in kept and other in kept and len(kept) == 3
    assert all(rate["bytes_per_second"] != 1 for rate in kept)


def test_a_rate_of_few_bytes_is_not_saved(run, model, cache):
    hint = run("bench", model, "--seconds", 0, status=0).stderr
    assert (
        "the rate of reads is not saved, because 4.0 MB are too few: measure at least 256Mi" in hint
    )
    assert json.loads(cache.read_text())["rates"] == []


def test_a_plan_estimates_its_duration(run, model, cache, rates, tmp_path):
    cache.write_text(json.dumps(rates))
    rate = "100.0 kB/s read from the disk on 2026-11-30"
    text = f"about 40 s (measured by 'loadstone bench': {rate})"
    saved = tmp_path / "plan.json"
    assert f"duration  {text}\n" in run("plan", model, "-o", saved, status=0).stdout
    found = duration(run, "plan", model)
    assert found == {"seconds": 40.0, "excludes_computing": False, "text": text}
    assert "duration" not in saved.read_text()
    # The document of --json is a plan too.
    shown = tmp_path / "shown.json"
    shown.write_text(run("plan", model, "--json", status=0).stdout)
    assert "duration" not in loadstone.Plan.load(shown).to_json()
    run("load", "--plan", shown, status=0)


def test_a_plan_of_python_has_the_same_duration(run, model, cache, rates):
    with loadstone.skeleton():
        module = torch.nn.Module()
        module.a = torch.nn.Parameter(torch.empty(1250, 800))
    plan = loadstone.plan(module, model)
    for content in (json.dumps(rates), json.dumps(rates | {"host": "other"})):
        cache.write_text(content)
        assert plan.duration._asdict() == duration(run, "plan", model)
    assert plan.duration.seconds is None
    assert plan.duration.text == "unknown: run 'loadstone bench CHECKPOINT'"


def test_a_dry_run_estimates_its_duration(run, model, cache, rates, tmp_path):
    cache.write_text(json.dumps(rates))
    words = ["convert", model, tmp_path / "b.safetensors", "--dry-run"]
    found = duration(run, *words)
    assert found["seconds"] == pytest.approx(60, rel=0.01)
    assert found["text"].startswith("about 1:0") and "200.0 kB/s written on " in found["text"]
    assert "duration  about 1:0" in run(*words, status=0).stdout
    words = ["convert", model, tmp_path / "b.gguf", "--dry-run", "--arch", "test"]
    found = duration(run, *words, "--quantize", "q8_0", "--include", "a")
    assert found["excludes_computing"] and found["text"].startswith("about ")
    measure = "(run 'loadstone bench CHECKPOINT --quantize q8_0')"
    assert f", plus the time to encode to q8_0 {measure} (measured by" in found["text"]
    for mount, is_write in (("/nowhere", True), (mount_of(model), False)):
        write = rates["rates"][1] | {"mount": mount, "is_write": is_write}
        cache.write_text(json.dumps(rates | {"rates": [rates["rates"][0], write]}))
        found = duration(run, *words)
        assert found["seconds"] is None
        command = "loadstone bench CHECKPOINT --write FOLDER"
        assert found["text"] == f"unknown: run '{command}'"
        found = duration(run, *words, "--quantize", "q8_0", "--include", "a")
        assert found["text"] == f"unknown: run '{command} --quantize q8_0'"
        assert duration(run, "plan", model)["seconds"] == 40.0
    cache.write_text(json.dumps(rates | {"rates": []}))
    assert "bench CHECKPOINT --write FOLDER'" in duration(run, *words)["text"]
    cache.write_text(json.dumps(rates | {"rates": rates["rates"][1:]}))
    assert duration(run, *words)["text"] == "unknown: run 'loadstone bench CHECKPOINT'"


def test_a_dry_run_estimates_the_time_to_encode(run, model, cache, rates, tmp_path):
    words = ["convert", model, tmp_path / "b.gguf", "--dry-run", "--arch", "test"]
    words += ["--quantize", "q8_0", "--include", "a"]
    cache.write_text(json.dumps(rates))
    before = duration(run, *words)["seconds"]
    bench = ["bench", model, "--seconds", 0, "--json"]
    for encoding in ("nf4", "fp8", "iq2_xxs", "q8_0"):  # iq2_xxs needs an importance matrix
        bench += ["--quantize", encoding]
    document = json.loads(run(*bench, status=0).stdout)
    saved = json.loads(cache.read_text())
    assert saved["rates"][:2] == rates["rates"]
    names = [each["encoding"] for each in saved["rates"][2:]]
    assert names == ["fp8", "iq2_xxs", "nf4", "q8_0"]
    rate = saved["rates"][-1]
    assert rate["bytes_per_second"] == int(document["limits"]["encode_q8_0"]["bytes_per_second"])
    saved["rates"][-1] = rate | {"bytes_per_second": 20_000, "date": "2026-11-30"}
    cache.write_text(json.dumps(saved))
    found = duration(run, *words)
    assert found["seconds"] == pytest.approx(before + 100)  # 2 MB of BF16
    assert not found["excludes_computing"]
    assert "20.0 kB/s of BF16 encoded to q8_0 on 2026-11-30)" in found["text"]
    wrong = run("bench", model, "--quantize", "q9", status=2).stderr
    assert "--quantize: unknown encoding 'q9'" in wrong


UNUSABLE = {
    "none": None,
    "of another host": {"host": "other"},
    "of another processor": {"processor": "other"},
    "no rate": {"rates": []},
    "a rate of zero": {"rates": [{"bytes_per_second": 0}]},
    "a negative rate": {"rates": [{"bytes_per_second": -1}]},
    "of another file system": {"rates": [{"mount": "/nowhere"}]},
    "an earlier version": {"version": 1},
    "a later version": {"version": 3},
    "an unknown field": {"more": 1},
    "no object": "[]",
    "empty": "",
    "cut off": '{"version": 1, "host"',
    "not UTF-8": "\udcff",
    "long": "[" * 100_000,
    "a folder": Path,
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_without_usable_rates_the_duration_is_unknown(run, model, cache, rates, case):
    content = UNUSABLE[case]
    cache.unlink()
    if isinstance(content, str):
        cache.write_bytes(content.encode("utf-8", "surrogateescape"))
    elif isinstance(content, dict):
        first = rates["rates"][0]
        if "rates" in content:
            content = {"rates": [first | each for each in content["rates"]]}
        cache.write_text(json.dumps(rates | content))
    elif content is not None:
        cache.mkdir()
    unknown = "unknown: run 'loadstone bench CHECKPOINT'"
    found = duration(run, "plan", model)
    assert found == {"seconds": None, "excludes_computing": False, "text": unknown}
    assert f"duration  {unknown}\n" in run("plan", model, status=0).stdout


def test_no_cache_folder_is_no_error(run, model, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    done = run("bench", model, "--seconds", 0, status=0)
    assert "could not be saved" in done.stderr
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    assert duration(run, "plan", model)["seconds"] is None


def test_files_on_a_server_have_no_known_duration(run, model, cache, rates):
    cache.write_text(json.dumps(rates))
    server = Server()
    try:
        server.files["/a.safetensors"] = model.read_bytes()
        found = duration(run, "plan", server.url("/a.safetensors"))
    finally:
        server.close()
    assert found["seconds"] is None
    assert found["text"].endswith("measures only files on this machine")


def test_the_duration_is_of_the_work_that_is_left(run, model, cache, rates, tmp_path):
    cache.write_text(json.dumps(rates))
    words = ["convert", model, tmp_path / "out", "--dtype", "f32", "--resume"]
    assert duration(run, *words, "--dry-run")["seconds"] == pytest.approx(60, rel=0.01)
    run(*words, status=0)
    assert duration(run, *words, "--dry-run")["seconds"] == 0
