"""transformers' tensor parallelism: two processes load through ``tp_plan``, dense and experts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from docs_worlds import llama, qwen_moe
from safetensors.torch import load_file, save_file

import loadstone

pytest.importorskip("transformers")
library = pytest.importorskip("transformers.core_model_loading")
if not hasattr(library, "DtensorShardOperation"):
    pytest.skip("this release makes no DTensors", allow_module_level=True)

import rank_transformers  # noqa: E402  (needs what was looked for above)

PROGRAM = Path(rank_transformers.__file__)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """By rank what the program found."""
    folder = tmp_path_factory.mktemp("ranks")
    llama(folder / "llama")
    qwen_moe(folder / "qwen3-moe")
    loadstone.convert(folder / "llama", folder / "fp8", quantize="fp8-block")
    llama(folder / "headless")
    file = folder / "headless" / "model.safetensors"
    state = load_file(file)
    del state["lm_head.weight"]
    save_file(state, file, {"format": "pt"})
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(number), str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(rank_transformers.WORLD)
    ]
    said = [each.communicate()[0] for each in ranks]
    assert [each.returncode for each in ranks] == [0] * len(ranks), "\n".join(said)[-8000:]
    return [json.loads((folder / f"{each}.json").read_text()) for each in range(len(ranks))]


@pytest.mark.parametrize("way", rank_transformers.WAYS)
@pytest.mark.parametrize("model", rank_transformers.MODELS)
def test_a_tensor_parallel_load_is_the_slices_of_a_whole_one(
    found: list[dict], model: str, way: str
) -> None:
    for each in found:
        case = each[f"{model}, {way}"]
        assert case["wrong"] == [] and case["same names"]
        assert case["ok"], case["audit"]
        assert case["near"] and case["spread"] > 10
