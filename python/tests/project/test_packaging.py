"""Tests that the recipes of packaging/ match the build's versions, minimums and libraries."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

import loadstone

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGING = REPOSITORY / "packaging"
CMAKE = (REPOSITORY / "cmake/LoadstoneDependencies.cmake").read_text(encoding="utf-8")
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))

# The conda names of the libraries, by CMake name. Packages need no libraries of tests.
CONDA = {"simdjson": "simdjson", "fmt": "fmt", "hwy": "libhwy", "re2": "re2", "xxHash": "xxhash",
         "CLI11": "cli11", "CURL": "libcurl", "OpenSSL": "openssl"}  # fmt: skip
VCPKG = CONDA | {"hwy": "highway", "CURL": "curl"}


def minimums() -> dict[str, str]:
    """Return the minimum versions of the libraries that the build finds; "0" is any version."""
    rows = re.findall(r"^ *loadstone_require\((\w+) \S+ ([\d.]+)", CMAKE, flags=re.MULTILINE)
    rows += re.findall(r"find_package\((CURL|OpenSSL) ([\d.]+)", CMAKE)
    return {name: version for name, version in rows if name not in ("GTest", "benchmark")}


def numbers(version: str) -> list[int]:
    """Return the three numbers of a version; 7.85 becomes 7.85.0."""
    parts = [int(part) for part in version.split(".")]
    return parts + [0] * (3 - len(parts))


def debian_packages() -> set[str]:
    named = re.findall(r"\blib[\w+-]+-dev\b", CMAKE)
    return {name for name in named if not re.match(r"lib(gtest|gmock|benchmark)", name)}


def field(control: str, name: str) -> set[str]:
    """Return the packages in a field of a Debian control file, which may span indented lines."""
    (text,) = re.findall(rf"^{name}: (.*(?:\n .*)*)", control, flags=re.MULTILINE)
    return {each.split()[0] for each in text.replace("\n", " ").split(",")}


def test_the_build_looks_for_what_is_known_here():
    assert minimums().keys() == CONDA.keys()


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("debian/changelog", r"^loadstone \(([\d.]+)-1\)"),
        ("conda/meta.yaml", r'^  version: "([\d.]+)"'),
        ("vcpkg/vcpkg.json", r'^  "version": "([\d.]+)"'),
    ],
)
def test_the_version_is_ours(path, pattern):
    text = (PACKAGING / path).read_text(encoding="utf-8")
    assert re.search(pattern, text, flags=re.MULTILINE)[1] == loadstone.__version__


def test_debian_needs_what_the_build_needs():
    control = (PACKAGING / "debian/control").read_text(encoding="utf-8")
    built_with = {name for name in field(control, "Build-Depends") if name.startswith("lib")}
    assert built_with == debian_packages()
    development = control[control.index("Package: libloadstone-dev") :]
    headers_only = {"libcli11-dev", "libxxhash-dev"}
    needed = {name for name in field(development, "Depends") if name.startswith("lib")}
    assert needed == debian_packages() - headers_only
    minimum = re.search(r"cmake_minimum_required\(VERSION ([\d.]+)\)",
                        (REPOSITORY / "CMakeLists.txt").read_text(encoding="utf-8"))[1]  # fmt: skip
    assert f"cmake (>= {minimum})" in control


def test_conda_needs_what_the_build_needs():
    text = (PACKAGING / "conda/meta.yaml").read_text(encoding="utf-8")
    host = text[text.index("  host:") : text.index("  run:")]
    rows = dict(re.findall(r"^    - ([\w-]+)(?: >=([\d.]+))?$", host, flags=re.MULTILINE))
    for name, version in minimums().items():
        assert CONDA[name] in rows
        assert numbers(rows[CONDA[name]] or "0") == numbers(version)
    for requirement in PYPROJECT["build-system"]["requires"]:
        name, _, version = requirement.partition(">=")
        assert rows[name] == version
    run = text[text.index("  run:") : text.index("test:")]
    (tqdm,) = PYPROJECT["project"]["dependencies"]
    assert f"- {tqdm.replace('>=', ' >=')}\n" in run
    assert f"- python {PYPROJECT['project']['requires-python']}\n" in run


def test_vcpkg_needs_what_the_build_needs():
    port = json.loads((PACKAGING / "vcpkg/vcpkg.json").read_text(encoding="utf-8"))
    listed = list(port["dependencies"])
    for feature in port["features"].values():
        listed += feature["dependencies"]
    rows = {
        each if isinstance(each, str) else each["name"]: ""
        if isinstance(each, str)
        else each.get("version>=", "")
        for each in listed
    }
    for name, version in minimums().items():
        assert numbers(rows[VCPKG[name]] or "0") == numbers(version)
    assert rows.keys() - set(VCPKG.values()) == {"vcpkg-cmake", "vcpkg-cmake-config"}
