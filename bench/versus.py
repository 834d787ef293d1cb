"""Compare this tree with an older one: print the rows that are slower or larger.

    python -m bench.versus OLD_TREE [--rounds 5] [--data FOLDER] [ROW-PREFIX ...]

OLD_TREE is a checkout in which ``make package`` and the benchmark programs are built, as in this
one. A round runs each row three times: old, new, and old again as the control. Every run is a fresh
process after the same idle time. A row shows the ratio of the medians of new and old runs. It is
too slow if the ratio exceeds 3 % plus the spread, which is the median distance between the
control's rounds and the old ones. Both sides run this tree's benchmarks, so that only the product
differs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for children, whose Python has the other tree's package

from bench import checkpoints, gguf_bench, measure, single_files  # noqa: E402
from bench.cases import CASES  # noqa: E402

ALLOWED = 0.03
SETTLE_SECONDS = 1.0
KERNEL_MEBIBYTES = 64
# Checkpoints with their gigabytes, and the cases of bench.cases that load them.
LOADS = {
    ("dense", 1.5): ("loadstone", "loadstone, to f32", "loadstone.transformers"),
    ("experts", 1.5): ("loadstone", "loadstone.transformers"),
    ("mixture", 0.9133): ("loadstone.modelopt, to fp8", "loadstone.modelopt, to nvfp4"),
    ("quantized", 0.943): ("loadstone.transformers, to nf4", "loadstone.transformers, to int8"),
}
SINGLE_FILES = ("loadstone.diffusers, to bf16", "loadstone.diffusers, blocks")
GGUF = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS")
ENCODINGS = ("nf4", "fp4", "int8", "fp8", "fp8-block", "int4", "nvfp4", "mxfp4", "mxfp8")
PROGRAMS = ("header_bench", "plan_bench", "quantize_bench", "bnb_bench")


def kernel(make: Callable[[], Callable[[], object]]) -> dict[str, float]:
    """Return the shortest processor time of several calls on one thread."""
    import torch

    torch.set_num_threads(1)
    case, least = make(), float("inf")
    case()
    for _ in range(7):
        begin = time.process_time()
        case()
        least = min(least, time.process_time() - begin)
    return {"seconds": least}


def decode(name: str) -> Callable[[], object]:
    """Return a call that decodes GGUF blocks to BF16."""
    elements = KERNEL_MEBIBYTES * (1 << 20) // 4
    rows = gguf_bench.random_blocks(gguf_bench.GGMLQuantizationType[name], elements)
    return gguf_bench.ours(name, rows, elements, "BF16")


def encode(encoding: str) -> Callable[[], object]:
    """Return a call that quantizes BF16 to an encoding."""
    import torch

    import loadstone

    weight = torch.randn(8192, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    return lambda: loadstone.quantize(weight, encoding)


def large_plan() -> dict[str, float]:
    """Time the plan of 45,395 tensors, first without and then with cached recipes."""
    import tempfile

    import transformers

    import loadstone
    from bench import large_plan

    config = transformers.DeepseekV3Config(
        num_hidden_layers=large_plan.LAYERS, n_routed_experts=large_plan.EXPERTS
    )
    with loadstone.skeleton():
        model = transformers.DeepseekV3ForCausalLM(config)
    seconds = {}
    with tempfile.TemporaryDirectory() as where:
        os.environ["XDG_CACHE_HOME"] = where
        large_plan.write(Path(where), large_plan.tensors(model.state_dict()))
        for kind in ("cold", "cached"):
            begin = time.perf_counter()
            loadstone.plan(model, where, rules="transformers", dtype="bfloat16")
            seconds[kind] = time.perf_counter() - begin
    return seconds


def small_load() -> dict[str, float]:
    """Load 40 tensors of 16 KB into a skeleton: the first time, and the median of 50 more."""
    import tempfile

    import torch
    from safetensors.torch import save_file

    import loadstone

    def load() -> float:
        with loadstone.skeleton():
            model = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(40))
        begin = time.perf_counter()
        loadstone.load(model, path)
        return time.perf_counter() - begin

    with tempfile.TemporaryDirectory() as where:
        path = Path(where, "model.safetensors")
        save_file({f"{number}.weight": torch.randn(64, 64) for number in range(40)}, path)
        return {"first": load(), "median": statistics.median(load() for _ in range(50))}


def child(row: str, data: Path) -> None:
    """Run a row once, and print its seconds as JSON, by name if there are several."""
    kind, _, rest = row.partition(": ")
    if kind == "decode":
        print(json.dumps(kernel(lambda: decode(rest))))
    elif kind == "encode":
        print(json.dumps(kernel(lambda: encode(rest))))
    elif kind == "small load":
        print(json.dumps(small_load()))
    elif kind == "plan of 45,395 tensors":
        print(json.dumps(large_plan()))
    else:
        folder, _, case = rest.partition(": ")
        cases = single_files.CASES if kind == "file" else CASES
        measure.child(lambda: cases[case](data / folder))


def rows(data: Path) -> list[str]:
    """Return the names of all rows, after making their checkpoints."""
    found = [f"program: {name}" for name in PROGRAMS]
    found += [f"decode: {name}" for name in GGUF]
    found += [f"encode: {name}" for name in ENCODINGS]
    found += ["plan of 45,395 tensors", "small load"]
    for (kind, gigabytes), cases in LOADS.items():
        folder = checkpoints.make(data, kind, gigabytes)
        found += [f"load: {folder.name}: {case}" for case in cases]
    folder = single_files.make(data, 420)
    found += [f"file: {folder.name}: {case}" for case in SINGLE_FILES]
    found += [f"convert: {threads}" for threads in (1, 2)]
    return found


def warm(folder: Path) -> None:
    """Read a checkpoint into the page cache."""
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]:
        with file.open("rb", buffering=0) as stream:
            while stream.read(8 << 20):
                pass


def program(tree: Path, name: str) -> dict[str, float]:
    """Return the processor time of each of a program's benchmarks."""
    command = [tree / "build/bench/bin" / name, "--benchmark_format=json"]
    command += ["--benchmark_min_time=0.1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {each["name"]: each["cpu_time"] for each in json.loads(done.stdout)["benchmarks"]}


def convert(tree: Path, data: Path, threads: str) -> dict[str, float]:
    """Convert to nvfp4 with the command; return its time without the sync to the disk."""
    import shutil

    source, target = data / "mixture-0.9133", data / "converted"
    shutil.rmtree(target, ignore_errors=True)
    warm(source)
    time.sleep(SETTLE_SECONDS)
    command = [tree / ".venv/bin/loadstone", "convert", source, target, "--quantize", "nvfp4"]
    command += ["--threads", threads, "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.rmtree(target, ignore_errors=True)
    report = json.loads(done.stdout)
    synced = report.get("sync_seconds", 0.0)
    return {
        "seconds": report["seconds"] - synced,
        "resident": report["process"]["resident_bytes_peak"],
    }


def run(tree: Path, row: str, data: Path) -> dict[str, float]:
    """Run a row once with one tree; return its figures by name. Lower figures are better."""
    kind, _, rest = row.partition(": ")
    if kind == "program":
        return program(tree, rest)
    if kind == "convert":
        return convert(tree, data, rest)
    command = [tree / ".venv/bin/python", Path(__file__), tree, "--child", row, "--data", data]
    if kind in ("load", "file"):
        warm(data / rest.partition(": ")[0])
        result = measure.run(command, SETTLE_SECONDS)
        return {"seconds": result.seconds, "anonymous": result.grown_anonymous}
    time.sleep(SETTLE_SECONDS)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(row: str, runs: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return the lines of a row; lines above the allowance end with SLOWER or LARGER."""
    lines = []
    for name in runs["old"][0]:
        values = {
            arm: [figures[name] for figures in all_runs if name in figures]
            for arm, all_runs in runs.items()
        }
        if not values["new"]:
            continue
        old = statistics.median(values["old"] + values["control"])
        new = statistics.median(values["new"])
        pairs = zip(values["old"], values["control"], strict=True)
        spread = statistics.median(abs(b / a - 1) for a, b in pairs)
        ratio = new / old
        exceeds = ratio > 1 + ALLOWED + spread
        verdict = ("LARGER" if name in ("anonymous", "resident") else "SLOWER") if exceeds else ""
        label = row if name == "seconds" else f"{row}: {name}"
        lines.append(
            f"{label:64.64s}{old:14.5g}{new:14.5g}{ratio:8.3f}  +-{spread:5.1%}  {verdict}"
        )
    return lines


def main() -> None:
    """Run the rounds, and print a row when all of its runs are done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("rows", nargs="*", help="those that begin so; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path, default=ROOT / "build/bench-data")
    parser.add_argument("--child")
    arguments = parser.parse_intermixed_args()
    data: Any = arguments.data.resolve()
    if arguments.child:
        child(arguments.child, data)
        return
    arms = {"old": arguments.old.resolve(), "new": ROOT, "control": arguments.old.resolve()}
    wanted = tuple(arguments.rows) or ("",)
    chosen = [row for row in rows(data) if row.startswith(wanted)]
    runs: dict[str, dict[str, list[dict[str, float]]]] = {
        row: {arm: [] for arm in arms} for row in chosen
    }
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
        for row in chosen:
            order = list(arms)[number % 3 :] + list(arms)[: number % 3]
            for arm in order:
                runs[row][arm].append(run(arms[arm], row, data))
    print(f"{'':64s}{'old':>14s}{'new':>14s}{'ratio':>8s}  spread")
    lines = [line for row in chosen for line in compare(row, runs[row])]
    print("\n".join(lines))
    worse = sum(line.endswith(("SLOWER", "LARGER")) for line in lines)
    print(f"{len(lines)} figures, {worse} beyond {ALLOWED:.0%} plus the spread")


if __name__ == "__main__":
    main()
