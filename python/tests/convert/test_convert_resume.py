"""Conversions that are killed and resumed, and parts converted by parallel processes."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from command import COMMAND
from safetensors.torch import save_file

import loadstone

SHARD = 1_100_000
OPTIONS = ["--dtype", "f16", "--shard-size", str(SHARD)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 48 MiB in two shards of a folder."""
    folder = tmp_path_factory.mktemp("source")
    generator = torch.Generator().manual_seed(1)
    for shard in range(2):
        state = {
            f"layers.{shard}.{i}": torch.randn(512, 1024, generator=generator) for i in range(12)
        }
        save_file(state, folder / f"model-0000{shard + 1}-of-00002.safetensors")
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files that one uninterrupted process writes."""
    target = tmp_path_factory.mktemp("whole") / "out"
    report = loadstone.convert(source, target, dtype="float16", shard_size=SHARD)
    assert report.files == len(report.outputs) - 1 == 24
    return contents(target)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def start(source: Path, target: Path, *options: object) -> subprocess.Popen[bytes]:
    command = [COMMAND, "convert", source, target, *OPTIONS, *options]
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def run(source: Path, target: Path, *options: object, status: int = 0) -> str:
    command = [COMMAND, "convert", source, target, *OPTIONS, *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def assert_shards_are_whole(folder: Path, whole: dict[str, bytes]) -> int:
    """Check each file under a final name; return their number."""
    found = contents(folder) if folder.exists() else {}
    for name, value in found.items():
        assert value == whole[name], name
    return len(found)


# --- kill -9 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True], ids=["new", "replaced"])
def test_killed_at_any_moment_and_resumed(
    source: Path, whole: dict[str, bytes], tmp_path: Path, old: bool
) -> None:
    """After each of 25 kills, the target is missing or complete; a resumed run completes it."""
    target = tmp_path / "out"
    work = tmp_path / ".loadstone-out.part"
    former: dict[str, bytes] = {}
    if old:
        loadstone.convert(source, tmp_path / "former", dtype="bfloat16", shard_size=SHARD)
        (tmp_path / "former/config.json").write_text("{}")
        former = contents(tmp_path / "former")
    begin = time.perf_counter()
    run(source, target)
    duration = time.perf_counter() - begin
    shutil.rmtree(target)
    random_source = random.Random(1 + old)
    kills = kept = runs = 0
    while kills < 25:
        runs += 1
        assert runs < 500
        if old and not target.exists():
            shutil.copytree(tmp_path / "former", target)
        process = start(source, target, *(["--resume"] if work.exists() else []))
        time.sleep(random_source.random() * duration)
        process.kill()
        killed = process.wait() == -signal.SIGKILL
        kills += killed
        found = contents(target) if target.exists() else {}
        expected = whole | ({"config.json": b"{}"} if old else {})
        assert found in ({}, former, expected)
        if found == expected:
            duration *= 0.95  # the kill came too late, so make the next one earlier
        elif work.exists():
            kept += assert_shards_are_whole(work / "files", expected) > 0
        if found == expected or random_source.random() < 0.5:
            report = json.loads(run(source, target, "--resume", "--json"))
            assert report["bytes_kept"] >= 0
            assert contents(target) == expected
            shutil.rmtree(target)
            assert not work.exists()
    assert kept > 5  # some runs had shards to resume from


def test_a_run_that_begins_anew_after_a_kill(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    target, work = tmp_path / "out", tmp_path / ".loadstone-out.part"
    kill_when_begun(start(source, target), work, 3)
    run(source, target)
    assert contents(target) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == [".loadstone-out.done", "out"]


def test_the_control_a_shard_that_is_not_whole_is_seen(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    target, work = tmp_path / "out", tmp_path / ".loadstone-out.part"
    kill_when_begun(start(source, target), work, 3)
    shard = next((work / "files").iterdir())
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(AssertionError):
        assert_shards_are_whole(work / "files", whole)
    run(source, target, "--resume")
    assert contents(target) == whole


def kill_when_begun(process: subprocess.Popen[bytes], work: Path, shards: int) -> None:
    """Kill the process once this many shards exist; it must not have finished by then."""
    files = work / "files"
    while process.poll() is None and (not files.exists() or len(list(files.iterdir())) < shards):
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL


# --- parts ---------------------------------------------------------------------------------------


def begun_and_stopped(source: Path, target: Path, work: Path) -> subprocess.Popen[bytes]:
    """Start part 3 of 4, and stop it while it writes a shard."""
    while True:
        process = start(source, target, "--part", "3/4", "--threads", 1)
        while process.poll() is None and not list(work.glob("*.safetensors.unfinished-*")):
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        if process.poll() is None and list(work.glob("*.safetensors.unfinished-*")):
            return process
        process.kill()
        process.wait()
        shutil.rmtree(work, ignore_errors=True)


def test_four_processes_one_killed(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    target, work = tmp_path / "out", tmp_path / ".loadstone-out.part"
    third = begun_and_stopped(source, target, work)
    others = [start(source, target, "--part", f"{i}/4") for i in (1, 2, 4)]
    assert [other.wait() for other in others] == [0, 0, 0]
    assert "[convert.locked]" in run(source, target, "--finish", status=1)
    assert "[convert.locked]" in run(source, target, "--part", "3/4", status=1)
    third.kill()
    assert third.wait() == -signal.SIGKILL
    assert 18 <= assert_shards_are_whole(work / "files", whole) < 24
    assert "part 3 of 4 again" in run(source, target, "--finish", status=1)
    assert not target.exists()
    run(source, target, "--part", "3/4")
    run(source, target, "--finish")
    assert contents(target) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == [".loadstone-out.done", "out"]


def test_parts_from_python(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    target = tmp_path / "out"
    options: dict[str, Any] = {"dtype": "float16", "shard_size": SHARD}
    with pytest.raises(loadstone.Error) as missing:
        loadstone.convert(source, target, finish=True, **options)
    assert missing.value.code == "convert.incomplete"
    for i in (2, 1):
        report = loadstone.convert(source, target, part=(i, 2), **options)
        assert len(report.outputs) == 12
        assert all(path.stat().st_size for path in report.outputs)
    with pytest.raises(loadstone.Error) as other:
        loadstone.convert(source, target, part=(1, 2), shard_size=SHARD)
    assert other.value.code == "convert.state"
    again = loadstone.convert(source, target, part=(1, 2), **options)
    assert again.bytes_written == 0
    assert again.bytes_kept > 0
    loadstone.convert(source, target, finish=True, **options)
    assert contents(target) == whole


@pytest.mark.parametrize(
    "name", ["model.safetensors", "modeling_x.py", "notes/new.txt", ".DS_Store"]
)
@pytest.mark.parametrize("ending", [{"finish": True}, {"resume": True}], ids=["finish", "resume"])
def test_files_that_somebody_puts_among_the_shards_are_refused(
    source: Path, whole: dict[str, bytes], tmp_path: Path, ending: dict[str, bool], name: str
) -> None:
    """An added file would become part of the target, unless the operating system made it."""
    target = tmp_path / "out"
    options: dict[str, Any] = {"dtype": "float16", "shard_size": SHARD}
    for i in (1, 2):
        loadstone.convert(source, target, part=(i, 2), **options)
    foreign = tmp_path / ".loadstone-out.part" / "files" / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("foreign")
    if not name.startswith("."):
        with pytest.raises(loadstone.Error, match=re.escape(repr(name))) as caught:
            loadstone.convert(source, target, **ending, **options)
        assert caught.value.code == "convert.state" and not target.exists()
        assert foreign.read_text() == "foreign"
        foreign.unlink()
        if foreign.parent.name == "notes":
            foreign.parent.rmdir()
    loadstone.convert(source, target, **ending, **options)
    assert {each: data for each, data in contents(target).items() if each != ".DS_Store"} == whole


def of_values(folder: Path, values: float) -> Path:
    state = {f"layers.{i}": torch.full((64, 64), values + i) for i in range(6)}
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    return folder


# The sources of all steps except the last. "a" and its copy "c" have equal values; "b" differs.
BEGUN: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "a, a": [("a", {"part": (1, 2)}), ("a", {"part": (2, 2)})],
    "a, c": [("a", {"part": (1, 2)}), ("c", {"part": (2, 2)})],
    "a, b": [("a", {"part": (1, 2)}), ("b", {"part": (2, 2)})],
    "b, a": [("b", {"part": (1, 2)}), ("a", {"part": (2, 2)})],
    "b, a of 3": [
        ("b", {"part": (1, 2)}),
        ("a", {"part": (2, 3)}),
        ("a", {"part": (3, 3)}),
    ],
    "a, b, c": [("a", {"part": (1, 3)}), ("b", {"part": (2, 3)}), ("c", {"part": (3, 3)})],
    "a": [("a", {"part": (1, 2)})],
}


@pytest.mark.parametrize("receipt", [None, "xxh3-128"])
@pytest.mark.parametrize("last", ["a", "b", "c"])
@pytest.mark.parametrize("begun", BEGUN)
def test_no_output_mixes_two_sources(
    begun: str, last: str, receipt: str | None, tmp_path: Path
) -> None:
    sources = {name: of_values(tmp_path / name, 10.0 * (name == "b")) for name in "abc"}
    options: dict[str, Any] = {"dtype": "float16", "shard_size": 8192, "receipt": receipt}
    (tmp_path / "whole").mkdir()
    expected = {}
    for name, folder in sources.items():
        loadstone.convert(folder, tmp_path / "whole" / name, **options)
        expected[name] = contents(tmp_path / "whole" / name)
    assert expected["a"] == expected["c"] != expected["b"]
    target = tmp_path / "out"
    for name, step in BEGUN[begun]:
        loadstone.convert(sources[name], target, **step, **options)
    used = {name for name, _ in BEGUN[begun]}
    is_one = len({name == "b" for name in used | {last}}) == 1
    if is_one and begun != "a":
        loadstone.convert(sources[last], target, finish=True, **options)
    else:
        with pytest.raises(loadstone.Error, match="cannot be used") as caught:
            loadstone.convert(sources[last], target, finish=True, **options)
        assert caught.value.code == "convert.incomplete" and not target.exists()
        loadstone.convert(sources[last], target, resume=True, **options)
    assert contents(target) == expected[last]


@pytest.mark.parametrize("encoding", ["nvfp4", "nf4"])
def test_quantized_parts(tmp_path: Path, encoding: str) -> None:
    """Partners in different parts share a scale, and the last step writes the config."""
    source = tmp_path / "source"
    source.mkdir()
    generator = torch.Generator().manual_seed(1)
    state = {
        f"model.layers.{layer}.{name}.weight": torch.randn(256, 128, generator=generator) * scale
        for layer in range(3)
        for scale, name in enumerate(
            ("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj",
             "self_attn.k_proj", "self_attn.v_proj"), 1)
    }  # fmt: skip
    save_file(state, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama"}')
    options: dict[str, Any] = {"quantize": encoding, "shard_size": 30_000}
    report = loadstone.convert(source, tmp_path / "whole", **options)
    assert report.files > 5
    for i in (3, 1, 2):
        loadstone.convert(source, tmp_path / "out", part=(i, 3), **options)
    with pytest.raises(loadstone.Error) as other:
        loadstone.convert(source, tmp_path / "out", finish=True, exclude="down", **options)
    assert other.value.code == "convert.state"
    loadstone.convert(source, tmp_path / "out", finish=True, **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert "quantization_config" in json.loads((tmp_path / "out/config.json").read_text())


# --- finished jobs -------------------------------------------------------------------------------


def test_a_finished_job_does_nothing(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    target = tmp_path / "out"
    options: dict[str, Any] = {"dtype": "float16", "shard_size": SHARD, "resume": True}
    run(source, target, "--resume")
    complete = f"'{target}' is already complete: an earlier run of this conversion finished it"
    assert run(source, target, "--resume").startswith(complete)
    assert complete in run(source, target, "--resume", "--dry-run")
    report = json.loads(run(source, target, "--resume", "--json"))
    assert report["bytes_read"] == report["bytes_written"] == 0 < report["bytes_kept"]
    for dry_run in (True, False):
        made = loadstone.convert(source, target, dry_run=dry_run, **options)
        (finding,) = (each for each in made.findings if each.code == "convert.complete")
        assert finding.message.startswith(complete) and finding.severity == "info"
    assert made.bytes_read == made.bytes_written == 0 < made.bytes_kept
    assert contents(target) == whole
    assert run(source, target, "--part", "1/2").startswith(complete)
    assert run(source, target, "--finish").startswith(complete)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".loadstone-out.done", "out"]
    executor = Results()
    again = converted(source, target, executor)
    assert again.bytes_read == again.bytes_written == 0
    assert contents(target) == whole


# --- executors -----------------------------------------------------------------------------------


class Results:
    """An executor whose futures are not those of concurrent.futures."""

    def submit(self, call: Any, *arguments: Any) -> Any:
        class Result:
            def result(self) -> Any:
                return call(*arguments)

            def cancel(self) -> None: ...

        return Result()


def converted(source: Path, target: Path, cluster: Any, **options: Any) -> loadstone.ConvertReport:
    return loadstone.convert(
        source, target, dtype=torch.float16, shard_size=SHARD, cluster=cluster, **options
    )


@pytest.mark.parametrize("engine", ["processes", "threads", "another"])
def test_executors(source: Path, whole: dict[str, bytes], tmp_path: Path, engine: str) -> None:
    import multiprocessing

    seen: list[tuple[int, int]] = []
    rules = [{"op": "rename", "sources": ["(.*)"], "targets": ["$1"]}]

    def convert(cluster: Any) -> loadstone.ConvertReport:
        return converted(
            source, tmp_path / "out", cluster, rules=rules, progress=lambda *at: seen.append(at)
        )

    executor: Executor
    if engine == "processes":
        with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as executor:
            report = convert(executor)
    elif engine == "threads":
        with ThreadPoolExecutor(3) as executor:
            report = convert(executor)
    else:
        report = convert(Results())
    assert contents(tmp_path / "out") == whole
    assert report.bytes_written == sum(map(len, whole.values()))
    assert report.bytes_read >= 48 << 20
    assert len(seen) == {"processes": 3, "threads": 3}.get(
        engine, min(24, max(8, os.cpu_count() or 1))
    )
    assert seen[-1][0] == seen[-1][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".loadstone-out.done", "out"]


def test_an_error_of_a_part_is_the_callers(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "source")

    class Breaking(ThreadPoolExecutor):
        """Damage the source after loadstone has divided the work."""

        def submit(self, *arguments: Any, **options: Any) -> Future[Any]:
            for path in copy.iterdir():
                os.truncate(path, 1000)
            return super().submit(*arguments, **options)

    with Breaking(2) as executor, pytest.raises(loadstone.FormatError) as caught:
        converted(copy, tmp_path / "out", executor)
    assert caught.value.code.startswith("st.")
    assert caught.value.path
    assert not (tmp_path / "out").exists()


def test_what_tasks_cannot_be_told(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    with ThreadPoolExecutor(1) as executor:
        for field, given in {
            "source": {"source": loadstone.inspect(source)},
            "cluster": {"part": (1, 2)},
            "shard_size": {"target": tmp_path / "out.safetensors"},
        }.items():
            arguments = {"source": source, "target": target} | given
            with pytest.raises(loadstone.PlanError) as caught:
                converted(cluster=executor, **arguments)
            assert caught.value.field == field
    with pytest.raises(loadstone.PlanError, match="cluster"):
        converted(source, target, "slurm")
    same = [{"op": "rename", "sources": [".*"], "targets": ["same"]}]
    with ThreadPoolExecutor(1) as executor, pytest.raises(loadstone.PlanError) as refused:
        converted(source, target, executor, rules=same)
    assert refused.value.code == "plan.duplicate"
    assert refused.value.findings
    assert list(tmp_path.iterdir()) == []


def test_a_pool_whose_process_is_killed(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """The pool breaks, and a second pool continues from the shards of the first one."""
    import multiprocessing
    from concurrent.futures.process import BrokenProcessPool

    work = tmp_path / ".loadstone-out.part"

    def kill(pool: ProcessPoolExecutor) -> None:
        while not list(work.glob("files/*")):
            time.sleep(0.001)
        os.kill(next(iter(pool._processes)), signal.SIGKILL)

    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        killer = threading.Thread(target=kill, args=(pool,))
        killer.start()
        with pytest.raises(BrokenProcessPool):
            converted(source, tmp_path / "out", pool, parts=12)
        killer.join()
    assert not (tmp_path / "out").exists()
    with ThreadPoolExecutor(2) as executor:
        report = converted(source, tmp_path / "out", executor)
    assert report.bytes_kept > 0
    assert contents(tmp_path / "out") == whole


def test_errors_can_be_sent_to_another_process() -> None:
    import pickle

    with pytest.raises(loadstone.LoadError) as caught:
        loadstone.inspect("/nowhere/at/all")
    sent = pickle.loads(pickle.dumps(caught.value))
    assert type(sent) is type(caught.value)
    assert str(sent) == str(caught.value)
    assert vars(sent) == vars(caught.value)
