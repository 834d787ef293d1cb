"""Tests conversions that are killed and then resumed from a different copy of the checkpoint."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from command import COMMAND, run
from remote_fixtures import no_environment
from remote_server import Seen, Server

__all__ = ["no_environment"]

OPTIONS = ["--quantize", "nf4", "--shard-size", "80KB", "--receipt", "sha256-tree"]
SHARDS = 4
# Seconds that each read takes, so that a kill interrupts some reads.
DELAY = 0.004

Kept = list[int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("resume") / "model"
    folder.mkdir()
    weight_map = {}
    for number in range(1, SHARDS + 1):
        prefix = f"model.layers.{number}"
        state = {f"{prefix}.mlp.{i}.weight": torch.randn(96, 512).bfloat16() for i in range(4)}
        state[f"{prefix}.norm.weight"] = torch.randn(512).bfloat16()
        name = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        safetensors.torch.save_file(state, folder / name)
        weight_map |= dict.fromkeys(state, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return folder


class Copy:
    """A copy of the model on a separate server, with different paths and ETags."""

    def __init__(self, model: Path, number: int, etag: str | None = None) -> None:
        self.server = Server()
        self.below = f"/copies/{number}"
        self.server.add_folder(model, self.below)
        self.server.etags = {
            path: f'"{number}-{place}"' if etag is None else etag
            for place, path in enumerate(self.server.files)
        }
        self.server.route = self.late
        self.reached: Callable[[int], None] = lambda _: None

    def late(self, _: Seen) -> None:
        self.reached(len(self.server.seen))
        time.sleep(DELAY)

    @property
    def url(self) -> str:
        return self.server.url(f"{self.below}/")


@pytest.fixture(scope="module")
def copies(model: Path) -> Iterator[list[Copy]]:
    """Yield three copies; the server of the third one has no ETags, so versions look equal."""
    made = [Copy(model, 0), Copy(model, 1), Copy(model, 2, etag="")]
    yield made
    for each in made:
        each.server.close()


def files_of(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(model: Path, copies: list[Copy], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert the local folder; all other outputs must equal this one."""
    out = tmp_path_factory.mktemp("whole") / "out"
    done = run("convert", model, out, *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert len(list(out.glob("*.safetensors"))) >= SHARDS
    assert run("verify", out, "--receipt", "--source", copies[1].url).returncode == 0
    return out


def killed(copy: Copy, out: Path, after: int, seconds: float) -> bool:
    """Kill a run `seconds` after its request number `after`; return False if it finished first."""
    reached = threading.Event()
    copy.server.seen.clear()
    copy.reached = lambda count: reached.set() if count >= after else None
    command = [COMMAND, "convert", copy.url, str(out), *OPTIONS]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not reached.wait(0.01) and process.poll() is None:
            pass
        time.sleep(seconds)
        process.kill()
    copy.reached = lambda _: None
    assert process.returncode in (0, -signal.SIGKILL)
    return process.returncode != 0


def resumed(source: str | Path, out: Path) -> dict[str, Any]:
    done = run("convert", source, out, *OPTIONS, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def kept_of(
    copy: Copy, source: str | Path, folder: Path, expected: Any, after: int, late: float
) -> int | None:
    """Return the bytes that a resumed run kept, or None if the first run was not killed."""
    place, moved = folder / "place", folder / "moved"
    place.mkdir()
    was_killed = killed(copy, place / "out", after, late)
    # Move the work to a new path and new inodes, like those of a different machine.
    shutil.copytree(place, moved, copy_function=shutil.copyfile)
    shutil.rmtree(place)
    kept = resumed(source, moved / "out")["bytes_kept"] if was_killed else None
    assert files_of(moved / "out") == expected, (after, late)
    assert [each.name for each in moved.iterdir()] == ["out"]
    shutil.rmtree(moved)
    return kept


def kill_at(moments: int, model: Path, copies: list[Copy], whole: Path, folder: Path) -> Kept:
    """Return the bytes that each resumed run kept."""
    expected = files_of(whole)
    copies[0].server.seen.clear()
    assert run("convert", copies[0].url, folder / "whole", *OPTIONS).returncode == 0
    assert files_of(folder / "whole") == expected
    requests = len(copies[0].server.seen)
    headers = next(at for at, seen in enumerate(copies[0].server.seen) if seen.begin > 0)
    # Kill some runs while they read headers, most of them during data, and some after the last
    # request, when they rename shards and write receipts.
    steps = headers // 4 + (requests - headers) + 4
    kept: Kept = []
    for moment in itertools.count():
        if len(kept) == moments:
            break
        assert moment < 2 * moments, "most runs were done before they were killed"
        after = 1 + headers - headers // 4 + moment * steps // moments % steps
        late = max(after - requests, 0) * DELAY
        source = [copies[1].url, copies[2].url, model][moment % 3]
        found = kept_of(copies[0], source, folder, expected, min(after, requests), late)
        kept += [] if found is None else [found]
    late = 4 * DELAY
    while not any(kept):  # on a busy machine, runs write long after their last request
        assert late < 600 * DELAY, "no run kept anything"
        found = kept_of(copies[0], model, folder, expected, requests, late)
        kept += [] if found is None else [found]
        late *= 1.2
    return kept


def test_killed_and_resumed_with_another_copy(
    model: Path, copies: list[Copy], whole: Path, tmp_path: Path
) -> None:
    kept = kill_at(6, model, copies, whole, tmp_path)
    assert any(kept)  # control: some runs did not start over


@pytest.mark.sweep
def test_killed_at_50_moments(model: Path, copies: list[Copy], whole: Path, tmp_path: Path) -> None:
    kept = kill_at(50, model, copies, whole, tmp_path)
    print(f"{sum(map(bool, kept))} of {len(kept)} kept something")
    assert sum(map(bool, kept)) >= 5


def finished(source: str, out: Path) -> Path:
    """Finish one of two parts of a conversion; return its work folder."""
    done = run("convert", source, out, *OPTIONS, "--part", "1/2")
    assert done.returncode == 0, done.stderr
    return out.parent / f".loadstone-{out.name}.part"


def redone(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in report["findings"] if each["code"] == "convert.redone"]


def test_a_flipped_byte_in_a_finished_shard(
    copies: list[Copy], whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shard = sorted((finished(copies[0].url, out) / "files").iterdir())[0]
    raw = bytearray(shard.read_bytes())
    raw[-100] ^= 1
    shard.write_bytes(raw)
    report = resumed(copies[1].url, out)
    (finding,) = redone(report)
    assert finding["target"] == shard.name
    assert "tensor 'model.layers" in finding["message"]
    assert report["bytes_kept"] > 0
    assert files_of(out) == files_of(whole)


def test_another_byte_in_the_other_copy(
    model: Path, copies: list[Copy], whole: Path, tmp_path: Path
) -> None:
    """If the ETag differs, the tensors of finished shards are read again and compared."""
    out = tmp_path / "out"
    work = finished(copies[0].url, out)
    receipt = json.loads(sorted(work.glob("*.receipt.json"))[0].read_text())
    (source,) = receipt["sources"][:1]
    tensor = source["tensors"][0]
    other = Copy(model, 4)
    path = f"{other.below}/{source['path']}"
    raw = bytearray(other.server.files[path])
    raw[tensor["begin"] + 1] ^= 1
    other.server.files[path] = bytes(raw)
    try:
        report = resumed(other.url, out)
        assert any(tensor["name"] in each["message"] for each in redone(report))
        assert run("verify", out, "--receipt", "--source", other.url).returncode == 0
        compared = run("verify", out, "--receipt", "--source", copies[1].url)
        assert compared.returncode == 1
        assert tensor["name"] in compared.stdout
    finally:
        other.server.close()
    assert files_of(out) != files_of(whole)
