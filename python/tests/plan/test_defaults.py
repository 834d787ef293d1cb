"""Defaults in the package and in the docs equal those of the core's header."""

import inspect
import re
from pathlib import Path

import loadstone

ROOT = Path(__file__).resolve().parents[3]
HEADER = ROOT / "include/loadstone/defaults.h"


def core(name: str) -> int:
    """Return a constant of the header: "a", or "a << b"."""
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
    said = re.findall(r"one per core, at most \d+", command)
    assert said and set(said) == set(threads)
    assert f"| `--staging SIZE` | `{core('staging_bytes_max') >> 20}MiB` |" in command
    conversion = (ROOT / "docs/convert.md").read_text()
    assert f"The default is {core('convert_staging_bytes_max') >> 20} MiB" in conversion
