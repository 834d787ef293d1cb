"""Tests that a public host cannot redirect to a private network's address, even through a proxy.

The public host is ``public.example``, which a proxy of the tests serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from command import run
from remote_fixtures import FILE, folder, no_environment, served, server
from remote_server import Answer, Fault, Seen, Server

import loadstone

__all__ = ["folder", "no_environment", "served", "server"]

PUBLIC = "http://public.example/m.safetensors"


@pytest.fixture
def proxy(server: Server) -> Iterator[Server]:
    """Answer for every host with a redirect to the private server's file."""
    made = Server()
    made.route = lambda _: Answer(302, {"Location": server.url(FILE)}, b"")
    yield made
    made.close()


def through(proxy: Server, no_proxy: str, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HTTPS_PROXY", proxy.url())
    patch.setenv("NO_PROXY", no_proxy)


DOORS: dict[str, Callable[[str, Path], object]] = {
    "inspect": lambda url, _: loadstone.inspect(url),
    "open": lambda url, _: loadstone.open(url),
    "load_file": lambda url, _: loadstone.load_file(url),
    "safe_open": lambda url, _: loadstone.safe_open(url).keys(),
    "convert": lambda url, out: loadstone.convert(url, out / "out.safetensors"),
    "verify": lambda url, _: _command("verify", url),
    "command": lambda url, _: _command("inspect", url),
    "plan": lambda url, out: _command("plan", url, "-o", out / "plan.json"),
}


def _command(*arguments: object) -> None:
    done = run(*arguments)
    if done.returncode:
        code = done.stderr.rstrip().rpartition("[")[2].rstrip("]")
        raise loadstone.Error(done.stderr, code)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("no_proxy", ["127.0.0.1", "localhost,127.0.0.0/8"])
def test_what_goes_direct_is_checked_beside_a_proxy(
    server: Server,
    folder: Path,
    proxy: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    door: str,
    no_proxy: str,
) -> None:
    through(proxy, no_proxy, monkeypatch)
    with pytest.raises(loadstone.Error) as raised:
        DOORS[door](PUBLIC, tmp_path)
    assert raised.value.code == "io.redirect"
    assert server.seen == []
    assert proxy.seen


def test_the_proxy_connects_to_what_is_not_excepted(
    server: Server, folder: Path, proxy: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the proxy follows the redirect if it serves the private address too."""
    through(proxy, "elsewhere.example", monkeypatch)
    asked: list[str] = []

    def route(seen: Seen) -> Answer | None:
        asked.append(seen.path)
        if "public.example" in seen.path:
            return Answer(302, {"Location": server.url(FILE)}, b"")
        return proxy.ranged(seen, urlsplit(seen.path).path)

    proxy.files = server.files
    proxy.route = route
    assert loadstone.inspect(PUBLIC).tensors
    assert asked[0] == PUBLIC
    assert set(asked[1:]) == {server.url(FILE)}
    assert server.seen == []


def test_an_idle_connection_is_checked_like_a_new_one(
    server: Server, folder: Path, proxy: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    through(proxy, "127.0.0.1", monkeypatch)
    # The caller names the private address, so it is allowed.
    assert loadstone.inspect(server.url(FILE)).tensors
    for _ in range(3):
        server.seen.clear()
        with pytest.raises(loadstone.Error) as raised:
            loadstone.inspect(PUBLIC)
        assert raised.value.code == "io.redirect"
        assert server.seen == []
        assert loadstone.inspect(server.url(FILE)).tensors
        assert server.seen


def test_an_oversized_header_names_host_and_file(server: Server, folder: Path) -> None:
    lines = {f"X-{number}": "a" * 1000 for number in range(400)}
    for fault in (Fault("huge", times=99), Fault("status", headers=lines, times=99)):
        for begins in (0, 1):  # the fault is in the first request, or in a request for data
            server.faults = [fault]
            fault.begins = begins
            with pytest.raises(loadstone.Error, match="header of the host's response") as raised:
                loadstone.load_file(server.url(FILE) + "?signature=S3CR3T")
            assert raised.value.code == "io.remote"
            assert raised.value.path == server.url(FILE)
            assert server.url() in raised.value.found
            assert "S3CR3T" not in str(raised.value) + str(vars(raised.value))
