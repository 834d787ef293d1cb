"""Tests checkpoints on servers: equal bytes at every entry point, faults retried or reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from command import run
from remote_fixtures import BEYOND, FILE, certificate, folder, no_environment, same, served, server
from remote_server import Answer, Fault, Seen, Server

import loadstone

__all__ = ["certificate", "folder", "no_environment", "served", "server"]

HEALED = {
    "drop": Fault("drop", BEYOND, times=3),
    "drop at once": Fault("drop", BEYOND, sends=0),
    "drop of the first answer": Fault("drop"),
    "429": Fault("status", BEYOND, status=429, headers={"Retry-After": "0"}),
    "503": Fault("status", BEYOND, status=503),
    "chunked": Fault("chunked", BEYOND),
    "chunked at first": Fault("chunked"),
    "slow": Fault("slow", BEYOND, seconds=0.1),
    "500 at first": Fault("status", status=500, headers={"Retry-After": "0"}, times=2),
}
NAMED = {
    "whole file": (Fault("whole", BEYOND), "io.remote", "whole file"),
    "whole file at first": (Fault("whole"), "io.remote", "does not support range requests"),
    "another range": (Fault("other", BEYOND), "io.remote", "a different range"),
    "another range at first": (Fault("other"), "io.remote", "a different range"),
    "short": (Fault("short", BEYOND), "io.remote", "a different range"),
    "long": (Fault("long", BEYOND), "io.remote", "a different range"),
    "total": (Fault("total", BEYOND), "io.changed", "bytes"),
    "etag": (Fault("etag", BEYOND), "io.changed", '"2"'),
    "no etag": (Fault("no_etag", BEYOND), "io.changed", "no version"),
    "encoding": (Fault("encoding", BEYOND), "io.remote", "gzip"),
    "404 later": (Fault("status", BEYOND, status=404), "io.changed", "404"),
    "403": (Fault("status", status=403), "io.denied", "403"),
    "418": (Fault("status", status=418), "io.remote", "418"),
    "429 for ever": (
        Fault("status", BEYOND, 99, 429, {"Retry-After": "0"}),
        "io.remote",
        "still rejects",
    ),
    "429 for an hour": (
        Fault("status", BEYOND, 99, 429, {"Retry-After": "3600"}),
        "io.remote",
        "429",
    ),
    "429 for a day": (
        Fault("status", BEYOND, 99, 429, {"Retry-After": "86400"}),
        "io.remote",
        "429",
    ),
    "weak etag": (Fault("weak", BEYOND), "io.changed", "W/"),
    "header of a megabyte": (Fault("huge", times=99), "io.remote", "header of the host's response"),
    "a wrong length": (Fault("wrong_range", BEYOND), "io.remote", "a different range"),
    "to ftp": (Fault("redirect", location="ftp://127.0.0.1/x"), "io.redirect", "ftp:"),
    "to nothing": (Fault("redirect"), "io.redirect", "other than https"),
    "to a file": (Fault("redirect", location="file:///etc/passwd"), "io.redirect", "file:"),
    "round and round": (
        Fault("redirect", times=99, location=FILE),
        "io.redirect",
        "too many times",
    ),
}


@pytest.mark.parametrize("threads", [None, 1, 4])
@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "pytorch_model.bin"])
def test_each_format_is_the_local_file(
    server: Server, folder: Path, name: str, threads: int | None
) -> None:
    found = loadstone.load_file(server.url(f"/dir/{name}"), threads=threads)
    assert same(found, loadstone.load_file(folder / "one" / name))


@pytest.mark.parametrize("path", ["/model.safetensors.index.json", "/"])
def test_shards(server: Server, folder: Path, path: str) -> None:
    found = loadstone.load_file(server.url("/shards%20dir" + path))
    assert same(found, loadstone.load_file(folder / "shards"))


def test_a_header_is_kilobytes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    big = {"w": torch.zeros(2 << 20)}
    monkeypatch.setitem(server.files, "/big.safetensors", safetensors.torch.save(big))
    catalog = loadstone.inspect(server.url("/big.safetensors"))
    assert catalog.total_bytes == 8 << 20
    assert server.sent <= 16 << 10
    assert len(server.seen) == 1


@pytest.mark.parametrize("case", HEALED)
@pytest.mark.parametrize("threads", [1, 4])
def test_faults_that_heal(server: Server, folder: Path, case: str, threads: int) -> None:
    fault = Fault(**vars(HEALED[case]))
    server.faults = [fault]
    found = loadstone.load_file(server.url(FILE), threads=threads)
    assert same(found, loadstone.load_file(folder / "one" / "model.safetensors"))
    assert fault.hits == fault.times  # control: the fault occurred


@pytest.mark.parametrize("case", NAMED)
def test_faults_that_are_named(server: Server, folder: Path, case: str) -> None:
    fault, code, word = NAMED[case]
    server.faults = [Fault(**vars(fault))]
    with pytest.raises(loadstone.Error) as raised:
        loadstone.load_file(server.url(FILE))
    assert raised.value.code == code
    assert word in str(raised.value)
    assert "model.safetensors" in raised.value.path
    server.faults = []
    assert loadstone.load_file(server.url(FILE))  # the next load succeeds


def test_a_broken_range_goes_on_where_it_stopped(server: Server, folder: Path) -> None:
    server.faults = [Fault("drop", BEYOND, sends=5000)]
    loadstone.load_file(server.url(FILE), threads=1)
    begins = [seen.begin for seen in server.seen]
    broken = next(i for i, begin in enumerate(begins) if begin >= BEYOND)
    assert begins[broken + 1] == begins[broken] + 5000


def test_every_door(server: Server, folder: Path, tmp_path: Path) -> None:
    url, local = server.url(FILE), folder / "one" / "model.safetensors"
    with loadstone.open(url) as opened, safetensors.safe_open(local, "pt") as expected:
        name = "layers.3.weight"
        assert torch.equal(opened[name][5:9], expected.get_slice(name)[5:9])
    with loadstone.safe_open(url) as opened:
        assert torch.equal(opened.get_tensor(name), loadstone.load_file(local)[name])
    loadstone.convert(url, tmp_path / "a.safetensors", dtype="float32")
    loadstone.convert(local, tmp_path / "b.safetensors", dtype="float32")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList()})
    for _ in range(12):
        model["layers"].append(torch.nn.Linear(128, 96, dtype=torch.bfloat16))
    report = loadstone.load(model, url, mmap=True)
    assert report.bytes_read > 0
    assert torch.equal(model["layers"][3].weight, loadstone.load_file(local)[name])


def test_the_command(server: Server, folder: Path, tmp_path: Path) -> None:
    url, local = server.url(FILE), folder / "one" / "model.safetensors"
    inspected = json.loads(run("inspect", url, "--json").stdout)
    assert inspected["total_bytes"] == loadstone.inspect(local).total_bytes
    assert run("verify", url, local).returncode == 0
    assert run("convert", url, tmp_path / "out").returncode == 0
    assert same(loadstone.load_file(tmp_path / "out"), loadstone.load_file(local))
    assert run("load", url, "--json").returncode == 0
    missing = run("inspect", server.url("/none.safetensors"))
    assert (missing.returncode, "io.not_found" in missing.stderr) == (4, True)


def test_a_plan_contacts_nobody_by_itself(server: Server, folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    url = server.url(FILE) + "?signature=secret"
    assert run("plan", url, "-o", plan).returncode == 0
    assert "secret" not in plan.read_text()
    server.reset()
    refused = run("load", "--plan", plan)
    assert "plan.remote" in refused.stderr
    with pytest.raises(loadstone.Error, match=r"plan\.remote"):
        loadstone.Plan.load(plan)
    assert server.seen == []
    assert run("load", "--plan", plan, "--allow-remote").returncode == 0
    assert run("load", "--plan", plan, server.url(FILE)).returncode == 0
    server.etags[FILE] = '"2"'
    changed = run("load", "--plan", plan, "--allow-remote")
    assert "io.changed" in changed.stderr
    shutil.copy(folder / "one" / "model.safetensors", tmp_path)
    server.reset()
    loadstone.Plan.load(plan)  # uses the local copy next to the plan
    assert server.seen == []


def test_a_plans_adapter_contacts_nobody_by_itself(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    """The plan's base is a local path, and its adapter is a URL."""
    weight = torch.zeros(8, 8)
    safetensors.torch.save_file({"l.weight": weight}, tmp_path / "base.safetensors")
    right, left = torch.ones(2, 8), torch.full((8, 2), 0.5)
    server.files["/adapter/x.safetensors"] = safetensors.torch.save(
        {"l.lora_A.weight": right, "l.lora_B.weight": left}
    )

    def model() -> torch.nn.Module:
        return torch.nn.ModuleDict({"l": torch.nn.Linear(8, 8, bias=False)})

    url = server.url("/adapter/x.safetensors")
    loadstone.plan(model(), tmp_path / "base.safetensors", lora=url).save(tmp_path / "plan.json")
    assert url.rsplit("/", 1)[0] in (tmp_path / "plan.json").read_text()
    server.reset()
    for _ in range(2):
        with pytest.raises(loadstone.Error) as caught:
            loadstone.Plan.load(tmp_path / "plan.json")
        assert caught.value.code == "plan.remote"
        assert not server.seen
    found = model()
    again = loadstone.Plan.load(tmp_path / "plan.json", allow_remote=True)
    again.execute(model=found)
    assert torch.equal(found["l"].weight, torch.ones(8, 8))


def test_a_signature_is_sent_and_never_shown(server: Server, folder: Path) -> None:
    def route(seen: Seen) -> Answer | None:
        return None if seen.path.endswith("?sig=SECRET") else Answer(403, {}, b"")

    server.route = route
    assert loadstone.load_file(server.url(FILE) + "?sig=SECRET")
    server.faults = [Fault("etag", BEYOND)]
    with pytest.raises(loadstone.Error) as raised:
        loadstone.load_file(server.url(FILE) + "?sig=SECRET")
    assert "SECRET" not in str(raised.value) + raised.value.path
    catalog = loadstone.inspect(server.url(FILE) + "?sig=SECRET")
    assert "SECRET" not in catalog.to_json() + repr(catalog)


def test_user_and_password_are_refused_and_not_shown(server: Server) -> None:
    with pytest.raises(loadstone.Error) as raised:
        loadstone.inspect(server.url(FILE, host="user:PASS@127.0.0.1"))
    assert raised.value.code == "io.remote"
    assert "PASS" not in str(raised.value)
    assert server.seen == []


def test_certificates(
    server: Server, folder: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    secure = Server(certificate)
    secure.files = server.files
    try:
        with pytest.raises(loadstone.Error) as raised:
            loadstone.inspect(secure.url(FILE))
        assert raised.value.code == "io.tls"
        assert secure.seen == []
        refused = run("inspect", secure.url(FILE))
        assert "io.tls" in refused.stderr
        assert run("inspect", secure.url(FILE), "--ca-file", certificate[0]).returncode == 0
        loadstone.configure_remote(ca_file=certificate[0])
        found = loadstone.load_file(secure.url(FILE))
        assert same(found, loadstone.load_file(folder / "one" / "model.safetensors"))
        secure.faults = [Fault("redirect", location=server.url(FILE))]
        with pytest.raises(loadstone.Error) as raised:
            loadstone.inspect(secure.url(FILE))
        assert raised.value.code == "io.redirect"
    finally:
        loadstone.configure_remote()
        secure.close()
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere")
    with pytest.raises(loadstone.Error):
        loadstone.inspect(secure.url(FILE))


def test_unreachable_hosts_are_named_at_once(server: Server) -> None:
    closed = Server()
    closed.close()
    with pytest.raises(loadstone.Error) as raised:
        loadstone.inspect(closed.url(FILE))
    assert raised.value.code == "io.remote"


def test_empty_tensors_and_files(server: Server) -> None:
    server.files["/empty.safetensors"] = b""
    with pytest.raises(loadstone.FormatError):
        loadstone.inspect(server.url("/empty.safetensors"))
    server.files["/small.safetensors"] = safetensors.torch.save({"w": torch.empty(0, 3)})
    assert loadstone.load_file(server.url("/small.safetensors"))["w"].shape == (0, 3)
    assert np.prod(loadstone.inspect(server.url("/small.safetensors")).tensors["w"].shape) == 0
