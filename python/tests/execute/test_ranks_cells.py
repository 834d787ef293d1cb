"""All ways in which transformers shards dense models and models with experts over four ranks.

The checkpoints contain floats or FP8 blocks. The ranks get slices of a whole load, and read no more
bytes than the pages of docs/ specify.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import ranks
from docs_worlds import llama, qwen_moe

import loadstone

pytest.importorskip("transformers")
configuration = pytest.importorskip("transformers.distributed.configuration_utils")
if not hasattr(configuration.DistributedConfig, "dp_size"):
    pytest.skip("this release spreads models in another way", allow_module_level=True)

import rank_cells  # noqa: E402  (needs the packages checked above)

PROGRAM = Path(rank_cells.__file__)
BUILDS: dict[str, Callable[..., Path]] = {"llama": llama, "qwen3-moe": qwen_moe}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], dict[str, int]]:
    """Return the program's results by rank, and the bytes of each checkpoint."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, build in BUILDS.items():
        plain = build(folder / f"{name}, bf16", num_key_value_heads=4)
        loadstone.convert(plain, folder / f"{name}, fp8-block", quantize="fp8-block")
    found = ranks.run(PROGRAM, folder, rank_cells.WORLD)
    totals = {
        each.name: loadstone.inspect(each).total_bytes for each in folder.iterdir() if each.is_dir()
    }
    return found, totals


@pytest.mark.parametrize(("model", "source", "layout"), rank_cells.CELLS)
def test_a_rank_has_its_slices_and_reads_little_else(
    world: tuple[list[dict], dict[str, int]], model: str, source: str, layout: str
) -> None:
    found, totals = world
    cells = [each[f"{model}, {source}, {layout}"] for each in found]
    for cell in cells:
        assert cell["wrong"] == [] and cell["wrong together"] == []
        # Control: the comparison reports zeros, in slices and whole tensors.
        assert cell["control"] >= 2 * cell["spread"]
        assert cell["ok"] and cell["spread"] > 10
        assert cell["held"] <= cell["bytes_read"] <= 1.01 * cell["most"]
        assert cell["most"] == cell["held"] or layout != "fsdp"
        assert cell["planned"] / cell["bytes_read"] == pytest.approx(1, abs=0.01)
    together = sum(cell["bytes together"] for cell in cells)
    assert totals[f"{model}, {source}"] <= together <= 1.001 * totals[f"{model}, {source}"]
