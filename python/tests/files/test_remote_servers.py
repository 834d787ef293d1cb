"""Tests servers that lack features, and that no output contains secrets of URLs."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import safetensors.torch
import torch
from command import run
from remote_fixtures import BEYOND, FILE, folder, no_environment, same, served, server
from remote_hosts import KEY, SECRET, SESSION, TOKEN, Hub, Store
from remote_server import Answer, Fault, Seen, Server

import loadstone
from loadstone._plan.planned_load import PlannedLoad

__all__ = ["folder", "no_environment", "served", "server"]


def can_listen(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not can_listen("::1"), reason="needs IPv6")
def test_ipv6(server: Server, folder: Path, tmp_path: Path) -> None:
    other = Server(host="::1")
    other.files = server.files
    try:
        url = other.url(FILE)
        assert "//[::1]:" in url
        found = loadstone.load_file(url)
        assert same(found, loadstone.load_file(folder / "one" / "model.safetensors"))
        assert run("convert", other.url("/shards%20dir/"), tmp_path / "out").returncode == 0
        # Both servers are on this machine, so the redirect is allowed.
        server.faults = [Fault("redirect", location=url)]
        assert loadstone.inspect(server.url(FILE)).tensors.keys() == found.keys()
        other.faults = [Fault("status", status=404)]
        with pytest.raises(loadstone.Error) as raised:
            loadstone.inspect(url)
        assert raised.value.code == "io.not_found"
        assert "[::1]" in raised.value.path
    finally:
        other.close()


def test_no_door_asks_for_a_head(server: Server, folder: Path, tmp_path: Path) -> None:
    """Some servers answer HEAD with 405 or 501, and a URL signed for GET is not valid for HEAD."""
    server.heads = 0
    local = folder / "one" / "model.safetensors"
    assert same(loadstone.load_file(server.url(FILE)), loadstone.load_file(local))
    assert run("inspect", server.url(FILE)).returncode == 0
    assert run("convert", server.url("/shards%20dir/"), tmp_path / "out").returncode == 0
    assert run("verify", server.url(FILE), local).returncode == 0
    assert server.heads == 0
    # Control: the server rejects and counts a HEAD request.
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"HEAD {FILE} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 405")
    assert server.heads == 1


def test_a_server_that_tells_no_version(server: Server, folder: Path, tmp_path: Path) -> None:
    server.etags[FILE] = ""  # the server sends no Last-Modified either
    url, local = server.url(FILE), folder / "one" / "model.safetensors"
    assert same(loadstone.load_file(url, threads=4), loadstone.load_file(local))
    plan = tmp_path / "plan.json"
    assert run("plan", url, "-o", plan).returncode == 0
    assert run("load", "--plan", plan, "--allow-remote").returncode == 0
    server.faults = [Fault("drop", BEYOND, times=2), Fault("status", BEYOND, status=503)]
    assert same(loadstone.load_file(url, threads=4), loadstone.load_file(local))
    # Changed lengths and new ETags are detected, although the first response had no version.
    for fault in (Fault("total", BEYOND), Fault("etag", BEYOND)):
        server.faults = [fault]
        with pytest.raises(loadstone.Error) as raised:
            loadstone.load_file(url)
        assert raised.value.code == "io.changed"


def test_a_server_without_ranges(server: Server, folder: Path) -> None:
    """A response without ranges is accepted only if the file fits into the first request."""
    small = {"w": torch.arange(12.0)}
    server.files["/small.safetensors"] = safetensors.torch.save(small)
    server.faults = [Fault("whole", times=999)]
    assert same(loadstone.load_file(server.url("/small.safetensors")), small)
    with pytest.raises(loadstone.Error) as raised:
        loadstone.load_file(server.url(FILE))
    assert raised.value.code == "io.remote"
    assert "does not support range requests" in str(raised.value)
    assert (raised.value.found, raised.value.expected) == ("status 200", "status 206")
    done = run("load", server.url(FILE))
    assert (done.returncode, "io.remote" in done.stderr) == (4, True)


# ---- secrets

SIGNED = "X-Amz-Credential=AKIDINQUERY&X-Amz-Signature=5ec9e7&token=t0ken"
SECRETS = ("AKIDINQUERY", "5ec9e7", "t0ken", TOKEN, SECRET, SESSION, "PASSW0RD")


def outputs_of(url: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield all output, files and errors of each entry point for a valid URL."""
    folder.mkdir()
    out, plan, page = folder / "out", folder / "plan.json", folder / "page.html"
    commands: dict[str, list[object]] = {
        "inspect": ["inspect", url],
        "inspect --json": ["inspect", url, "--json", "--tensors"],
        "plan": ["plan", url, "-o", plan, "--html", page],
        "plan --json": ["plan", url, "--json"],
        "load": ["load", url],
        "load --json": ["load", url, "--json"],
        "load --plan": ["load", "--plan", plan, url, "--json"],
        "convert": ["convert", url, out, "--receipt", "sha256-tree", "--json"],
        "verify": ["verify", url, out],
        "verify --receipt": ["verify", out, "--receipt", "--source", url, "--json"],
    }
    for name, arguments in commands.items():
        done = run(*arguments)
        assert done.returncode == 0, (name, done.stderr)
        yield name, done.stdout + done.stderr
    for path in (plan, page, *out.iterdir()):
        yield path.name, path.read_bytes().decode("latin-1")
    work = run("convert", url, folder / "parts", "--part", "1/2")
    assert work.returncode == 0, work.stderr
    for path in folder.glob(".loadstone-*/*.json"):
        yield f"work/{path.name}", path.read_text()
    catalog = loadstone.inspect(url)
    yield "Catalog", catalog.to_json() + repr(catalog) + str(catalog)
    names = list(catalog.tensors)
    model = torch.nn.Module()
    model.register_parameter("unlike", torch.nn.Parameter(torch.zeros(1)))
    made = loadstone.plan(model, url, missing="zeros", unexpected="ignore")
    made.to_html(folder / "python.html")
    core = loadstone.Plan(
        PlannedLoad(made._planned.core)
    )  # the model is left out, because its parameters cannot be pickled
    yield "Plan", str(made) + repr(made) + made.to_json() + (folder / "python.html").read_text()
    with pytest.warns(UserWarning, match="unlike"):
        report = made.execute(model=model)
    yield "Report", repr(report) + str(report) + report.to_json()
    with loadstone.open(url) as opened:
        yield "open", repr(opened) + repr(opened[names[0]])
        for name, each in (("Catalog", catalog), ("OpenCheckpoint", opened), ("Plan", core)):
            yield f"pickle of {name}", pickle.dumps(each, protocol=0).decode("latin-1")
            # The process still has the signature, so the unpickled object can open the file.
            assert type(pickle.loads(pickle.dumps(each))) is type(each), name
    with pytest.raises(loadstone.Error) as raised:
        loadstone.load(torch.nn.Linear(2, 2), url)
    yield "PlanError", repr(raised.value) + str(raised.value) + str(vars(raised.value))


def errors_of(url: str, server: Server) -> Iterator[tuple[str, str]]:
    """Yield the errors for URLs that a server answers with a defect."""
    route = server.route
    faults = {
        "401": Answer(401, {}, b""),
        "403": Answer(403, {}, f"<Signature>{SECRETS}</Signature>".encode()),
        "404": Answer(404, {}, b""),
        "418": Answer(418, {}, b""),
        "whole": Answer(200, {}, b"x" * 100_000),
        "elsewhere": Answer(302, {"Location": f"ftp://u:PASSW0RD@other/x?{SIGNED}"}, b""),
        "range": Answer(206, {"Content-Range": "bytes 5-6/7"}, b"ab"),
    }
    for name, answer in faults.items():
        server.route = lambda _, answer=answer: answer
        with pytest.raises(loadstone.Error) as raised:
            loadstone.load_file(url)
        yield name, repr(raised.value) + str(raised.value) + str(vars(raised.value))
        for more in ([], ["--json"]):
            done = run("load", url, *more)
            assert done.returncode != 0
            yield f"{name} {more}", done.stdout + done.stderr
    server.route = route


def signed(server: Server, model: Path, patch: pytest.MonkeyPatch) -> str:
    def route(seen: Seen) -> Answer | None:
        return None if urlsplit(seen.path).query == SIGNED else Answer(403, {}, b"")

    server.route = route
    return f"{server.url(FILE)}?{SIGNED}"


def of_the_hub(server: Server, model: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("HF_ENDPOINT", server.url())
    patch.setenv("HF_TOKEN", TOKEN)
    Hub(server, model.parent, TOKEN).signature = "5ec9e7"
    return f"hf://org/{model.name}/model.safetensors"


def of_a_store(server: Server, model: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("AWS_ENDPOINT_URL", server.url())
    patch.setenv("AWS_REGION", "eu-west-1")
    patch.setenv("AWS_ACCESS_KEY_ID", KEY)
    patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    patch.setenv("AWS_SESSION_TOKEN", SESSION)
    Store(server, SESSION)
    return f"s3:/{FILE}"


@pytest.mark.parametrize("kind", [signed, of_the_hub, of_a_store], ids=lambda each: each.__name__)
def test_no_output_shows_a_secret(
    server: Server,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[[Server, Path, pytest.MonkeyPatch], str],
) -> None:
    url = kind(server, folder / "one", monkeypatch)
    shown = [*outputs_of(url, tmp_path / "doors"), *errors_of(url, server)]
    assert len(shown) > 40
    found = [(name, each) for name, text in shown for each in SECRETS if each in text]
    assert found == []
    # Control: the requests contained the secrets, and the outputs name the file.
    sent = json.dumps([(seen.path, seen.headers) for seen in server.seen])
    assert any(each in sent for each in SECRETS)
    assert sum("model.safetensors" in text for _, text in shown) > 10


def test_a_password_in_a_url_is_refused_by_every_door(server: Server, tmp_path: Path) -> None:
    url = server.url(FILE, host="user:PASSW0RD@127.0.0.1") + f"?{SIGNED}"
    server.seen.clear()
    doors: list[list[object]] = [
        ["inspect", url],
        ["inspect", url, "--json"],
        ["plan", url, "--json"],
        ["load", url],
        ["convert", url, tmp_path / "out"],
        ["verify", url],
    ]
    for arguments in doors:
        done = run(*arguments)
        assert done.returncode == 4
        said = done.stdout + done.stderr
        assert "must not contain a user or a password" in said
        assert not [each for each in SECRETS if each in said]
    assert server.seen == []


OPENERS = {
    "Plan.load": "loadstone.Plan.load({plan!r}, allow_remote=True)",
    "Plan.load root": "loadstone.Plan.load({plan!r}, root={url!r})",
    "pickle of Plan": "pickle.load(open({folder!r} + '/Plan', 'rb'))",
    "pickle of Catalog": "pickle.load(open({folder!r} + '/Catalog', 'rb'))",
    "pickle of OpenCheckpoint": "pickle.load(open({folder!r} + '/OpenCheckpoint', 'rb'))",
    "command": "run('load', '--plan', {plan!r}, '--allow-remote')",
}


@pytest.mark.parametrize("opener", OPENERS)
def test_what_was_saved_of_a_signed_url_asks_for_it(
    server: Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opener: str
) -> None:
    """A different process does not have the signature, so the error names the argument to pass."""
    url = signed(server, folder, monkeypatch)
    plain = url.partition("?")[0]
    made = loadstone.plan(torch.nn.Module(), url, unexpected="ignore")
    made.save(tmp_path / "plan.json")
    with loadstone.open(url) as opened:
        for each in (
            loadstone.inspect(url),
            opened,
            loadstone.Plan(PlannedLoad(made._planned.core)),
        ):
            (tmp_path / type(each).__name__).write_bytes(pickle.dumps(each))
    names = {"plan": str(tmp_path / "plan.json"), "folder": str(tmp_path), "url": plain}
    lines = [
        "import pickle, sys, loadstone",
        f"sys.path.insert(0, {str(Path(__file__).parents[1] / 'support')!r})",
        "from command import run",
        f"made = {OPENERS[opener].format(**names)}",
        "sys.exit(getattr(made, 'stderr', '') or 0)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "[io.denied]" in done.stderr
    for advice in (
        "plans and pickles do not store the query",
        "CHECKPOINT",
        "root=",
        "open it first",
    ):
        assert advice in done.stderr
    # Control: a process that gets the whole URL can open the file.
    lines.insert(3, f"loadstone.inspect({url!r})")
    lines = [line.replace("'--allow-remote'", repr(url)) for line in lines]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not any(secret in done.stdout + done.stderr for secret in SECRETS)
