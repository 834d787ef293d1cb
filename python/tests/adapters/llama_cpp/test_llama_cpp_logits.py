"""Tests that llama.cpp opens loadstone's files, and computes the same logits as from its files.

The tests use llama-cpp-python and the converter; docs/design/tests.md explains how to install them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp_networks as networks
import llama_cpp_oracle as oracle
import llama_quantize
import numpy as np
import pytest
import torch

import loadstone

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3}
TOKENS = [1, 70, 300, 5, 70, 12, 339, 0]
F32 = 0  # ggml's number of the type, for the KV cache


@pytest.fixture(scope="module")
def library() -> Any:
    llama_quantize.require_program()
    try:
        return pytest.importorskip("llama_cpp")
    except (RuntimeError, FileNotFoundError) as error:
        pytest.skip(f"llama-cpp-python finds no libllama: {error}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entered = oracle.converter()
    folder = networks.make("llama", tmp_path_factory.mktemp("llama") / "model", **SIZES)
    oracle.written(entered, folder, folder.parent / "own.gguf", "BF16")
    return folder


def logits(library: Any, path: Path) -> np.ndarray:
    """Return the logits after each token, on one thread to fix the order of sums."""
    llama = library.Llama(
        str(path), n_ctx=64, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False,
        type_k=F32, type_v=F32,
    )  # fmt: skip
    llama.eval(TOKENS)
    found = np.array(llama.scores[: len(TOKENS)])
    llama.close()
    return found


def converted(model: Path, target: Path, mix: str) -> Path:
    options: dict[str, Any] = {"quantize": mix, "dtype": "bfloat16"}
    loadstone.convert(model, target, converter=oracle.FOLDER, **options)
    return target


@pytest.mark.parametrize("mix", ["f16", "q8_0", "q4_k_m"])
def test_logits_are_those_of_llama_cpps_own_file(
    library: Any, model: Path, mix: str, tmp_path: Path
) -> None:
    own = tmp_path / "own.gguf"
    assert not llama_quantize.run(model.parent / "own.gguf", own, mix)
    found = logits(library, converted(model, tmp_path / "out.gguf", mix))
    assert np.isfinite(found).all()
    assert np.ptp(found) > 1
    assert found.tobytes() == logits(library, own).tobytes()


def test_logits_are_near_those_of_transformers(library: Any, model: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        expected = whole(torch.tensor([TOKENS])).logits[0].numpy()

    def distance(mix: str) -> float:
        found = logits(library, converted(model, tmp_path / f"{mix}.gguf", mix))
        difference = np.linalg.norm(found[:, : expected.shape[1]] - expected)
        return float(difference / np.linalg.norm(expected))

    assert distance("f32") < 1e-4
    assert distance("q4_k_m") > 1e-3  # control: a file of a different mix
