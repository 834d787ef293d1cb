"""accelerate's FSDP2: four processes prepare a skeleton, load it, and train a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from docs_worlds import llama, qwen_moe
from safetensors.torch import save_file

import loadstone

pytest.importorskip("transformers", minversion="5.0")
fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils")
if not hasattr(fsdp_utils, "fsdp2_apply_ac"):
    pytest.skip("this release of accelerate has FSDP2 for GPUs alone", allow_module_level=True)

import rank_accelerate  # noqa: E402  (needs the packages checked above)
import rank_program  # noqa: E402

PROGRAM = Path(rank_accelerate.__file__)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Return the program's results by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    llama(folder / "llama")
    llama(folder / "tied", tie_word_embeddings=True, vocab_size=250)  # uneven slices
    qwen_moe(folder / "qwen3-moe")
    loadstone.convert(folder / "llama", folder / "fp8", quantize="fp8-block")
    loadstone.convert(folder / "qwen3-moe", folder / "moe-fp8", quantize="fp8-block")
    state = rank_program.Net().state_dict()
    del state["head.weight"]
    random = {key: torch.randn(value.shape) for key, value in state.items()}
    save_file(random, folder / "net.safetensors")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    ranks = range(rank_accelerate.WORLD)
    return [json.loads((folder / f"{each}.json").read_text()) for each in ranks]


@pytest.mark.parametrize(("model", "way"), rank_accelerate.CELLS)
def test_a_prepared_skeleton_is_loaded(found: list[dict], model: str, way: str) -> None:
    """Every parameter is a slice, the same object as in the optimizer, and trained."""
    for each in found:
        case = each[f"{model}, {way}"]
        assert case["on meta"] and case["spread"] > 10
        assert case["wrong"] == [] and case["ok"]
        assert case["optimizer"] and case["own addresses"]
        assert case["unchanged"] == []
        assert case["plugin"] == ("efficient" in way)


@pytest.mark.parametrize("model", ["llama", "tied", "qwen3-moe"])
def test_each_rank_reads_its_share(found: list[dict], model: str) -> None:
    for each in found:
        case = each[f"{model}, plain"]
        assert case["share"] <= case["bytes_read"] <= 1.01 * case["share"]


@pytest.mark.parametrize("way", rank_accelerate.FEW)
def test_accelerates_own_function_loads_it(found: list[dict], way: str) -> None:
    """Without the patch, accelerate gives the model new parameters in the file's dtype, which the
    optimizer does not know."""
    for each in found:
        case = each[f"by accelerate, {way}"]
        assert case["wrong"] == [] and case["ok"] and case["optimizer"]


@pytest.mark.parametrize("way", rank_accelerate.FEW)
def test_a_model_of_no_library_keeps_ties_and_buffers(found: list[dict], way: str) -> None:
    for each in found:
        case = each[f"of torch, {way}"]
        assert case["wrong"] == [] and case["ok"]
        assert case["tied"] and case["optimizer"] and case["spread"] > 5


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_the_first_rank_has_is_sent_as_before(found: list[dict], device: str) -> None:
    for number, each in enumerate(found):
        alone, patched = (each[f"existing, {device}, {how}"] for how in ("alone", "patched"))
        assert alone["wrong"] == patched["wrong"] == []
        assert alone["plugin"] and patched["plugin"] and patched["optimizer"]
        assert alone["optimizer"] == (device == "cpu" or number == 0)


def test_a_first_rank_that_lacks_values_is_named_on_all(found: list[dict]) -> None:
    """Without the patch, accelerate fails on this rank while the other ranks wait for it."""
    for each in found:
        code, text, *wrong = each["refused"]
        assert code == "plan.no_value" and "Leave the whole model on meta on all ranks" in text
        assert wrong == []  # loading as the error suggests works
        assert "embed_tokens" in text and "rank 0: all, rank 1: none" in text


@pytest.mark.parametrize("way", ["by accelerate", "by the model"])
def test_models_whose_activations_are_checkpointed_train(found: list[dict], way: str) -> None:
    """accelerate wraps the layers in modules for activation checkpointing."""
    assert [each["checkpointing"][way] for each in found] == [{"wrong": [], "unchanged": []}] * 4


def test_alone_the_optimizer_has_one_parameter(found: list[dict]) -> None:
    """Control: accelerate without the patch has this defect."""
    assert [each["without patch"] for each in found] == [1] * len(found)
