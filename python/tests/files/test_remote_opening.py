"""The shards of a remote checkpoint are opened concurrently, with the findings of a local one."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import gguf
import pytest
import torch
import torch.distributed.checkpoint as dcp
from command import run
from remote_fixtures import no_environment, served, server
from remote_server import Answer, Seen, Server

import loadstone

__all__ = ["no_environment", "served", "server"]

SHARDS = 24
NAMES = [f"model-{i + 1:05}-of-{SHARDS:05}.safetensors" for i in range(SHARDS)]


class Delays:
    """A route that answers late, and records how many requests were in progress at once."""

    def __init__(self, seconds: float = 0.02) -> None:
        self.at_once = self.at_once_max = 0
        self._seconds = seconds
        self._lock = threading.Lock()

    def __call__(self, seen: Seen) -> Answer | None:
        with self._lock:
            self.at_once += 1
            self.at_once_max = max(self.at_once, self.at_once_max)
        time.sleep(self._seconds)
        with self._lock:
            self.at_once -= 1
        return None


def shard(name: str) -> bytes:
    """Return a shard with a tensor and a warning, whose field the format does not define."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], name: 1}
    text = json.dumps({f"{name}.weight": entry, "__metadata__": {"format": "pt"}}).encode()
    return struct.pack("<Q", len(text)) + text + struct.pack("<2f", 1, 2)


def write_indexed(folder: Path) -> None:
    for name in NAMES:
        (folder / name).write_bytes(shard(name))
    index = {"metadata": {}, "weight_map": {f"{name}.weight": name for name in NAMES}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_split(folder: Path) -> None:
    writer = gguf.GGUFWriter(folder / "model.gguf", "test", split_max_tensors=1)
    for i in range(SHARDS):
        writer.add_tensor(f"t{i}", torch.full((4,), float(i)).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_dcp(folder: Path) -> None:
    state = {f"t{i}": torch.full((4,), float(i)) for i in range(SHARDS)}
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
    dcp.save(state, storage_writer=writer, no_dist=True)


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "index": (write_indexed, ""),
    "split": (write_split, f"model-00003-of-{SHARDS:05}.gguf"),
    "dcp": (write_dcp, ""),
}


def names(catalog: loadstone.Catalog) -> list[str]:
    return list(catalog.tensors)


def texts(catalog: loadstone.Catalog, place: str) -> list[str]:
    """Return the findings in their order, without the place of the files."""
    return [each.message.replace(place, "PLACE") for each in catalog.findings]


@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_opened_at_once(server: Server, tmp_path: Path, kind: str) -> None:
    write, name = KINDS[kind]
    write(tmp_path)
    server.add_folder(tmp_path, f"/{kind}")
    server.route = delays = Delays()
    url = server.url(f"/{kind}/")
    remote, local = loadstone.inspect(url + name), loadstone.inspect(tmp_path / name)
    assert delays.at_once_max > 1
    assert names(remote) == names(local)
    assert len(names(remote)) == SHARDS
    found = texts(remote, url.rstrip("/"))
    assert found == texts(local, str(tmp_path))
    assert len(found) >= SHARDS or kind != "index"


def test_one_file_is_opened_alone(server: Server, tmp_path: Path) -> None:
    """Control: the count of requests in progress is not always above one."""
    server.files["/one.safetensors"] = shard("one")
    server.route = delays = Delays()
    assert names(loadstone.inspect(server.url("/one.safetensors"))) == ["one.weight"]
    assert delays.at_once_max == 1


def test_a_saved_plan_opens_shards_at_once(server: Server, tmp_path: Path) -> None:
    write_indexed(tmp_path)
    server.add_folder(tmp_path, "/indexed")
    (tmp_path / "plans").mkdir()  # apart from the shards, which a plan next to them would read
    plan = tmp_path / "plans" / "plan.json"
    assert run("plan", server.url("/indexed/"), "-o", plan).returncode == 0
    server.seen.clear()
    server.route = delays = Delays()
    done = run("load", "--plan", plan, "--allow-remote")
    assert done.returncode == 0, done.stderr
    assert delays.at_once_max > 1
    begun = [seen.path for seen in server.seen if seen.begin == 0 and seen.path.endswith("tensors")]
    assert len(begun) == len(set(begun)) == SHARDS


@pytest.fixture
def indexed(server: Server, tmp_path: Path) -> Server:
    write_indexed(tmp_path)
    server.add_folder(tmp_path, "/indexed")
    return server


def test_all_missing_shards_are_named(indexed: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES[5::6]:
        monkeypatch.delitem(indexed.files, f"/indexed/{name}")
    with pytest.raises(loadstone.Error) as raised:
        loadstone.inspect(indexed.url("/indexed/"))
    assert raised.value.code == "ix.missing_shard"
    places = [str(raised.value).find(name) for name in NAMES[5::6]]
    assert -1 not in places[:3] and places[:3] == sorted(places[:3])


def test_the_first_bad_shard_is_named(indexed: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one answers last."""
    for i in (3, 4, 9):
        monkeypatch.setitem(indexed.files, f"/indexed/{NAMES[i]}", b"no header of a tensor")
    answered = threading.Event()

    def route(seen: Seen) -> Answer | None:
        name = unquote(seen.path).rpartition("/")[2]
        if name == NAMES[3]:
            answered.wait(20)  # until a later shard has failed
        if name == NAMES[9]:
            answered.set()
        return None

    indexed.route = route
    for _ in range(3):
        answered.clear()
        with pytest.raises(loadstone.Error) as raised:
            loadstone.inspect(indexed.url("/indexed/"))
        assert NAMES[3] in str(raised.value)


def test_python_is_interrupted_while_shards_are_opened(indexed: Server) -> None:
    waiting = threading.Event()

    def route(seen: Seen) -> Answer | None:
        if seen.path.endswith(".json"):
            return None
        waiting.set()
        return Answer(503, {"Retry-After": "30"}, b"later")

    indexed.route = route
    code = f"import loadstone; loadstone.inspect({indexed.url('/indexed/')!r})"
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True
    ) as process:
        assert waiting.wait(60)
        process.send_signal(signal.SIGINT)
        _, text = process.communicate()
    assert "KeyboardInterrupt" in text
    assert process.returncode == -signal.SIGINT
