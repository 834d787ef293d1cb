"""Tests that the packages of tools/wheel.py have the right files and run on a bare system."""

from __future__ import annotations

import csv
import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from safetensors.numpy import save_file

import loadstone

REPOSITORY = Path(__file__).resolve().parents[3]
# Libraries that every manylinux system has, according to PEP 600 and auditwheel's list.
OF_THE_SYSTEM = re.compile(
    r"(linux-vdso|ld-linux-[a-z0-9-]+|libc|libm|libdl|librt|libpthread|libresolv|libstdc\+\+"
    r"|libgcc_s|libz)\.so[.0-9]*"
)
# Folders and top-level files of the repository that a source package contains.
PACKED = ("cli/", "cmake/", "include/", "python/bindings/", "python/loadstone/", "src/")
PACKED_FILES = {"CHANGELOG.md", "CMakeLists.txt", "CONTRIBUTING.md", "HACKING.md", "LICENSE",
                "README.md", "SECURITY.md", "pyproject.toml"}  # fmt: skip

# A program that runs the demo, but measures each way once instead of three times.
DEMO = """
from examples import demo
kept, run = {}, demo.measure.run
demo.measure.run = lambda words: kept.get(words[-1]) or kept.setdefault(words[-1], run(words))
raise SystemExit(demo.main())
"""

pytestmark = pytest.mark.skipif(
    not Path("/usr/share/doc/libcurl4/copyright").exists(), reason="made on Debian"
)


def _tool():
    spec = importlib.util.spec_from_file_location("wheel_tool", REPOSITORY / "tools" / "wheel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """Build one wheel for all test workers, because concurrent builds can mix their files."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "plain"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return next(folder.glob("loadstone-*.whl"), None) or _tool().make_plain_wheel(folder)


@pytest.fixture(scope="module")
def wheel(plain, tmp_path_factory) -> Path:
    return _tool().make_wheel(tmp_path_factory.mktemp("wheel"), plain)


def venv_with(wheel: Path, folder: Path) -> Path:
    """Create a virtual environment with only this wheel; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    install = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "-q"]
    subprocess.run([*install, "--no-index", "--no-deps", wheel], check=True)
    return folder / "bin/python"


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    return venv_with(wheel, tmp_path_factory.mktemp("venv"))


def alone(python: Path, *words: object, **options) -> subprocess.CompletedProcess[str]:
    """Run a command that finds neither a compiler nor this repository's package."""
    names = ("HOME", "HF_HUB_OFFLINE")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment |= {"PATH": str(python.parent), **options.pop("env", {})}
    return subprocess.run(
        [*map(str, words)], env=environment, capture_output=True, text=True, check=False, **options
    )


def foreign_libraries(folder: Path) -> list[str]:
    """Return the libraries outside the folder with which the programs in the folder are linked."""
    found = set()
    for path in folder.rglob("*"):
        if not path.is_file() or path.is_symlink() or path.read_bytes()[:4] != b"\x7fELF":
            continue
        said = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        for name, place in re.findall(r"(\S+) => (\S+|not found)", said):
            inside = place != "not" and Path(place).resolve().is_relative_to(folder.resolve())
            if not inside and not OF_THE_SYSTEM.fullmatch(name):
                found.add(name)
    return sorted(found)


def test_what_is_linked_is_inside(python):
    (package,) = python.parent.parent.glob("lib/python3*/site-packages/loadstone")
    assert foreign_libraries(package.parent) == []


def test_libraries_that_are_not_inside_are_seen(plain, tmp_path):
    """Control: the check finds foreign libraries in a wheel before the tool adds them."""
    with zipfile.ZipFile(plain) as archive:
        archive.extractall(tmp_path)
    missing = foreign_libraries(tmp_path)
    assert any(name.startswith("libre2.") for name in missing)
    assert any(name.startswith("libcurl.") for name in missing)


def test_it_works_alone(python, tmp_path):
    """The core and the command work without numpy and torch."""
    import numpy

    save_file({"a": numpy.arange(4096, dtype=numpy.float32)}, tmp_path / "m.safetensors")
    program = (
        "import loadstone, json; info = loadstone.build_info(); print(info.has_remote, "
        "info.has_sha256, loadstone.inspect('m.safetensors').total_bytes)"
    )
    done = alone(python, python, "-c", program, cwd=tmp_path)
    assert done.stdout == "True True 16384\n", done.stderr
    for words in (["inspect", "m.safetensors"], ["load", "m.safetensors"], ["--version"]):
        done = alone(python, python.with_name("loadstone"), *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    pages = python.parent.parent / "share"
    assert (pages / "man/man1/loadstone.1").stat().st_size > 1000
    assert (pages / "bash-completion/completions/loadstone").stat().st_size > 1000


def test_the_demo_runs_with_it(python):
    """The virtual environment has the wheel's loadstone, and this environment's other libraries."""
    (package,) = python.parent.parent.glob("lib/python3*/site-packages/loadstone")
    libraries = package.with_name("libraries.pth")
    ours = importlib.util.find_spec("torch").origin
    libraries.write_text(f"{Path(ours).parents[1]}\n")
    try:
        where = alone(python, python, "-c", "import loadstone; print(loadstone.__file__)")
        assert Path(where.stdout.strip()).parent == package
        done = alone(python, python, "-c", DEMO, cwd=REPOSITORY)
    finally:
        libraries.unlink()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "audit" in done.stdout


def test_licences_and_components_are_complete(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        rows = [
            row
            for name in names
            if name.startswith(f"{info}/sboms/")
            for row in json.loads(archive.read(name))["components"]
        ]
        record = {row[0] for row in csv.reader(archive.read(f"{info}/RECORD").decode().split())}
    assert record == names
    components = {row["name"] for row in rows} - {"loadstone"}
    assert {"libcurl4", "libre2-9", "libfmt9", "libcli11-dev", "nanobind"} <= components
    licensed = {Path(name).stem for name in names if "/licenses/third-party/" in name}
    assert licensed == components
    packages = [row["name"] for row in rows if row["purl"].startswith("pkg:deb/")]
    files = subprocess.run(["dpkg", "-L", *packages], capture_output=True, text=True, check=True)
    held = {Path(line).name for line in files.stdout.splitlines()}
    libraries = {Path(name).name for name in names if re.match(r"loadstone\.libs/.", name)}
    assert {re.sub(r"-[0-9a-f]{8}(?=[.])", "", name) for name in libraries} <= held
    assert f"{info}/licenses/LICENSE" in names


def test_the_tag_says_where_it_runs(wheel):
    tag = "cp311-cp311" if sys.version_info < (3, 12) else "cp312-abi3"
    assert re.fullmatch(rf"loadstone-[\d.]+-{tag}-manylinux_2_\d+_x86_64\.whl", wheel.name)


def tracked() -> set[str]:
    if shutil.which("git") is None or not (REPOSITORY / ".git").exists():
        pytest.skip("no repository to compare with")
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.splitlines() if (REPOSITORY / name).exists()}


def test_the_source_archive_holds_what_building_needs(tmp_path):
    with tarfile.open(_tool().make_sdist(tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {name for name in tracked() if name.startswith(PACKED) or name in PACKED_FILES}
    assert names == expected | {"PKG-INFO"}


def test_build_info_says_what_is_inside():
    info = loadstone.build_info()
    assert info.version == loadstone.__version__
    assert re.fullmatch(r"(GNU|Clang) [\d.]+", info.compiler)
    assert info.build_type == "Release"
    assert info.libraries.keys() >= {"simdjson", "fmt", "Highway", "RE2", "xxHash", "nanobind"}
    assert info.has_remote == ("libcurl" in info.libraries)
    assert info.has_sha256 == ("OpenSSL" in info.libraries)
