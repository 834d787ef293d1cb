"""FSDP2, tensor parallelism and both: four processes load, compare with a whole load, and train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rank_program
import torch
from safetensors.torch import save_file

PROGRAM = Path(rank_program.__file__)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """By rank what the program found."""
    folder = tmp_path_factory.mktemp("ranks")
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        state = rank_program.Net().state_dict()
        del state["head.weight"]
        random = {key: 0.05 * torch.randn(value.shape) for key, value in state.items()}
        save_file(random, folder / f"{name}.safetensors")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(number), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(rank_program.WORLD)
    ]
    said = [each.communicate()[0] for each in ranks]
    assert [each.returncode for each in ranks] == [0] * len(ranks), "\n".join(said)[-8000:]
    return [json.loads((folder / f"{each}.json").read_text()) for each in range(len(ranks))]


@pytest.mark.parametrize("case", rank_program.CASES)
def test_values_are_those_of_a_whole_load(found: list[dict], case: str) -> None:
    for each in found:
        assert each[case]["wrong"] == []
        assert each[case]["audited"] and each[case]["trains"]
        assert each[case]["sharded"] > 0


def test_ranks_of_fsdp_read_their_share(found: list[dict]) -> None:
    """Slices of the first dimension: small holes between small tensors are read through."""
    for each in found:
        share = each["fsdp"]["share"]
        assert share <= each["fsdp"]["bytes_read"] <= 1.01 * share


def test_a_rank_reads_a_tensor_of_other_slices_at_most_once(found: list[dict]) -> None:
    whole = sum(each.nbytes for each in rank_program.Net().parameters())
    for each in found:
        read = each["tensor parallel"]["bytes_read"]
        assert each["tensor parallel"]["share"] <= read < whole
