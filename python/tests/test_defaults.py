"""Defaults of the Python package are those of the core, whose header decides."""

import inspect
import re
from pathlib import Path

import loadstone
from loadstone import _conversion

HEADER = Path(__file__).resolve().parents[2] / "include/loadstone/defaults.h"


def core(name: str) -> int:
    """The constant of the header: "a", or "a << b"."""
    found = re.search(
        rf" {name} =\s*(?:std::uint64_t)?{{?([\d']+)}}?(?: << (\d+))?;", HEADER.read_text()
    )
    assert found is not None, name
    return int(found[1].replace("'", "")) << int(found[2] or 0)


def test_a_plan_has_the_staging_of_the_core() -> None:
    default = inspect.signature(loadstone.plan).parameters["staging_bytes_max"].default
    assert default == core("staging_bytes_max")


def test_a_conversion_has_the_sizes_of_the_core() -> None:
    assert core("convert_staging_bytes_max") == _conversion._STAGING_BYTES
    assert core("shard_bytes_max") == _conversion._SHARD_BYTES
