"""transformers' tensor parallelism: two processes load through ``tp_plan``, dense and experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
from docs_worlds import llama, qwen_moe
from safetensors.torch import load_file, save_file

import loadstone

pytest.importorskip("transformers")
library = pytest.importorskip("transformers.core_model_loading")
if not hasattr(library, "DtensorShardOperation"):
    pytest.skip("this release makes no DTensors", allow_module_level=True)

import rank_transformers  # noqa: E402  (needs the packages checked above)

PROGRAM = Path(rank_transformers.__file__)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Return the program's results by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    llama(folder / "llama")
    qwen_moe(folder / "qwen3-moe")
    loadstone.convert(folder / "llama", folder / "fp8", quantize="fp8-block")
    llama(folder / "headless")
    file = folder / "headless" / "model.safetensors"
    state = load_file(file)
    del state["lm_head.weight"]
    save_file(state, file, {"format": "pt"})
    return ranks.run(PROGRAM, folder, rank_transformers.WORLD)


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
