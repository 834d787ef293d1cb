"""Tests that the table of headers in docs/cpp.md matches the current headers."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

TOOL = Path(__file__).resolve().parents[3] / "tools" / "header_table.py"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("header_table", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()


def test_the_page_has_the_table_of_today() -> None:
    assert subprocess.run([sys.executable, TOOL, "--check"], check=False).returncode == 0


def test_every_header_is_in_it() -> None:
    inside = {"name_hash.h", "quantized_tensor.h", "tensor_info.h", "loadstone.h"}
    assert {*tool.headers()} == {path.name for path in tool.INCLUDE.glob("*.h")} - inside


def test_codes_of_errors_and_findings_are_told_apart() -> None:
    text = """
// Opens it. Throws Error "io.open", "io.denied"; "cancelled" if it was. The
// rest is finding "st.hole", or "no.code".
int a();

//   throws Error "usage"  (an example)
"""
    codes = tool.codes_of(text, tool.known_codes())
    assert codes == {"Error": ["io.open", "io.denied", "cancelled"], "finding": ["st.hole"]}
