"""Quantize a mixture of experts to NVFP4, file to file, and compare with ModelOpt.

    python -m bench.quantize_files [--folder DIR] [--gigabytes 0.9133] [--sample 64]

Run by ``make bench``. Each conversion is a process of the command, whose memory is the peak of
resident bytes, including the program itself (5 MiB). The whole file would take ModelOpt minutes, so
its kernels process a sample of ``--sample`` mebibytes on one thread, and their time is scaled by
bytes. The comparison uses processor time, because other work on the machine would distort wall
time. If llm-compressor is installed, its ``model_free_ptq`` runs on the whole file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from bench import checkpoints

MIB = 1 << 20
COMMAND = Path(sys.executable).parent / "loadstone"


@dataclass
class Run:
    """Wall and processor time of a process, and its peak of resident bytes.

    Attributes:
        synced: the part of the wall time that was spent on writing files to the disk, in seconds.
    """

    seconds: float
    synced: float
    processor: float
    resident: int


def processor_of_children() -> float:
    """Return the processor seconds of all finished children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def converted(source: Path, target: Path, threads: int) -> Run:
    """Run loadstone's conversion, and delete its output."""
    command: list[str | Path] = [COMMAND, "convert", source, target, "--quantize", "nvfp4"]
    command += ["--threads", str(threads), "--json"]
    begin, before = time.perf_counter(), processor_of_children()
    try:
        done = subprocess.run(command, check=True, capture_output=True)
    finally:
        shutil.rmtree(target, ignore_errors=True)
    seconds = time.perf_counter() - begin
    processor = processor_of_children() - before
    report = json.loads(done.stdout)
    return Run(seconds, report["sync_seconds"], processor, report["process"]["resident_bytes_peak"])


def weights(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint."""
    return sorted(folder.glob("*.safetensors"))


def weight_bytes(folder: Path) -> int:
    """Return the number of bytes that the quantized tensors would take in bf16."""
    total = 0
    for path in weights(folder):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if "_proj." in name]  # noqa: SIM118
            shapes = [file.get_slice(name).get_shape() for name in names]
            total += sum(2 * rows * columns for rows, columns in shapes)
    return total


def kernels_of_modelopt(folder: Path, sample_bytes: int) -> tuple[float, int]:
    """Quantize experts, with scales as in ModelOpt's export; return the seconds and the bytes."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    torch.set_num_threads(1)
    seconds = 0.0
    count = 0
    for path in weights(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118, not a mapping
                if ".experts." not in name:
                    continue
                weight = file.get_tensor(name)
                begin = time.process_time()
                scale_2 = weight.abs().amax().float() / 2688
                scale = NVFP4QTensor.get_weights_scaling_factor(weight, 16, scale_2)[0]
                NVFP4QTensor.quantize(weight, 16, scale, scale_2)
                seconds += time.process_time() - begin
                count += weight.nbytes
                if count >= sample_bytes:
                    return seconds, count
    return seconds, count


def model_free(source: Path, target: Path) -> float | None:
    """Return the seconds of llm-compressor's conversion, or None if it is not installed."""
    if importlib.util.find_spec("llmcompressor") is None:
        return None
    code = (
        "import sys; from llmcompressor import model_free_ptq; "
        "model_free_ptq(sys.argv[1], sys.argv[2], 'NVFP4A16', "
        "ignore=['lm_head', 're:.*mlp.gate$', 'model.embed_tokens'], device='cpu')"
    )
    begin = time.perf_counter()
    try:
        subprocess.run([sys.executable, "-c", code, source, target], check=True)
        return time.perf_counter() - begin
    finally:
        shutil.rmtree(target, ignore_errors=True)


def report(folder: Path, gigabytes: float, sample_bytes: int) -> None:
    source = checkpoints.make(folder, "mixture", gigabytes, shards=6)
    twice = checkpoints.make(folder, "mixture", 2 * gigabytes - 0.0655, shards=12)
    quantized = sum(path.stat().st_size for path in weights(source))
    target = folder / "quantized"
    print(f"nvfp4, {quantized / MIB:.0f} MiB of bf16")
    best = float("inf")
    for label, path in (("", source), (", twice the layers", twice)):
        for threads in (1, 4):
            took = converted(path, target, threads)
            if path is source:
                best = min(best, took.processor)
            print(
                f"  loadstone, {threads} threads{label}: {took.seconds - took.synced:.2f} s "
                f"and {took.synced:.2f} s until the disk has it "
                f"({took.processor:.2f} s of processors), "
                f"{took.resident / MIB:.1f} MiB resident at most"
            )
    seconds, count = kernels_of_modelopt(source, sample_bytes)
    whole = seconds * weight_bytes(source) / count
    print(
        f"  ModelOpt's kernels: {whole:.0f} s of one processor ({seconds:.2f} s for "
        f"{count / MIB:.0f} MiB, scaled), {whole / best:.0f} times as long"
    )
    other = model_free(source, target)
    if other is None:
        print("  llm-compressor: not installed")
    else:
        print(f"  model_free_ptq: {other:.0f} s, {other / best:.0f} times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=0.9133)
    parser.add_argument("--sample", type=int, default=64, help="mebibytes for ModelOpt's kernels")
    args = parser.parse_args()
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
        report(args.folder, args.gigabytes, args.sample * MIB)
        return
    with tempfile.TemporaryDirectory() as folder:
        report(Path(folder), args.gigabytes, args.sample * MIB)


if __name__ == "__main__":
    main()
