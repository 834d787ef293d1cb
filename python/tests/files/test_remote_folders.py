"""Tests folders on servers: files next to the model, and broken and reused connections."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from command import COMMAND, run
from remote_fixtures import BEYOND, folder, no_environment, same, served, server
from remote_hosts import KEY, SECRET, TOKEN, Hub, Store
from remote_server import Answer, Fault, Seen, Server

import loadstone

__all__ = ["folder", "no_environment", "served", "server"]

BESIDE = {
    "config.json": '{"model_type": "llama"}',
    "tokenizer.json": "t" * 70_000,
    "tokenizer_config.json": "{}",
    "generation_config.json": "{}",
    "README.md": "read",
    "special.tiktoken": "words",
    "modeling.py": "raise SystemExit",
    "notes.bin": "not a tokenizer",
    ".hidden": "",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, served: Server) -> Path:
    """Write shards without an index, and companion files; serve them."""
    torch.manual_seed(1)
    root = tmp_path_factory.mktemp("hub") / "beside"
    root.mkdir()
    for number in range(1, 4):
        state = {f"layers.{number}.{i}.weight": torch.randn(64, 64) for i in range(3)}
        name = f"model-{number:05}-of-00003.safetensors"
        safetensors.torch.save_file(state, root / name)
    for name, text in BESIDE.items():
        (root / name).write_text(text)
    return root


def test_the_url_of_a_folder_may_lack_the_slash(server: Server, folder: Path) -> None:
    expected = loadstone.load_file(folder / "one" / "model.safetensors")
    assert same(loadstone.load_file(server.url("/dir")), expected)
    # Many servers redirect to the URL with a slash, and answer with a page that lists the files.
    listing = Answer(200, {}, b"<html></html>")
    redirect = Answer(301, {"Location": "/dir/"}, b"")
    server.route = lambda seen: {"/dir": redirect, "/dir/": listing}.get(seen.path)
    assert same(loadstone.load_file(server.url("/dir")), expected)
    assert run("inspect", server.url("/dir")).returncode == 0
    # Control: neither a file nor a folder with a checkpoint, and a file name that is mistyped.
    server.route = lambda _: None
    for path in ("/none", "/dir/modell.safetensors"):
        with pytest.raises(loadstone.Error, match="the host does not have this file"):
            loadstone.open(server.url(path))
    assert sum(seen.path.startswith("/dir/modell") for seen in server.seen) == 1


@pytest.fixture(params=["https", "hf", "s3"])
def remote(
    request: pytest.FixtureRequest,
    model: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    if request.param == "hf":
        monkeypatch.setenv("HF_ENDPOINT", server.url())
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        Hub(server, model.parent, TOKEN)
        yield "hf://org/beside"
        return
    server.add_folder(model, "/bucket/a b")
    if request.param == "s3":
        for name, value in _store(server).items():
            monkeypatch.setenv(name, value)
        Store(server)
        yield "s3://bucket/a b/"
        return
    shards = sorted(path.name for path in model.glob("*.safetensors"))
    names = {name: shard for shard in shards for name in loadstone.inspect(model / shard).tensors}
    index = json.dumps({"weight_map": names}).encode()
    server.files["/bucket/a b/model.safetensors.index.json"] = index
    yield server.url("/bucket/a%20b/")
    del server.files["/bucket/a b/model.safetensors.index.json"]


def _store(server: Server) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": server.url(),
        "AWS_REGION": "eu-west-1",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("door", ["command", "python"])
def test_files_beside_the_model(remote: str, model: Path, tmp_path: Path, door: str) -> None:
    assert run("convert", model, tmp_path / "local").returncode == 0
    if door == "command":
        done = run("convert", remote, tmp_path / "out")
        assert done.returncode == 0, done.stderr
    else:
        loadstone.convert(remote, tmp_path / "out")
    expected = contents(tmp_path / "local")
    if remote.startswith("http"):  # loadstone cannot list the folder, so it misses this file
        del expected["special.tiktoken"]
    assert contents(tmp_path / "out") == expected
    assert "modeling.py" not in expected


def test_code_comes_by_request_only(remote: str, tmp_path: Path) -> None:
    done = run("convert", remote, tmp_path / "out", "--copy-code")
    if remote.startswith("http"):
        assert "convert.extra" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "modeling.py").exists()


def test_one_file_has_nothing_beside_it(server: Server, folder: Path, tmp_path: Path) -> None:
    done = run("convert", server.url("/dir/model.safetensors"), tmp_path / "out")
    assert done.returncode == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_what_is_denied_is_named(server: Server, folder: Path, tmp_path: Path) -> None:
    def route(seen: Seen) -> Answer | None:
        return Answer(403, {}, b"") if seen.path.endswith("tokenizer.json") else None

    server.route = route
    done = run("convert", server.url("/dir/"), tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert "tokenizer.json" in done.stdout
    assert "convert.not_copied" in done.stdout


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("request_", ["--quantize nf4", "--dequantize", "--dtype f16", "merge"])
def test_a_file_whose_folder_is_denied(
    server: Server, folder: Path, tmp_path: Path, request_: str, status: int
) -> None:
    """Hosts of presigned URLs also deny files that do not exist, so a denied file is ignored."""

    def route(seen: Seen) -> Answer | None:
        is_signed = seen.path == "/dir/model.safetensors?sig=1"
        return None if is_signed else Answer(status, {}, b"")

    server.route = route
    url = server.url("/dir/model.safetensors?sig=1")
    out = tmp_path / "out"
    arguments = ["convert", url, out, *request_.split()]
    if request_ == "merge":
        arguments = ["merge", f"{url}:0.5", f"{url}:0.5", "-o", out]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "'hf_quant_config.json'" in done.stderr and "[convert.not_copied]" in done.stderr
    if request_ not in ("--quantize nf4", "--dequantize"):
        return
    # Control: with access granted, the file declares an encoding that no tensor has.
    server.files["/dir/hf_quant_config.json"] = b'{"quantization": {}}'
    server.route = lambda _: None
    done = run("convert", url, tmp_path / "again", *request_.split())
    del server.files["/dir/hf_quant_config.json"]
    assert "[plan.config_mismatch]" in done.stderr


def test_models_of_two_folders_are_merged(server: Server, folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        server.add_folder(folder / "one", f"/{name}")
    done = run("merge", server.url("/a/"), server.url("/b/"), "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr


def test_a_file_next_to_the_index_is_a_warning(server: Server, folder: Path) -> None:
    server.add_folder(folder / "shards", "/both")
    server.files["/both/model.safetensors"] = (folder / "one/model.safetensors").read_bytes()
    found = loadstone.inspect(server.url("/both/"))
    assert "format.ignored" in [each.code for each in found.findings]
    # Control: a missing or denied file causes no warning.
    for answer in (Answer(404, {}, b""), Answer(403, {}, b"")):
        server.route = lambda seen, answer=answer: (
            answer if seen.path == "/both/model.safetensors" else None
        )
        found = loadstone.inspect(server.url("/both/"))
        assert "format.ignored" not in [each.code for each in found.findings]


def test_a_receipt_is_looked_for_on_this_machine_only(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    run("convert", folder / "one", tmp_path / "out", "--receipt", "xxh3-128")
    server.add_folder(tmp_path / "out", "/made")
    server.seen.clear()
    for url in (server.url("/made/"), server.url("/made/model.safetensors")):
        done = run("verify", url, "--receipt")
        assert done.returncode == 2 and "--receipt-file" in done.stderr
    assert server.seen == []
    receipt = tmp_path / "out/receipt.json"
    done = run("verify", server.url("/made/"), "--receipt-file", receipt)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_prefix_that_nobody_may_list(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in _store(server).items():
        monkeypatch.setenv(name, value)
    Store(server).lists = False
    found = loadstone.load_file("s3://shards dir/")
    assert same(found, loadstone.load_file(folder / "shards"))


def test_names_of_a_list_stay_in_the_folder(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url())
    for name in ("../../etc/passwd.safetensors", "a/..", "", "x\0.gguf"):
        rows = json.dumps([{"type": "file", "path": name}]).encode()
        server.route = lambda seen, rows=rows: Answer(200, {"X-Repo-Commit": "a" * 40}, rows)
        with pytest.raises(loadstone.Error):
            loadstone.inspect(f"hf://org/one@{'a' * 40}")
    assert not any("etc/" in seen.path and ".." in seen.path for seen in server.seen)


def test_a_list_does_not_go_on_elsewhere(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url())
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    other = server.url("/stolen", host="localhost")
    for answer in (
        Answer(302, {"Location": other}, b""),
        Answer(200, {"Link": f'<{other}>; rel="next"'}, b"[]"),
    ):
        server.route = lambda seen, answer=answer: (
            Answer(200, {}, b"[]") if "stolen" in seen.path else answer
        )
        with pytest.raises(loadstone.Error) as raised:
            loadstone.inspect(f"hf://org/one@{'a' * 40}")
        assert raised.value.code == "io.redirect"
        assert TOKEN not in str(raised.value)
    assert not any("stolen" in seen.path for seen in server.seen)


def test_a_tensor_costs_no_request_for_the_length(server: Server, folder: Path) -> None:
    with loadstone.open(server.url("/dir/model.safetensors")) as opened:
        server.seen.clear()
        for i in range(4):
            opened[f"layers.{i}.weight"][:]  # 24 KiB, which one request reads
        assert len(server.seen) == 4
        server.seen.clear()
        opened["layers.0.bias"][:]
        assert len(server.seen) <= 1
    server.etags["/dir/model.safetensors"] = '"new"'
    assert loadstone.load_file(server.url("/dir/model.safetensors"))  # reopened


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", BEYOND, 99, 503, {"Retry-After": "30"}),
        Fault("stall", BEYOND, 99),
        Fault("slow", BEYOND, 99, seconds=3),
    ],
    ids=lambda fault: fault.kind,
)
@pytest.mark.parametrize("door", ["command", "python"])
def test_an_interrupt_ends_a_wait(
    server: Server, folder: Path, tmp_path: Path, fault: Fault, door: str
) -> None:
    server.faults = [Fault(**vars(fault))]
    out = tmp_path / "out"
    url = server.url("/dir/model.safetensors")
    code = f"import loadstone; loadstone.convert({url!r}, {str(out)!r})"
    command = [COMMAND, "convert", url, str(out)] if door == "command" else ["python", "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 60
        while not server.faults[0].hits:
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        _, text = process.communicate(timeout=20)
        assert time.monotonic() - begin < 2.0  # includes Python's shutdown
    assert "cancelled" in text or "KeyboardInterrupt" in text
    assert "io." not in text
    assert process.returncode == (130 if door == "command" else -signal.SIGINT)
    assert list(tmp_path.iterdir()) == []


def test_python_is_interrupted_while_a_file_is_opened(server: Server, folder: Path) -> None:
    server.faults = [Fault("status", 0, 99, 503, {"Retry-After": "30"})]
    code = f"import loadstone; loadstone.inspect({server.url('/dir/model.safetensors')!r})"
    with subprocess.Popen(["python", "-c", code], stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 60
        while not server.faults[0].hits:
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, text = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in text


def _bytes_below(*folders: Path) -> int:
    total = 0
    for top in folders:
        for path in top.rglob("*"):
            try:
                total += path.stat().st_size if path.is_file() else 0
            except OSError:  # the command has removed the file
                continue
    return total


def test_the_disk_that_a_conversion_uses(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the command runs, the disk contains the output, but no copy of the source."""
    state = {f"w{i}": torch.randint(0, 255, (16 << 20,), dtype=torch.uint8) for i in range(8)}
    monkeypatch.setitem(server.files, "/big.safetensors", safetensors.torch.save(state))
    for name in ("tmp", "home", "out"):
        (tmp_path / name).mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path / "home")}
    peak = 0
    command = [
        COMMAND,
        "convert",
        server.url("/big.safetensors"),
        tmp_path / "out" / "m.safetensors",
    ]
    with subprocess.Popen(command, env=environment) as process:
        while process.poll() is None:
            peak = max(peak, _bytes_below(tmp_path))
            time.sleep(0.01)
    assert process.returncode == 0
    output = _bytes_below(tmp_path / "out")
    assert output >= 128 << 20
    assert max(peak, _bytes_below(tmp_path)) <= output + (64 << 20)
    assert _bytes_below(tmp_path / "tmp", tmp_path / "home") == 0


def test_killed_and_resumed(server: Server, model: Path, tmp_path: Path) -> None:
    for path in model.glob("*.safetensors"):
        server.files[f"/kill/{path.name}"] = path.read_bytes()
    shards = sorted(path.name for path in model.glob("*.safetensors"))
    names = {name: shard for shard in shards for name in loadstone.inspect(model / shard).tensors}
    server.files["/kill/model.safetensors.index.json"] = json.dumps({"weight_map": names}).encode()
    server.files["/kill/tokenizer.json"] = b"t" * 70_000
    url = server.url("/kill/")
    options = ["--shard-size", "20KB"]
    assert run("convert", url, tmp_path / "whole", *options).returncode == 0
    expected = contents(tmp_path / "whole")
    server.seen.clear()
    assert run("convert", url, tmp_path / "again", *options).returncode == 0
    requests = len(server.seen)
    kills = 0
    for moment in range(10):
        out = tmp_path / f"out{moment}"
        after = 1 + moment * requests // 10
        reached = threading.Event()
        server.seen.clear()

        def route(_: Seen, after: int = after, reached: threading.Event = reached) -> None:
            if len(server.seen) >= after:
                reached.set()
                time.sleep(0.05)

        server.route = route
        with subprocess.Popen([COMMAND, "convert", url, out, *options], stderr=-3) as process:
            reached.wait(20)
            process.kill()
        kills += process.returncode == -signal.SIGKILL
        server.route = lambda _: None
        done = run("convert", url, out, "--resume", *options)
        assert done.returncode == 0, done.stderr
        assert contents(out) == expected
    assert kills >= 8
    assert {p.suffix for p in tmp_path.iterdir() if p.name.startswith(".")} == {".done"}
