"""Tests that traced files of many architectures equal those of llama.cpp's own converter.

The tests compare name, order, shape, type and bytes of each tensor, and name, order, type and value
of each key.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import llama_cpp_networks as networks
import llama_cpp_oracle as oracle
import pytest
import torch

import loadstone
from loadstone import llama_cpp
from loadstone._adapters.llama_cpp.converter import Converter

COMPUTED_MAX = 1 << 20


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    return oracle.with_any_tokenizer(monkeypatch)


def traced(model: Path, name: str, dtype: str | None) -> Any:
    computed = COMPUTED_MAX if networks.NETWORKS[name].computes else 0
    return llama_cpp.trace(model, converter=oracle.FOLDER, dtype=dtype, computed_bytes_max=computed)


def require_same(
    converter: Converter, model: Path, folder: Path, name: str, dtype: str | None
) -> None:
    found = traced(model, name, dtype)
    reader = oracle.read(oracle.written(converter, model, folder / f"{dtype}.gguf", dtype))
    oracle.require_same_keys(found, reader)
    oracle.require_same_tensors(found, reader, folder / f"{dtype}.safetensors")


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_a_model_is_the_converters_own(converter: Converter, tmp_path: Path, name: str) -> None:
    model = networks.make(name, tmp_path / "model")
    require_same(converter, model, tmp_path, name, "BF16")


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma2"])
@pytest.mark.parametrize("dtype", ["F32", "F16", None])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_every_type_of_file_from_every_dtype(
    converter: Converter, tmp_path: Path, name: str, dtype: str | None, stored: torch.dtype
) -> None:
    model = networks.make(name, tmp_path / "model", stored)
    require_same(converter, model, tmp_path, name, dtype)


def test_a_model_is_what_the_script_makes(tmp_path: Path) -> None:
    """Compare with the script ``convert_hf_to_gguf.py``, run in its own process."""
    model = networks.make("llama", tmp_path / "model")
    script = oracle.converter().folder / "convert_hf_to_gguf.py"
    path = tmp_path / "own.gguf"
    subprocess.run(
        [sys.executable, script, model, "--outfile", path, "--outtype", "bf16"],
        check=True,
        capture_output=True,
    )
    found = traced(model, "llama", "BF16")
    oracle.require_same_keys(found, oracle.read(path))
    oracle.require_same_tensors(found, oracle.read(path), tmp_path / "traced.safetensors")


@pytest.mark.parametrize(
    "name", [name for name, network in networks.NETWORKS.items() if network.computes]
)
def test_arithmetic_is_refused_with_architecture_and_tensor(
    converter: Converter, tmp_path: Path, name: str
) -> None:
    model = networks.make(name, tmp_path / "model")
    with pytest.raises(loadstone.PlanError) as caught:
        llama_cpp.trace(model, converter=oracle.FOLDER)
    assert caught.value.code in ("plan.untraceable", "plan.data_dependent")
    assert caught.value.tensor in loadstone.inspect(model).tensors
    assert "modify_tensors" in str(caught.value)


@pytest.mark.parametrize("mix", ["q8_0", "q4_k_m", "q5_k_s", "q3_k_m"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma2"])
def test_one_pass_is_two_steps(converter: Converter, tmp_path: Path, name: str, mix: str) -> None:
    """Quantizing the bf16 shards directly equals quantizing the converter's bf16 file."""
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    if name == "qwen3-moe":
        sizes["moe_intermediate_size"] = 256
    model = networks.make(name, tmp_path / "model", **sizes)
    own = oracle.written(converter, model, tmp_path / "own.gguf", "BF16")
    loadstone.convert(own, tmp_path / "two.gguf", quantize=mix, threads=1)
    loadstone.convert(
        model, tmp_path / "one.gguf", quantize=mix, converter=oracle.FOLDER, threads=1
    )
    oracle.require_same_files(tmp_path / "one.gguf", tmp_path / "two.gguf")
    types = {each.tensor_type.name for each in oracle.read(tmp_path / "one.gguf").tensors}
    assert types - {"F32"}
    assert not types & {"BF16", "F16"}
