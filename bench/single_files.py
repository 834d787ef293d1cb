"""Compare loads of a diffusers model in Q8_0, decoded to bf16 or kept as blocks, with diffusers.

    python -m bench.single_files [--data FOLDER] [--mebibytes 420] [--repetitions 5]

Run by ``make bench``, and by the test of the peak memory. diffusers can only load blocks, so to get
bf16 it then calls its own ``dequantize()``, in F16 arithmetic. loadstone's values equal gguf-py's.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import measure
from bench.loaders import LIMIT, compare, table

Work = Callable[[], Any]

# The published files have diffusers' own names, so this file needs no mapping.
CLASS = "QwenImageTransformer2DModel"
CONFIG = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "joint_attention_dim": 1536,
    "axes_dims_rope": [16, 56, 56],
}
LAYER_BYTES = 36 * 1536 * 1536 * 34 // 32


def make(folder: Path, mebibytes: float) -> Path:
    """Write the file and its config, unless they exist; return the folder."""
    import diffusers
    import gguf
    import numpy
    import torch

    target = folder / f"q8_0-{mebibytes:g}"
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    layers = max(1, round(mebibytes * 2**20 / LAYER_BYTES))
    with torch.device("meta"):
        model = getattr(diffusers, CLASS)(num_layers=layers, **CONFIG)
    writer = gguf.GGUFWriter(target / "model.gguf", "test")
    generator = numpy.random.default_rng(1)
    for name, tensor in model.state_dict().items():
        data = generator.standard_normal(tuple(tensor.shape), numpy.float32) * 0.02
        is_matrix = data.ndim == 2 and data.shape[1] % 32 == 0
        kind = gguf.GGMLQuantizationType.Q8_0 if is_matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.save_config(target)  # written last, so a folder with a config is complete
    return target


def bf16_bytes(folder: Path) -> int:
    """Return the bytes of the finished model in bf16."""
    import loadstone

    tensors = loadstone.inspect(folder / "model.gguf").tensors.values()
    return sum(2 * math.prod(tensor.shape) for tensor in tensors)


def _arguments(folder: Path, is_packed: bool) -> tuple[Any, dict[str, Any]]:
    import diffusers
    import torch

    arguments: dict[str, Any] = {"config": str(folder), "torch_dtype": torch.bfloat16}
    if is_packed:
        arguments["quantization_config"] = diffusers.GGUFQuantizationConfig(
            compute_dtype=torch.bfloat16
        )
    return getattr(diffusers, CLASS), arguments


def _ours(folder: Path, is_packed: bool) -> Work:
    import loadstone.diffusers

    cls, arguments = _arguments(folder, is_packed)
    file = folder / "model.gguf"
    return lambda: loadstone.diffusers.from_single_file(cls, file, **arguments)


def _theirs(folder: Path, is_packed: bool) -> Work:
    cls, arguments = _arguments(folder, is_packed=True)

    def work() -> Any:
        model = cls.from_single_file(str(folder / "model.gguf"), **arguments)
        return model if is_packed else model.dequantize()

    return work


CASES: dict[str, Callable[[Path], Work]] = {
    "loadstone.diffusers, to bf16": lambda folder: _ours(folder, is_packed=False),
    "diffusers from_single_file, dequantize": lambda folder: _theirs(folder, is_packed=False),
    "loadstone.diffusers, blocks": lambda folder: _ours(folder, is_packed=True),
    "diffusers from_single_file, blocks": lambda folder: _theirs(folder, is_packed=True),
}


def command(case: str, folder: Path) -> list[str | Path]:
    """Return the command that runs a case in a separate process."""
    return [sys.executable, "-m", "bench.single_files", "--child", case, "--data", folder.resolve()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("build/bench-data"))
    parser.add_argument("--mebibytes", type=float, default=420)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--settle", type=float, default=measure.SETTLE_SECONDS)
    parser.add_argument("--limits", type=Path, default=Path("build/bench/bin/limits"))
    parser.add_argument("--child")
    arguments = parser.parse_args()
    if arguments.child:
        measure.child(lambda: CASES[arguments.child](arguments.data))
        return
    maker = (
        "import sys, pathlib; from bench import single_files; "
        "single_files.make(pathlib.Path(sys.argv[1]), float(sys.argv[2]))"
    )
    words = [str(arguments.data), str(arguments.mebibytes)]
    subprocess.run([sys.executable, "-c", maker, *words], check=True)  # separate memory
    folder = arguments.data / f"q8_0-{arguments.mebibytes:g}"
    file = folder / "model.gguf"
    results: dict[str, list[measure.Result]] = {case: [] for case in [LIMIT, *CASES]}
    for _ in range(arguments.repetitions):
        for case in results:
            file.read_bytes()  # brings the file into the page cache
            words = [arguments.limits.resolve(), "2", file.resolve()]
            run = words if case == LIMIT else command(case, folder)
            results[case].append(measure.run(run, arguments.settle))
    table("Q8_0 file of a diffusers model", results, file.stat().st_size)
    names = list(CASES)
    compare(results, dict(zip(names[::2], names[1::2], strict=True)))


if __name__ == "__main__":
    main()
