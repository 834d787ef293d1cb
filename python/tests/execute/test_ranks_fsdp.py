"""FSDP2, tensor parallelism and both: four processes load, compare with a whole load, and train."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_program
import ranks
import torch
from safetensors.torch import save_file

import loadstone

PROGRAM = Path(rank_program.__file__)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Return the program's results by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        state = rank_program.Net().state_dict()
        del state["head.weight"]
        random = {key: 0.05 * torch.randn(value.shape) for key, value in state.items()}
        save_file(random, folder / f"{name}.safetensors")
    loadstone.convert(
        folder / "first.safetensors", folder / "fp8-block.safetensors", quantize="fp8-block"
    )
    single = {f"experts.{i}.weight": torch.randn(256, 128) for i in range(rank_program.EXPERTS)}
    single["router.weight"] = torch.randn(rank_program.EXPERTS, 128)
    save_file(single, folder / "experts.safetensors")
    loadstone.convert(
        folder / "experts.safetensors",
        folder / "experts-fp8.safetensors",
        quantize={r"experts\..*": "fp8-block"},
        include=r"experts\.",
    )
    return ranks.run(PROGRAM, folder, rank_program.WORLD)


@pytest.mark.parametrize("case", rank_program.CASES)
def test_values_are_those_of_a_whole_load(found: list[dict], case: str) -> None:
    for each in found:
        assert each[case]["wrong"] == []
        assert each[case]["audited"] and each[case]["trains"]
        assert each[case]["sharded"] > 0


def test_ranks_of_fsdp_read_their_share(found: list[dict]) -> None:
    """Reads of slices of the first dim continue across small holes, so they exceed the share."""
    for each in found:
        share = each["fsdp"]["share"]
        assert share <= each["fsdp"]["bytes_read"] <= 1.01 * share


def file_bytes() -> int:
    """Return the bytes of the checkpoint's tensors; the tied head counts once."""
    model = rank_program.Net()
    return sum(each.nbytes for each in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("wave", ["64 MiB", "1 MiB"])
@pytest.mark.parametrize("case", rank_program.CASES)
def test_ranks_that_read_together_read_each_byte_once(
    found: list[dict], case: str, wave: str
) -> None:
    runs = [each["read once"][f"{case}, {wave}"] for each in found]
    for run in runs:
        assert run["wrong"] == []
        assert run["audited"] and run["same provenance"]
    # Readers continue across small tensors of other ranks, so the sum may be larger.
    assert file_bytes() <= sum(run["bytes_read"] for run in runs) <= 1.001 * file_bytes()
    assert max(run["bytes_read"] for run in runs) < 0.5 * file_bytes()


def test_ranks_that_read_together_have_the_options_of_others(found: list[dict]) -> None:
    assert all(each["read once"]["options"] for each in found)


def test_what_is_decoded_cast_or_stacked_is_sent_too(found: list[dict]) -> None:
    cases = [each["other sources"] for each in found]
    assert len(cases[0]) == 10
    for name in cases[0]:
        runs = [case[name] for case in cases]
        assert [run["wrong"] for run in runs] == [[]] * len(runs), name
        assert runs[0]["tensors"] > 1
        assert 0.99 <= sum(run["share"] for run in runs) <= 1.01, name


def test_each_node_reads_by_itself(found: list[dict]) -> None:
    runs = [each["read once"]["two nodes"] for each in found]
    assert [run["wrong"] for run in runs] == [[]] * len(runs)
    for first in (0, 2):
        read = sum(run["bytes_read"] for run in runs[first : first + 2])
        assert file_bytes() <= read <= 1.001 * file_bytes()


def test_loads_of_two_threads_that_read_together_take_turns(found: list[dict]) -> None:
    """If the loads overlapped, one would receive the other's messages, and gloo would abort."""
    expected = {"failures": [], "wrong": [], "at a time": 1}
    assert [each["threads"] for each in found] == [expected] * len(found)


def test_where_one_rank_fails_all_do(found: list[dict]) -> None:
    for number, each in enumerate(found):
        code, text = each["read once"]["one gives up"]
        if number == 2:
            assert (code, text) == ("its own", "this rank gives up")
        else:
            assert code == "plan.ranks" and "rank 2" in text and "this rank gives up" in text


@pytest.mark.parametrize(
    ("case", "rank", "code", "text"),
    [
        ("no file", 1, "io.not_found", "nothing.safetensors"),
        ("at the end", 1, "its own", "no report"),
    ],
)
def test_ranks_fail_together_from_the_plan_to_the_end(
    found: list[dict], case: str, rank: int, code: str, text: str
) -> None:
    for number, each in enumerate(found):
        got, message = each["read once"][case]  # fails if a third item lists parameters with memory
        assert got == (code if number == rank else "plan.ranks") and text in message
        assert number == rank or f"rank {rank} could not load" in message


def test_ranks_with_other_recipes_are_named(found: list[dict]) -> None:
    for each in found:
        code, message = each["read once"]["other rules"]
        assert code == "plan.ranks" and "rank 2" in message and "are made differ" in message


def test_ranks_with_other_files_are_named(found: list[dict]) -> None:
    for each in found:
        code, text = each["read once"]["another file"]
        assert code == "plan.ranks" and "rank 3" in text and "files differ" in text


def test_a_rank_reads_a_tensor_of_other_slices_at_most_once(found: list[dict]) -> None:
    whole = sum(each.nbytes for each in rank_program.Net().parameters())
    for each in found:
        read = each["tensor parallel"]["bytes_read"]
        assert each["tensor parallel"]["share"] <= read < whole
