"""Compare load times and memory with similar libraries and the machine's limit.

    python -m bench.loaders [--data FOLDER] [--gigabytes 3] [--repetitions 5] [--only small]
                            [--json FILE]

Run by ``make bench``. Every measurement is a fresh process after the same idle time, and the cases
are interleaved. A row shows the median, and its ratio to the limit: two threads that populate new
memory and ``pread`` the same files into it, 4 MiB at a time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import checkpoints, measure
from bench.cases import CASES, PACKED
from bench.cases import QUANTIZED as KINDS

LIMIT = "limit: populate + pread, 2 threads"
DENSE = [
    LIMIT,
    "loadstone",
    "safetensors load_file + clone",
    "loadstone.transformers",
    "transformers from_pretrained",
    "accelerate load_checkpoint_in_model",
    "loadstone, to f32",
    "loadstone.transformers, to f32",
    "transformers, to f32",
]
EXPERTS = [
    LIMIT,
    "loadstone, as it is",
    "loadstone",
    "safetensors load_file + clone",
    "loadstone.transformers",
    "transformers from_pretrained",
]
QUANTIZED = [
    LIMIT,
    *(f"{who}, to {kind}" for kind in KINDS for who in ("loadstone.transformers", "transformers")),
]
# Cases for a model so small that the fixed costs of a load dominate.
SMALL = [
    LIMIT,
    "loadstone.transformers, to f32",
    "transformers, to f32",
    "transformers, views of the file",
]
MIXTURE = [
    LIMIT,
    "loadstone.transformers",
    "transformers from_pretrained",
    *(
        f"{who}, to {kind}"
        for kind in PACKED
        for who in ("loadstone.modelopt", "ModelOpt in memory")
    ),
]
# A case of loadstone, and the library's own way to the same model; the table shows their ratio.
PAIRS = {
    "loadstone.transformers": "transformers from_pretrained",
    "loadstone.transformers, to f32": "transformers, to f32",
    **{f"loadstone.modelopt, to {kind}": f"ModelOpt in memory, to {kind}" for kind in PACKED},
}


def compare(results: dict[str, list[measure.Result]], pairs: dict[str, str]) -> None:
    """Print two ratios for each measured pair: of the medians, and of the shortest times."""
    for ours, theirs in pairs.items():
        if ours in results and theirs in results:
            times = [[run.seconds for run in results[case]] for case in (ours, theirs)]
            median, least = (of(times[0]) / of(times[1]) for of in (statistics.median, min))
            print(f"{ours}: {median:.2f} of the time of {theirs} ({least:.2f} of the least)")


def warm(folder: Path) -> int:
    """Read the shards into the page cache; return their bytes."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb", buffering=0) as stream:
            while block := stream.read(8 << 20):
                total += len(block)
    return total


def one(case: str, folder: Path, limits: Path, settle: float) -> measure.Result:
    """Run one case once."""
    warm(folder)
    if case == LIMIT:
        files = sorted(folder.glob("*.safetensors"))
        return measure.run([limits.resolve(), "2", *(file.resolve() for file in files)], settle)
    command = [sys.executable, "-m", "bench.loaders", "--child", case, "--data", folder.resolve()]
    return measure.run(command, settle)


def table(kind: str, results: dict[str, list[measure.Result]], size: int) -> None:
    """Print medians, spread and ratios of one checkpoint; the first case is the limit."""
    first = next(iter(results.values()))
    limit = statistics.median(result.seconds for result in first)
    print(f"\n{kind}: {size / 1e9:.2f} GB, {len(first)} runs each")
    print(f"{'':38s}{'seconds (min .. max)':>24s}{'GB/s':>7s}{'limit':>8s}{'anon':>9s}{'file':>9s}")
    for case, runs in results.items():
        seconds = sorted(result.seconds for result in runs)
        median = statistics.median(seconds)
        anonymous = max(result.grown_anonymous for result in runs) / 1e9
        file = max(result.grown_file for result in runs) / 1e9
        print(
            f"{case:38s}{median:9.3f} ({seconds[0]:5.3f} .. {seconds[-1]:5.3f})"
            f"{size / median / 1e9:7.2f}{median / limit:7.2f}x{anonymous:6.2f} GB{file:6.2f} GB",
            flush=True,
        )


def record(results: dict[str, list[measure.Result]], size: int) -> dict[str, Any]:
    """Return the data for the tables of :mod:`bench.published`."""
    return {
        "bytes": size,
        "cases": {
            case: {
                "seconds": [round(run.seconds, 4) for run in runs],
                "anonymous_bytes": max(run.grown_anonymous for run in runs),
                "file_bytes": max(run.grown_file for run in runs),
            }
            for case, runs in results.items()
        },
    }


def main() -> None:
    parser = measure.table_parser(__doc__)
    parser.add_argument("--limits", type=Path, default=Path("build/bench/bin/limits"))
    parser.add_argument("--only", action="append", help="a checkpoint: small, mixture ...")
    arguments = parser.parse_args()
    if arguments.child:
        measure.child(lambda: CASES[arguments.child](arguments.data))
        return
    sizes = {"dense": arguments.gigabytes, "experts": arguments.gigabytes}
    sizes |= {"mixture": 0.91, "quantized": 0.943, "small": 0.09}
    recorded = {}
    for kind, cases in {
        "small": SMALL,
        "dense": DENSE,
        "experts": EXPERTS,
        "mixture": MIXTURE,
        "quantized": QUANTIZED,
    }.items():
        if kind not in (arguments.only or sizes):
            continue
        maker = (
            "import sys, pathlib; from bench import checkpoints; "
            "checkpoints.make(pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))"
        )
        words = [str(arguments.data), kind, str(sizes[kind])]
        subprocess.run([sys.executable, "-c", maker, *words], check=True)  # separate memory
        folder = checkpoints.make(arguments.data, kind, sizes[kind])
        size = warm(folder)
        results: dict[str, list[measure.Result]] = {case: [] for case in cases}
        for _ in range(arguments.repetitions):
            for case in cases:
                results[case].append(one(case, folder, arguments.limits, arguments.settle))
        table(kind, results, size)
        compare(results, PAIRS)
        recorded[kind] = record(results, size)
    if arguments.json:
        arguments.json.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
