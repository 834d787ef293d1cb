"""Tests that the defaults of the package and of docs/ equal those of the core's header."""

import inspect
import re
from pathlib import Path

import pytest

import loadstone

ROOT = Path(__file__).resolve().parents[3]
HEADER = ROOT / "include/loadstone/defaults.h"


def core(name: str) -> int:
    """Return a constant of the header, which is written as "a" or "a << b"."""
    found = re.search(
        rf" {name} =\s*(?:std::uint64_t)?{{?([\d']+)}}?(?:\s+<< (\d+))?;", HEADER.read_text()
    )
    assert found is not None, name
    return int(found[1].replace("'", "")) << int(found[2] or 0)


def test_a_plan_has_the_staging_of_the_core() -> None:
    default = inspect.signature(loadstone.plan).parameters["staging_bytes_max"].default
    assert default == core("staging_bytes_max")


def test_the_docs_name_them() -> None:
    command = (ROOT / "docs/cli.md").read_text()
    threads = [
        f"one per core, at most {core(name)}" for name in ("threads_max", "verify_threads_max")
    ]
    checks = (ROOT / "docs/verify.md").read_text()
    said = re.findall(r"one per core, at most \d+", command + checks)
    assert said and set(said) == set(threads)
    assert f"| `--staging SIZE` | `{core('staging_bytes_max') >> 20}MiB` |" in command
    conversion = (ROOT / "docs/convert.md").read_text()
    assert f"The default is {core('convert_staging_bytes_max') >> 20} MiB" in conversion


def arguments_on_the_page(name: str) -> dict[str, str]:
    """Return the arguments in the tables of docs/python.md, with their defaults as text."""
    page = (ROOT / "docs/python.md").read_text()
    section = page.partition(f"## `loadstone.{name}`\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| (?:`([^|]*)`)? ?\|", section, re.MULTILINE)
    return dict(rows)


@pytest.mark.parametrize("name", ["plan", "load", "open", "convert", "merge", "quantize"])
def test_the_page_of_arguments_has_all_of_them(name: str) -> None:
    signature = inspect.signature(getattr(loadstone, name)).parameters
    written = arguments_on_the_page(name)
    shared = {"load": "plan", "merge": "convert"}.get(name)
    found = (arguments_on_the_page(shared) if shared else {}) | written
    assert signature.keys() - found.keys() == set()
    assert written.keys() - signature.keys() == set()
    for argument, parameter in signature.items():
        default = found[argument]
        if parameter.default is inspect.Parameter.empty:
            assert shared or not default
        else:
            assert eval(default) == parameter.default, argument


def test_the_page_lists_the_arguments_that_merge_shares_with_convert() -> None:
    page = (ROOT / "docs/python.md").read_text()
    text = page.partition("`merge` also takes these arguments")[2].partition("\n\n")[0]
    own = arguments_on_the_page("merge").keys()
    shared = inspect.signature(loadstone.merge).parameters.keys() - own
    assert set(re.findall(r"`(\w+)`", text)) - {"convert"} == shared
