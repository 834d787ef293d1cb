"""Tests that the examples of docs/cpp.md compile without warnings, and that it lists all codes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "cpp.md").read_text()
COMPILERS = [each for each in ("c++", "clang++") if shutil.which(each)]
# The objects that the examples take for granted.
WORLD = """
#include <atomic>
#include <fstream>
#include <iostream>
#include <sstream>
#include <loadstone/loadstone.h>
[[maybe_unused]] static std::shared_ptr<const loadstone::Catalog> catalog;
[[maybe_unused]] static loadstone::Skeleton skeleton;
[[maybe_unused]] static const loadstone::Plan plan;
[[maybe_unused]] static const loadstone::Conversion conversion;
[[maybe_unused]] static const loadstone::HostMemory memory(plan);
[[maybe_unused]] static const std::string text;
[[maybe_unused]] static std::span<const std::byte> bytes;
[[maybe_unused]] static std::uint64_t rank;
"""


def examples() -> list[str]:
    """Return the examples that need no LibTorch."""
    blocks = re.findall(r"^```cpp\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return [each for each in blocks if "loadstone/torch.h" not in each]


def compile_text(compiler: str, text: str, folder: Path) -> str:
    """Check a program with the warnings that users turn on; return the compiler's messages."""
    source = folder / "program.cpp"
    source.write_text(text)
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Wno-unused"]
    command = [compiler, *flags, f"-I{ROOT / 'include'}", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_examples_compile(compiler: str, tmp_path: Path) -> None:
    functions = [
        f"int example_{i}() {{\n{re.sub('#include .*', '', each)}\nreturn 0;\n}}"
        for i, each in enumerate(examples())
    ]
    assert len(functions) >= 10
    assert compile_text(compiler, WORLD + "\n".join(functions), tmp_path) == ""


# Structs that users fill in, with one of their members.
STRUCTS = {
    "Box": "source = 0",
    "CallerKnowledge": "knows_all_sources = true",
    "ConvertOptions": "one_file = false",
    "ConvertPart": "count = 2",
    "ConvertRun": "resume = true",
    "Decoding": "offset = 1",
    "Destination": "byte_count = 1",
    "DeviceMap": "allows_unknown = true",
    "ExecuteOptions": "threads = 1",
    "ExtraFile": "name = {}",
    "LoadFigures": "seconds = 1",
    "LowRank": "rank = 1",
    "Merge": "factor = 1",
    "MergeAdapter": "factor = 1",
    "MergeOptions": "weights = {1}",
    "ModelFolder": "config = {}",
    "OpenOptions": "allow_links = true",
    "PageOptions": "model = {}",
    "PlanOptions": "threads = 1",
    "PlanPaths": "root = {}",
    "Quantization": 'encoding = "nf4"',
    "QuantizeFormat": "pattern = {}",
    "QuantizeOptions": "allow_non_finite = true",
    "Recipe": "tie_of = {}",
    "Recipes": "values_digest = {}",
    "RemoteOptions": "attempts_max = 1",
    "Rule": "start = 1",
    "RuleStep": "start = 1",
    "Skeleton": "values_known = false",
    "Slice": "begin = {0}",
    "Target": "name = {}",
    "TargetRecipe": "target = {}",
    "TensorBytes": "name = {}",
    "Term": "factor = 1",
    "VerifyOptions": "threads = 1",
}


@pytest.mark.parametrize("compiler", COMPILERS)
def test_one_member_is_enough(compiler: str, tmp_path: Path) -> None:
    """Designated initializers of the options give no warning about the other members."""
    lines = [
        f"loadstone::{name} a_{name} = {{.{member}}};" for name, member in sorted(STRUCTS.items())
    ]
    text = "#include <loadstone/loadstone.h>\n" + "\n".join(lines)
    assert compile_text(compiler, text, tmp_path) == ""


def test_the_page_lists_every_code() -> None:
    """The table of codes is derived from the library's own list."""
    tables = "".join(path.read_text() for path in (ROOT / "src/base").glob("codes*"))
    codes = set(re.findall(r'^    \{"([a-z]+(?:\.\w+)?)"', tables, re.MULTILINE))
    section = PAGE.partition("## Error codes")[2].partition("\n## ")[0]
    assert codes - set(re.findall(r"`([a-z]+(?:\.\w+)?)`", section)) == set()
    assert len(codes) > 100
