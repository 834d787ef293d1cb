"""Make the tables of speed and memory in README.md and docs/measured.md, and README.md's chart.

    python -m bench.published [--gigabytes 3] [--repetitions 5]   # measure, then write
    python -m bench.published --write                             # write the kept measurements

``make bench-table`` measures. ``bench/published.json`` keeps all runs with the machine, the commit
and the releases; a test fails if the pages show other figures.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from bench.loaders import LIMIT
from bench.reads import DIRECT, PREFAULTED

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "bench" / "published.json"
LIBRARIES = ("torch", "safetensors", "transformers", "accelerate")
OURS = "**loadstone**"

# Rows of each page: checkpoint, case, and label.
ROWS = {
    "README.md": [
        ("dense", LIMIT, "limit"),
        ("dense", "loadstone", OURS),
        ("dense", "safetensors load_file + clone", "safetensors `load_file`, copied"),
        ("dense", "transformers from_pretrained", "transformers `from_pretrained`"),
        ("dense", "accelerate load_checkpoint_in_model", "accelerate `load_checkpoint_in_model`"),
    ],
    "docs/measured.md": [
        ("dense", "loadstone.transformers", f"{OURS}`.transformers.from_pretrained`"),
        ("dense", "loadstone, to f32", f"{OURS}, cast to f32"),
        ("dense", "transformers, to f32", "transformers, cast to f32"),
        ("experts", LIMIT, "limit, file with experts one by one"),
        ("experts", "loadstone", f"{OURS}, 128 experts a layer fused"),
        ("experts", "transformers from_pretrained", "transformers, the same"),
        ("experts", "loadstone, as it is", f"{OURS}, experts one by one as in the file"),
        ("experts", "safetensors load_file + clone", "safetensors, the same, copied"),
        ("experts", "loadstone.transformers", f"{OURS}`.transformers`, experts fused"),
        ("small", "loadstone.transformers, to f32", f"{OURS}, a model of 90 MB"),
        ("small", "transformers, to f32", "transformers, into private memory"),
        ("small", "transformers, views of the file", "transformers, views of the file"),
        ("in place", PREFAULTED, "limit: two threads read into memory that is there"),
        ("in place", "loadstone, into=model", f"{OURS}, into a model in use"),
        ("cold", DIRECT, "limit: O_DIRECT, two threads"),
        ("cold", "loadstone", f"{OURS}, nothing in the page cache"),
        ("cold", "safetensors load_file + clone", "safetensors, the same, copied"),
        ("many", "loadstone, large tensors", f"{OURS}, large tensors"),
        ("many", "loadstone, small tensors", f"{OURS}, 125,000 tensors of 24 KB"),
        ("many", "safetensors, small tensors", "safetensors, the same, copied"),
    ],
}


# Groups of bars in the chart: a title, and each case with its label.
CHART = ROOT / "docs" / "images" / "speed.svg"
BARS = [
    (
        "plain tensors",
        "dense",
        [
            (LIMIT, "two threads that only read"),
            ("loadstone", "loadstone"),
            ("safetensors load_file + clone", "safetensors, copied"),
            ("transformers from_pretrained", "transformers"),
            ("accelerate load_checkpoint_in_model", "accelerate"),
        ],
    ),
    (
        "128 experts a layer, fused",
        "experts",
        [
            (LIMIT, "two threads that only read"),
            ("loadstone", "loadstone"),
            ("transformers from_pretrained", "transformers"),
        ],
    ),
]


def machine() -> dict[str, Any]:
    """Return the machine, commit and releases to which the figures apply."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    words = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {
        "commit": commit.strip(),
        "date": datetime.date.today().isoformat(),
        "processor": " ".join(names[0].split()) if names else "unknown",
        "cores": os.cpu_count(),
        "releases": {name: importlib.metadata.version(name).split("+")[0] for name in LIBRARIES},
    }


def conditions(runs: dict[str, Any]) -> str:
    """Return the sentence above a table, which describes the conditions of the runs."""
    on = runs["machine"]
    repetitions = len(next(iter(runs["checkpoints"]["dense"]["cases"].values()))["seconds"])
    size = runs["checkpoints"]["dense"]["bytes"] / 1e9
    releases = ", ".join(f"{name} {version}" for name, version in on["releases"].items())
    return (
        f"`make bench-table` at commit `{on['commit']}`, {on['date']}, {on['cores']} cores of "
        f"{on['processor']}, {releases}. bf16 checkpoints of {size:.1f} GB, page cache warm, "
        f"fresh processes, {repetitions} interleaved runs of each."
    )


def row(runs: dict[str, Any], kind: str, case: str, label: str) -> str:
    """Return one row of a table."""
    cases = runs["checkpoints"][kind]["cases"]
    limit, found = next(iter(cases.values())), cases[case]
    median = statistics.median(found["seconds"])
    times = [statistics.median(limit["seconds"]), min(limit["seconds"])]
    ratio = f"{median / times[0]:.2f}x ({min(found['seconds']) / times[1]:.2f}x)"
    file = f"{found['file_bytes'] / 1e9:.2f} GB" if found is not limit else ""
    seconds = f"{median:.2f} ({min(found['seconds']):.2f})"
    anonymous = f"{found['anonymous_bytes'] / 1e9:.2f} GB"
    return f"| {label} | {seconds} | {ratio} | {anonymous} | {file} |".replace("  ", " ")


def table(page: str, runs: dict[str, Any]) -> str:
    """Return the table of a page."""
    head = "| | seconds: median (minimum) | times the limit | anonymous memory | mapped files |"
    rows = [row(runs, *each) for each in ROWS[page]]
    return "\n".join(
        [
            textwrap.fill(conditions(runs), 100, break_long_words=False, break_on_hyphens=False),
            "",
            head,
            "|---|---|---|---|---|",
            *rows,
        ]
    )


def with_table(text: str, page: str, runs: dict[str, Any]) -> str:
    """Return the page's text with a new table."""
    begin, end = "<!-- by bench/published.py -->\n\n", "\n\n<!-- end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} has no place for the table: {begin.strip()} ... {end.strip()}")
    return f"{before}{begin}{table(page, runs)}{end}{after}"


def chart(runs: dict[str, Any]) -> str:
    """Return a bar chart of the median seconds, as SVG."""
    size = runs["checkpoints"]["dense"]["bytes"] / 1e9
    pixels_a_second, left, lines, y = 130, 200, [], 20
    for title, kind, cases in BARS:
        lines.append(f'<text x="0" y="{y}" class="title">{size:.1f} GB of {title}</text>')
        for case, label in cases:
            y += 24
            seconds = statistics.median(runs["checkpoints"][kind]["cases"][case]["seconds"])
            width = round(seconds * pixels_a_second)
            name = "ours" if case == "loadstone" else "limit" if case == LIMIT else "other"
            lines += [
                f'<text x="{left - 8}" y="{y}" class="label">{label}</text>',
                f'<rect x="{left}" y="{y - 12}" width="{width}" height="16" class="{name}"/>',
                f'<text x="{left + width + 6}" y="{y}">{seconds:.2f} s</text>',
            ]
        y += 36
    style = (
        "text{font:13px sans-serif;fill:#57606a} .title{font-weight:bold} "
        ".label{text-anchor:end} .ours{fill:#0969da} .limit{fill:#d0d7de} .other{fill:#8c959f}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{y - 24}" role="img">'
    about = "<title>Median seconds of a load into private memory; shorter is better</title>"
    return "\n".join([head, about, f"<style>{style}</style>", *lines, "</svg>\n"])


def measure(gigabytes: float, repetitions: int) -> None:
    """Run the cases of all tables, and keep the results."""
    about = machine()
    part = RUNS.with_suffix(".part")
    words = ["--gigabytes", str(gigabytes), "--repetitions", str(repetitions), "--json", part]
    kinds = [word for kind in ("dense", "experts", "small") for word in ("--only", kind)]
    checkpoints: dict[str, Any] = {}
    for program in (["bench.loaders", *kinds], ["bench.reads"]):
        subprocess.run([sys.executable, "-m", *program, *words], cwd=ROOT, check=True)
        checkpoints |= json.loads(part.read_text(encoding="utf-8"))
    part.unlink()
    runs = {"machine": about, "checkpoints": checkpoints}
    RUNS.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="of the runs of before")
    arguments = parser.parse_args()
    if not arguments.write:
        measure(arguments.gigabytes, arguments.repetitions)
    runs = json.loads(RUNS.read_text(encoding="utf-8"))
    for page in ROWS:
        path = ROOT / page
        path.write_text(with_table(path.read_text(encoding="utf-8"), page, runs), encoding="utf-8")
    CHART.write_text(chart(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
