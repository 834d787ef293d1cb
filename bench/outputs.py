"""Compare conversions that compute (merges, GGUF blocks) with one that only copies bytes.

    python -m bench.outputs [--gigabytes 1.3] [--repetitions 4] [--data /dev/shm]
    LOADSTONE_MERGEKIT=DIR python -m bench.outputs     # adds a linear merge and mergekit's

Run by ``make bench``. The command converts a BF16 file unchanged, merges a LoRA of rank 16 into all
its matrices, and writes it as GGUF blocks. The cases are interleaved, each after the same idle
time. The table shows speeds relative to the unchanged copy, by the clock and by processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import distributions
from pathlib import Path

import torch
from safetensors.torch import save_file

SETTLE_SECONDS = 1.0
RANK = 16
SHAPES = {
    "self_attn.q_proj": (2048, 2048),
    "mlp.up_proj": (5632, 2048),
    "mlp.down_proj": (2048, 5632),
}
LAYER_BYTES = 2 * sum(rows * columns for rows, columns in SHAPES.values())
MODELS = ("first", "second")
BLOCKS = ("q8_0", "q4_0", "q4_k", "q6_k")
METADATA = {
    "format": "loadstone-gguf-metadata",
    "version": 1,
    "entries": [{"key": "general.architecture", "type": "string", "value": "bench"}],
}


def make(folder: Path, layers: int) -> int:
    """Write a base and an adapter; return the size of the base in bytes."""
    base: dict[str, torch.Tensor] = {}
    adapter: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        for name, (rows, columns) in SHAPES.items():
            path = f"model.layers.{layer}.{name}"
            base[f"{path}.weight"] = torch.randn(rows, columns).bfloat16()
            adapter[f"base_model.model.{path}.lora_A.weight"] = torch.randn(RANK, columns)
            adapter[f"base_model.model.{path}.lora_B.weight"] = torch.randn(rows, RANK)
    save_file(base, folder / "base.safetensors")
    (folder / "adapter").mkdir()
    save_file(adapter, folder / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    (folder / "metadata.json").write_text(json.dumps(METADATA))
    return sum(tensor.nbytes for tensor in base.values())


def commands(folder: Path) -> dict[str, list[str]]:
    """Return the command's arguments by case; the unchanged copy comes first."""
    base, copy, file = (
        str(folder / name) for name in ("base.safetensors", "o.safetensors", "o.gguf")
    )
    keys = ["--metadata", str(folder / "metadata.json")]
    return {
        "unchanged": ["convert", base, copy],
        "LoRA merged": ["merge", base, "--lora", str(folder / "adapter"), "-o", copy],
        **{each: ["convert", base, file, *keys, "--quantize", each] for each in BLOCKS},
    }


def make_models(folder: Path) -> None:
    """Write two models with the base's tensors, in folders that mergekit accepts."""
    config = {"architectures": ["Bench"], "model_type": "llama"}
    for name in ("first", "second"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "model.safetensors").hardlink_to(folder / "base.safetensors")
    models = [{"model": str(folder / name), "parameters": {"weight": 0.5}} for name in MODELS]
    recipe = {"merge_method": "linear", "dtype": "bfloat16", "models": models}
    (folder / "linear.yml").write_text(json.dumps(recipe))  # JSON is valid YAML


def compare_with_mergekit(folder: Path, place: str, repetitions: int) -> None:
    """Print seconds of a linear merge by loadstone and by mergekit, and of mergekit's start."""
    make_models(folder)
    theirs = [sys.executable, "-m", "mergekit.scripts.run_yaml"]
    merged = [str(folder / "linear.yml"), str(folder / "o.mergekit")]
    ours = [f"{folder / name}:0.5" for name in MODELS]
    cases = {
        "linear merge": ["loadstone", "merge", *ours, "-o", str(folder / "o.linear")],
        "mergekit": [*theirs, *merged, "--no-copy-tokenizer", "--no-write-model-card"],
        "its start": [*theirs, "--help"],
    }
    paths = filter(None, [place, os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    times: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(repetitions):
        for case, command in cases.items():
            times[case].append(run(command, environment)[0])
            for output in folder.glob("o.*"):
                shutil.rmtree(output)
    ours_best, theirs_best, start = (min(times[case]) for case in cases)
    for case in cases:
        print(f"{case:14s}{statistics.median(times[case]):10.3f}")
    without = (theirs_best - start) / ours_best
    print(f"mergekit takes {theirs_best / ours_best:.1f}x, without its start {without:.1f}x")
    version = [d.version for d in distributions(path=[place]) if d.name == "mergekit"]
    print(f"mergekit {', '.join(version)}, torch {torch.__version__}")


def run(command: list[str], environment: dict[str, str] | None = None) -> tuple[float, float]:
    """Return the wall and processor seconds of one run."""
    time.sleep(SETTLE_SECONDS)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True
    )
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.3)
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("--data", help="where files go; in memory no disk is measured")
    arguments = parser.parse_args()
    place = arguments.data or ("/dev/shm" if Path("/dev/shm").is_dir() else None)
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        size = make(folder, max(1, round(arguments.gigabytes * 1e9 / LAYER_BYTES)))
        times: dict[str, list[tuple[float, float]]] = {case: [] for case in commands(folder)}
        for _ in range(arguments.repetitions):
            for case, command in commands(folder).items():
                times[case].append(run(["loadstone", *command]))
                for output in folder.glob("o.*"):
                    output.unlink()
        mergekit = os.environ.get("LOADSTONE_MERGEKIT", "")
        if mergekit:
            compare_with_mergekit(folder, mergekit, arguments.repetitions)
    print(f"{size / 1e9:.2f} GB of BF16, {arguments.repetitions} runs each")
    print("                 seconds   GB/s  of unchanged  by processor time")
    first = [min(column) for column in zip(*times["unchanged"], strict=True)]
    for case, runs in times.items():
        least = [min(column) for column in zip(*runs, strict=True)]
        median = statistics.median(seconds for seconds, _ in runs)
        print(
            f"{case:14s}{median:10.3f}{size / median / 1e9:7.2f}"
            f"{first[0] / least[0]:13.2f}x{first[1] / least[1]:18.2f}x"
        )


if __name__ == "__main__":
    main()
