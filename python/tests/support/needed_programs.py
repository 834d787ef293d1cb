"""Lists tests that need a program or sources, whose path an environment variable names.

Without the variable, conftest.py does not run these tests, and counts them at the end of a run.
Tests that already have a `skipif` mark need no row.
"""

from __future__ import annotations

import importlib.util
import os
from typing import NamedTuple


class Needed(NamedTuple):
    """A row of the table.

    Attributes:
        variable: name of the environment variable.
        reason: the line that a run prints at its end if the variable is not set.
        tests: test ids below python/tests; `*` matches any text.
        module: a Python module that the tests also need.
    """

    variable: str
    reason: str
    tests: tuple[str, ...]
    module: str = "numpy"

    def is_here(self) -> bool:
        named = bool(os.environ.get(self.variable))
        return named and importlib.util.find_spec(self.module) is not None


NEEDED = (
    Needed(
        "LOADSTONE_LLAMA_QUANTIZE",
        "LOADSTONE_LLAMA_QUANTIZE names no llama-quantize (make test-llama-cpp)",
        ("adapters/llama_cpp/test_llama_cpp_logits::*",
         "adapters/llama_cpp/test_llama_cpp_two_steps::*"),
    ),
    Needed(
        "LOADSTONE_LLAMA_CPP",
        "LOADSTONE_LLAMA_CPP names no sources of llama.cpp, or sentencepiece is missing "
        "(make test-llama-cpp)",
        ("adapters/llama_cpp/test_llama_cpp_models::test_a_model_is_the_converters_own*",
         "adapters/llama_cpp/test_llama_cpp_models::test_every_type_of_file_*",
         "adapters/llama_cpp/test_llama_cpp_models::test_a_model_is_what_the_script_makes",
         "adapters/llama_cpp/test_llama_cpp_models::test_arithmetic_is_refused_*",
         "adapters/llama_cpp/test_llama_cpp_models::test_one_pass_is_two_steps*",
         "adapters/llama_cpp/test_llama_cpp_quantized::*",
         "adapters/llama_cpp/test_llama_cpp_rules::test_a_file_is_the_converters_own*",
         "adapters/llama_cpp/test_llama_cpp_rules::test_the_rules_are_those_of_the_converter"),
        "sentencepiece",
    ),
    Needed(
        "LOADSTONE_LLAMA_CPP",
        "LOADSTONE_LLAMA_CPP names no sources of ggml (make test-llama-cpp)",
        ("convert/test_gguf_encoders::test_blocks_*",
         "convert/test_gguf_encoders::test_points_of_grids_*",
         "convert/test_gguf_encoders::test_the_comparison_of_grids_*",
         "convert/test_gguf_encoders::test_runs_of_zeros_*",
         "convert/test_gguf_encoders::test_narrow_numbers_*"),
    ),
)  # fmt: skip
