"""Tests hf:// and s3:// URLs, with a server like the hub and a store that checks signatures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from command import run
from remote_fixtures import certificate, folder, no_environment, same, served, server
from remote_hosts import KEY, NEW, OLD, SECRET, SESSION, TOKEN, Hub, Store
from remote_server import Answer, Fault, Server

import loadstone

__all__ = ["certificate", "folder", "no_environment", "served", "server"]


@pytest.fixture
def hub(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_ENDPOINT", server.url())
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return Hub(server, folder, TOKEN)


@pytest.mark.parametrize(
    "path", ["hf://org/shards", "hf://org/shards@main", f"hf://org/shards@{OLD}"]
)
def test_shards_of_a_repository(hub: Hub, folder: Path, path: str) -> None:
    assert same(loadstone.load_file(path), loadstone.load_file(folder / "shards"))


@pytest.mark.parametrize("name", ["", "/model.safetensors", "/model.gguf", "/pytorch_model.bin"])
def test_files_of_a_repository(hub: Hub, folder: Path, name: str) -> None:
    local = folder / "one" / (name[1:] or "model.safetensors")
    assert same(loadstone.load_file("hf://org/one" + name), loadstone.load_file(local))


def test_one_commit_for_all_files(hub: Hub) -> None:
    catalog = loadstone.inspect("hf://org/shards")
    assert all(shard.startswith(f"hf://org/shards@{OLD}/") for shard in catalog.shards)
    hub.main = NEW
    paths = [seen.path for seen in hub.server.seen if seen.path.startswith("/org/")]
    assert sum("/main/" in path for path in paths) == 1
    assert catalog._core.root == f"hf://org/shards@{OLD}"
    assert loadstone.inspect("hf://org/shards").shards[0].startswith(f"hf://org/shards@{NEW}/")


def test_a_signature_that_expires_is_fetched_anew(hub: Hub, folder: Path) -> None:
    with loadstone.open("hf://org/one") as opened:
        hub.signature = "second"
        assert torch.equal(opened["layers.0.bias"], _bias(folder))
    hub.server.faults = [Fault("status", 1, status=403)]
    assert same(loadstone.load_file("hf://org/one"), loadstone.load_file(folder / "one"))
    assert hub.server.faults[0].hits == 1


def _bias(folder: Path) -> torch.Tensor:
    return loadstone.load_file(folder / "one" / "model.safetensors")["layers.0.bias"]


def test_tokens(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tmp_path / "plan.json"
    assert run("plan", "hf://org/one", "-o", plan).returncode == 0
    assert TOKEN not in plan.read_text()
    assert run("load", "--plan", plan, "--allow-remote").returncode == 0
    url = hub.server.url(f"/org/one/resolve/{OLD}/model.safetensors")
    assert loadstone.inspect(url).total_bytes  # an https URL of the hub
    monkeypatch.setenv("HF_TOKEN", "hf_WRONG")
    with pytest.raises(loadstone.Error) as raised:
        loadstone.inspect("hf://org/one")
    assert raised.value.code == "io.denied"
    assert "hf_WRONG" not in str(raised.value)
    loadstone.configure_remote(token=TOKEN)
    try:
        assert loadstone.inspect("hf://org/one").total_bytes
    finally:
        loadstone.configure_remote()


def refusal(path: str) -> str:
    with pytest.raises(loadstone.Error) as raised:
        loadstone.inspect(path)
    return str(raised.value)


def test_a_refusal_names_what_the_host_needs(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the hub has no such repository, revision or file, or" in refusal("hf://org/one@v2")
    assert "HF_TOKEN" not in refusal("hf://org/one@v2")
    monkeypatch.setenv("HF_TOKEN", "hf_WRONG")
    text = refusal("hf://org/one")
    assert "the token may be wrong or expired" in text and "HF_TOKEN" in text
    assert "if it is gated, first accept its terms on its page" in text
    monkeypatch.setenv("HF_TOKEN", "")
    text = refusal("hf://org/one")
    assert "the repository does not exist, or needs a token; found status 401; expected a " in text
    assert "HF_TOKEN" in text and "query" not in text and "if it is gated" in text
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.2:1")  # the URL's host is not the hub
    text = refusal(hub.server.url(f"/org/one/resolve/{OLD}/model.safetensors"))
    assert "the host requires a token" in text and "query" not in text


def test_a_store_without_keys_needs_keys(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    store.server.route = lambda _: Answer(403, {}, b"")
    assert "AWS_SECRET_ACCESS_KEY (s3_access_key=" in refusal("s3://dir/model.safetensors")


def test_what_is_no_repository(hub: Hub) -> None:
    for path in ("hf://org", "hf:///one", "hf://org/one@", "hf://org/../x"):
        with pytest.raises(loadstone.Error) as raised:
            loadstone.inspect(path)
        assert raised.value.code == "io.remote"
    for path in ("hf://org/one@v2", "hf://org/one/none.gguf", "hf://org/none"):
        with pytest.raises(loadstone.Error) as raised:
            loadstone.inspect(path)
        assert raised.value.code in ("io.not_found", "format.no_checkpoint")


@pytest.mark.parametrize("first", ["huggingface.co", "HF.co", "datasets", "models"])
def test_what_is_mistaken_for_an_owner(first: str) -> None:
    text = refusal(f"hf://{first}/org/one")
    assert "[io.remote]" in text and "expected hf://ORG/NAME[@REVISION][/FILE]" in text
    assert f"not by '{first.lower()}'" in text


@pytest.fixture
def store(server: Server, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url())
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return Store(server)


def test_signed_requests(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = loadstone.load_file(folder / "one" / "model.safetensors")
    assert same(loadstone.load_file("s3://dir/model.safetensors"), expected)
    assert same(loadstone.load_file("s3://shards dir/"), loadstone.load_file(folder / "shards"))
    assert store.checked > 0
    monkeypatch.setenv("AWS_SESSION_TOKEN", SESSION)
    store.session = SESSION
    assert same(loadstone.load_file("s3://dir/model.safetensors"), expected)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(loadstone.Error) as raised:
        loadstone.inspect("s3://dir/model.safetensors")
    assert raised.value.code == "io.denied"
    assert "another" not in str(raised.value)


def test_without_a_key_nothing_is_signed(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    store.server.route = lambda seen: (
        Answer(400, {}, b"") if "authorization" in seen.headers else None
    )
    assert loadstone.inspect("s3://dir/model.safetensors").total_bytes
    with pytest.raises(loadstone.Error):
        loadstone.inspect("s3:///key")


def test_special_characters(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.arange(6)}
    monkeypatch.setitem(
        store.server.files, "/b/a+b c(1)=\u00e9.safetensors", safetensors.torch.save(state)
    )
    assert same(loadstone.load_file("s3://b/a+b c(1)=\u00e9.safetensors"), state)
