"""Install releases of other libraries, try loading with them, and write docs/versions.md.

    python tools/versions.py build/versions                 # all; or: transformers diffusers ...
    python tools/versions.py build/versions --no-install    # only releases that are installed there

``versions_suite.py`` tries each release in a separate process, with the other installed packages
and the companions that the release needs. It compares each load with the release's own load.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"

# Packages that older releases need.
HUB_1 = ("huggingface_hub==1.5.0", "httpx")
TOKENIZERS_022 = ("tokenizers==0.22.1",)
HUB_0 = ("huggingface_hub==0.36.0",)
HTTPX = ("httpx",)


@dataclass(frozen=True)
class Cohort:
    """Releases of one library that need the same other packages as companions."""

    library: str
    releases: tuple[str, ...]
    companions: tuple[str, ...] = ()
    package: str = ""  # name of the pip package, if it differs from the library's


COHORTS = (
    Cohort("transformers", ("5.22.2", "5.21.1", "5.20.2", "5.19.0", "5.18.0")),
    Cohort("transformers", ("5.17.0", "5.16.1"), HUB_1),
    Cohort(
        "transformers",
        (
            *("5.15.1", "5.14.1", "5.13.1", "5.12.1", "5.11.0", "5.10.4", "5.9.0", "5.8.1"),
            *("5.7.0", "5.6.2", "5.5.4", "5.4.0", "5.3.0", "5.2.0", "5.1.0", "5.0.0"),
        ),
        HUB_1 + TOKENIZERS_022,
    ),
    Cohort("transformers", ("4.57.6",), HUB_0 + TOKENIZERS_022),
    Cohort("diffusers", ("0.41.0",)),
    Cohort(
        "diffusers", ("0.40.0", "0.39.0", "0.38.0", "0.37.1", "0.36.0", "0.35.2", "0.34.0"), HTTPX
    ),
    Cohort("accelerate", ("1.14.0", "1.13.0", "1.12.0", "1.11.0", "1.10.1", "1.8.1", "1.6.0")),
    Cohort("bitsandbytes", ("0.49.2", "0.48.2")),
    Cohort("modelopt", ("0.46.1", "0.45.0", "0.43.0"), package="nvidia-modelopt"),
)


def installed(folder: Path, requirement: str, *options: str) -> Path:
    """Install a requirement with pip into a separate folder."""
    target = folder / requirement.replace("==", "-")
    if not target.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
        subprocess.run([*command, *options, requirement], check=True)
    return target


def tried(library: str, paths: list[Path]) -> dict[str, dict[str, str]] | str:
    """Return the cells of one release, or the last line of the error if it cannot run."""
    # In PYTHONPATH the release precedes the installed package.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "versions_suite.py"), library]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        cells: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return (done.stderr.strip().splitlines() or ["no output"])[-1][:160]
    return cells


def in_words(cells: dict[str, dict[str, str]] | str) -> str:
    """Describe a row: the number of equal cells, and the other cells."""
    if isinstance(cells, str):
        return f"does not run here: {cells}"
    results = [(f"{name}, {kind}", cell) for name in cells for kind, cell in cells[name].items()]
    refused = sum(cell in ("refused", "own") for _, cell in results)
    if refused == len(results):
        return "not supported: direct calls reject it, a patch leaves it unpatched"
    wrong = [f"{name}: {cell}" for name, cell in results if cell != "equal"]
    return f"{len(results) - len(wrong)} of {len(results)} equal" + "".join(f"; {e}" for e in wrong)


def page(rows: dict[str, list[tuple[str, str]]]) -> str:
    lines = [
        "# Releases of other libraries",
        "",
        "Made by `make versions`. Each row is one release, tried in its own process by direct",
        "calls and by `loadstone.patch`. Every tensor was compared bit for bit with the one that",
        "the release loads without loadstone.",
        "",
        "| library | checked |",
        "|---|---|",
        "| transformers | llama, mixtral, qwen3_moe (in shards) and a llama with tied "
        "embeddings: in F32, in BF16, with a layer on disk. A head for a base and a "
        "base for a head, missing tensors and different shapes (same random draws), T5 "
        "in F16 with modules kept in F32, BERT with old names, LLaVA |",
        "| diffusers | Wan and Sana, from a folder and from one file |",
        "| accelerate | in memory, a layer on disk, `auto` |",
        "| bitsandbytes | nf4, fp4 and int8 on the CPU, by transformers |",
        "| ModelOpt | fp8 and nvfp4, by its low-memory mode |",
        "",
        "If a release differs from loadstone's tables of replaced functions",
        "(`loadstone/_adapters/sites/`), direct calls reject it with an error that names it. Under",
        "`loadstone.patch` it runs unpatched, with one `UserWarning`.",
    ]
    for library, found in rows.items():
        lines += ["", f"## {library}", "", "| release | result |", "|---|---|"]
        lines += [f"| {release} | {result} |" for release, result in found]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("libraries", nargs="*")
    parser.add_argument("--no-install", action="store_true")
    options = parser.parse_args()
    rows: dict[str, list[tuple[str, str]]] = {}
    for cohort in COHORTS:
        if options.libraries and cohort.library not in options.libraries:
            continue
        if cohort.library not in rows:
            here = importlib.metadata.version(cohort.package or cohort.library)
            rows[cohort.library] = [(here, in_words(tried(cohort.library, [])))]
        for release in cohort.releases:
            name = f"{cohort.package or cohort.library}=={release}"
            wanted = [(name, ("--no-deps",)), *((each, ()) for each in cohort.companions)]
            if options.no_install and not (options.folder / name.replace("==", "-")).exists():
                continue
            paths = [installed(options.folder, each, *how) for each, how in wanted]
            result = in_words(tried(cohort.library, paths))
            print(f"{cohort.library} {release}: {result}", flush=True)
            rows[cohort.library].append((release, result))
    if not options.libraries:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
