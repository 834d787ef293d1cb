"""Lists tests that only `make test-all` runs completely; conftest.py marks them `long`.

Each row is a matrix of cases, or other tests check the same logic. `make test` runs the cases in
`kept`, or those that `cover` chooses. test_tiers.py fails if a row matches no test.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import pytest

# Key under which pytest's config stores the rows that match no collected test.
FAULTS = pytest.StashKey[list[str]]()


class Long(NamedTuple):
    """A row of the table.

    Attributes:
        tests: test ids below python/tests; `*` matches any text.
        reason: why `make test` can omit the tests.
        kept: parameter ids (the text in brackets) that `make test` runs.
        cover: chooses the cases that `make test` runs, so that together they contain each value
            of each parameter ("values"), each pair of values of two parameters ("pairs"), or
            each part of an id such as "gptq-4-v1" together with its first part ("parts").
    """

    tests: str
    reason: str
    kept: tuple[str, ...] = ()
    cover: str = ""


LONG = (
    # --- kills and faults in a loop
    Long("cli/test_cli_receipt::test_killed_50_times_*", "test_convert_resume kills, too"),
    Long("convert/test_convert_resume::test_killed_at_any_*", "kills at more moments", ("new",)),
    Long("convert/test_convert_resume::test_no_output_mixes_*", "the rest of a matrix",
         cover="pairs"),
    Long("convert/test_convert::test_killed_at_any_moment*", "the other output", ("90-out-some",)),
    Long("files/test_remote_resume::test_killed_and_*", "test_remote_folders resumes, too"),
    # --- large peaks
    Long("execute/test_memory::test_peak_is_*", "the same peak", ("0.3-dense-loadstone",)),
    Long("execute/test_memory::test_gguf_blocks_become_*", "test_budget checks small peaks"),
    Long("execute/test_memory::test_fused_experts_leave_*", "gigabytes"),
    Long("execute/test_devices::test_no_second_copy_*", "more devices", ("cuda:0-bfloat16",)),
    Long("execute/test_identity::test_the_memory_is_*", "the rest of a matrix", cover="values"),
    Long("adapters/bitsandbytes/test_bitsandbytes_memory::test_peak_is_*", "the same peak",
         ("0.3-nf4",)),
    Long("adapters/bitsandbytes/test_bitsandbytes_memory::test_the_library_takes_more*",
         "measures the library"),
    Long("adapters/modelopt/test_modelopt_memory::test_peak_is_*", "the same peak", ("0.3-fp8",)),
    Long("adapters/modelopt/test_modelopt_memory::test_the_library_takes_more*",
         "measures the library"),
    Long("adapters/diffusers/test_diffusers_memory::*", "a table of large shapes"),
    Long("adapters/serving/test_serving_deferred::test_memory_is_*", "the same peak", ("at once",)),
    Long("adapters/serving/test_vllm::test_memory_is_bounded*", "the same peak", ("keeps",)),
    Long("files/test_remote_memory::test_a_load_keeps_*", "more threads", ("4",)),
    Long("files/test_remote_memory::test_a_conversion_keeps_*", "more threads", ("4",)),
    # --- processes and other programs
    Long("project/test_peer_suites::test_c*", "runs pytest in pytest to test a tool"),
    Long("project/test_wheel::*", "builds a wheel; test_package checks the installed package"),
    Long("project/test_libtorch::*", "compiles a program with LibTorch"),
    Long("project/test_docs_code::test_the_code_of_a_page_runs[docs/how-to/convert.md]",
         "starts a Ray cluster"),
    Long("adapters/test_oldest_release::*", "installs old releases"),
    Long("convert/test_lossless::test_normal_values*", "the rest of a matrix", cover="values"),
    Long("convert/test_lossless::test_random_codes_*", "the rest of a matrix", cover="values"),
    Long("convert/test_convert_ray::test_parts_are_tasks", "starts a Ray cluster"),
    Long("convert/test_convert_ray::test_a_*", "starts a Ray cluster"),
    Long("convert/test_convert_ray::test_an_error_*", "starts a Ray cluster"),
    Long("adapters/test_heal_page::test_the_script_alone_*", "the other script", ("accelerate",)),
    Long("adapters/test_heal_page::test_the_line_*", "the other script", ("accelerate-first",)),
    Long("adapters/diffusers/test_diffusers_patch::test_pipelines_are_*", "the same process",
         ("code0",)),
    Long("adapters/llama_cpp/test_llama_cpp_gguf::test_in_a_process_*", "the same process",
         ("Sums",)),
    Long("adapters/llama_cpp/test_llama_cpp_gguf::test_in_one_command*", "the same process",
         ("Sums",)),
    Long("model/test_tied_threads::test_ties_in_threads*", "the same threads", ("one config",)),
    Long("execute/test_ranks_cells::*", "test_ranks_fsdp and test_ranks_transformers check slices"),
    Long("execute/test_ranks_accelerate::*", "test_ranks_fsdp checks the same sharding"),
    Long("files/test_remote_threads::test_a_server_in_*", "the same lock behind each entry point",
         ("load", "load_file", "merge", "plan")),
    Long("cli/test_cli_bench::test_more_time_is_more_rounds", "measures for seconds"),
    Long("cli/test_cli_bench::test_a_*", "measures; test_all_is_measured does, too"),
    # --- matrices
    Long("skeleton/test_skeleton_models::test_some_of_*", "classes of libraries, one by one"),
    Long("convert/test_spoiled_scales::test_every_entry_point_*", "the rest of a matrix",
         cover="parts"),
    Long("convert/test_config_lists::test_a_repack_has_*", "the rest of a matrix", cover="values"),
    Long("convert/test_unread_codes::test_stacks_are_*", "the rest of a matrix", cover="values"),
    Long("convert/test_verify_samples::test_each_row_*", "the rest of a matrix",
         ("nf4", "int8-channel", "fp8-block", "nvfp4")),
    Long("files/test_entry_points::test_every_entry_point_*", "more random files",
         ("0", "80", "160", "240", "320")),
    Long("files/test_remote_folders::test_a_file_whose_*", "the rest of a matrix", cover="values"),
    Long("files/test_remote_folders::test_an_interrupt_*", "the rest of a matrix", cover="values"),
    Long("files/test_remote_servers::test_what_was_saved_*", "the rest of a matrix",
         ("Plan.load", "command")),
    Long("plan/test_plain_lists::test_entries_are_*", "the rest of a matrix",
         ("fp8, ignore", "nf4 of diffusers")),
)  # fmt: skip


@functools.cache
def _pattern(tests: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, tests.split("*"))), re.DOTALL)


def matches(tests: str, test: str) -> bool:
    """Return true if a pattern matches an id such as ``plan/test_strict::test_a[b]``."""
    return _pattern(tests).fullmatch(test) is not None


def covering(rows: Sequence[tuple[Hashable, ...]], cover: str) -> set[int]:
    """Return the indices of a few rows that meet the condition of :class:`Long`; deterministic."""

    def met(row: tuple[Hashable, ...]) -> set[Hashable]:
        values = list(enumerate(row))
        if cover == "values" or len(row) == 1:
            return set(values)
        if cover == "pairs":
            return set(itertools.combinations(values, 2))
        return {(values[0], each) for each in values[1:]}

    all_met = [met(row) for row in rows]
    left = set().union(*all_met)
    kept = set()
    while left:
        best = max(range(len(rows)), key=lambda i: len(all_met[i] & left))
        left -= all_met[best]
        kept.add(best)
    return kept
