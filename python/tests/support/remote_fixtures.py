"""Fixtures: a server on this machine, and the checkpoints that it serves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import safetensors.torch
import torch
from remote_server import Server

FILE = "/dir/model.safetensors"


# ``Fault.begins`` for all requests of a file except the first one, which starts at byte 0.
BEYOND = 1


@pytest.fixture(scope="module", autouse=True)
def no_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.lower().endswith("_proxy") or name.startswith(("HF_", "AWS_", "SSL_")):
                patch.delenv(name)
        patch.setenv("HOME", "/nowhere")
        yield


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def server(served: Server) -> Server:
    served.reset()
    return served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, served: Server) -> Path:
    """Write one model as a single file, in shards, as GGUF and in torch's format, and serve it."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("remote")
    state = {f"layers.{i}.weight": torch.randn(96, 128).to(torch.bfloat16) for i in range(12)}
    state |= {f"layers.{i}.bias": torch.randn(96) for i in range(12)}
    (root / "one").mkdir()
    safetensors.torch.save_file(state, root / "one" / "model.safetensors")
    torch.save(state, root / "one" / "pytorch_model.bin")
    writer = gguf.GGUFWriter(root / "one" / "model.gguf", "test")
    for name, tensor in state.items():
        writer.add_tensor(name, tensor.float().numpy())
    writer.add_array("tokens", [f"token {i}" for i in range(5000)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (root / "shards").mkdir()
    names = sorted(state)
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    for number, part in enumerate((names[:8], names[8:16], names[16:]), 1):
        shard = f"model-{number:05}-of-00003.safetensors"
        safetensors.torch.save_file({n: state[n] for n in part}, root / "shards" / shard)
        index["weight_map"] |= dict.fromkeys(part, shard)
    (root / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    served.add_folder(root / "one", "/dir")
    served.add_folder(root / "shards", "/shards dir")
    return root


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "cert.pem", folder / "key.pem"
    names = "subjectAltName=IP:127.0.0.1"
    subprocess.run(
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=test -addext {names} -keyout {key} -out {made}".split(),
        check=True,
        capture_output=True,
    )
    return made, key
