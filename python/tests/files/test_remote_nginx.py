"""Tests loads from nginx, with HTTP/1.1 and HTTP/2."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from command import run
from remote_fixtures import certificate, no_environment

import loadstone

__all__ = ["certificate", "no_environment"]

CONFIG = """
daemon off; worker_processes 1; pid {0}/pid; error_log {0}/error.log;
events {{ worker_connections 64; }}
http {{
  log_format protocol '$server_protocol $status'; access_log {0}/access.log protocol;
  client_body_temp_path {0}/body; proxy_temp_path {0}/proxy; fastcgi_temp_path {0}/fastcgi;
  uwsgi_temp_path {0}/uwsgi; scgi_temp_path {0}/scgi;
  root {0}/www; gzip on; gzip_types *; gzip_min_length 1;
  server {{ listen 127.0.0.1:{1}; }}
  server {{ listen 127.0.0.1:{2} ssl http2; ssl_certificate {3}; ssl_certificate_key {4}; }}
}}
"""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def nginx(
    tmp_path_factory: pytest.TempPathFactory, certificate: tuple[Path, Path]
) -> Iterator[tuple[Path, int, int]]:
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if program is None:
        pytest.skip("needs nginx (apt install nginx-light)")
    root = tmp_path_factory.mktemp("nginx")
    www = root / "www" / "dir"
    www.mkdir(parents=True)
    torch.manual_seed(2)
    state = {f"w{i}": torch.randn(300, 1000) for i in range(4)}
    safetensors.torch.save_file(state, www / "model.safetensors")
    (www / "config.json").write_text('{"model_type": "llama"}')
    (www / "tokenizer.json").write_text("t" * 100_000)
    plain, secure = _free_port(), _free_port()
    config = root / "nginx.conf"
    config.write_text(CONFIG.format(root, plain, secure, *certificate))
    # nginx's workers run as the owner of the files, who may read them.
    command = [program, "-c", str(config), "-p", str(root), "-g", f"user {root.owner()};"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", secure)) == 0:
                    break
            time.sleep(0.05)
        else:
            process.terminate()
            pytest.skip("this nginx does not start: no HTTP/2 or TLS in it")
        yield root, plain, secure
        process.terminate()


@pytest.mark.parametrize("protocol", ["HTTP/1.1", "HTTP/2.0"])
def test_ranges(
    nginx: tuple[Path, int, int],
    certificate: tuple[Path, Path],
    tmp_path: Path,
    protocol: str,
) -> None:
    root, plain, secure = nginx
    url = f"http://127.0.0.1:{plain}" if protocol == "HTTP/1.1" else f"https://127.0.0.1:{secure}"
    done = run("convert", f"{url}/dir/", tmp_path / "out", "--ca-file", certificate[0])
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    beside = root / "www" / "dir" / "tokenizer.json"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == beside.read_bytes()
    found = loadstone.load_file(tmp_path / "out")
    expected = loadstone.load_file(root / "www" / "dir")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    lines = (root / "access.log").read_text().splitlines()
    assert f"{protocol} 206" in lines
