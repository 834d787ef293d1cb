"""Writes importance matrices with generated values, in both formats of llama-imatrix."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

CHUNKS = 7
DATASET = "wiki.train.raw"

# By tensor: sums of squares with shape [matrices, columns], and the use count of each matrix.
Entries = Mapping[str, tuple[np.ndarray, np.ndarray]]


def measured(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return entries for all matrices except embedding and output; one expert is unused."""
    made = {}
    for name, shape in shapes.items():
        if len(shape) < 2 or name in ("token_embd.weight", "output.weight"):
            continue
        chance = np.random.default_rng(len(made))
        matrices, columns = (shape[0] if len(shape) == 3 else 1), shape[-1]
        counts = chance.integers(1, 512, matrices).astype(np.float32)
        if matrices > 2:
            counts[1] = 0
        # A few columns have much larger values than the others, as in real models.
        sums = chance.lognormal(0, 2, (matrices, columns)).astype(np.float32)
        made[name] = (sums * np.minimum(counts, 1)[:, None], counts)
    return made


def write_dat(path: Path, entries: Entries) -> Path:
    """Write the format that preceded GGUF, in which a stack has one count for all its matrices."""
    with path.open("wb") as file:
        file.write(struct.pack("<i", len(entries)))
        for name, (sums, counts) in entries.items():
            text = name.encode()
            file.write(struct.pack("<i", len(text)) + text)
            file.write(struct.pack("<ii", int(counts.max()), sums.size) + sums.tobytes())
        text = DATASET.encode()
        file.write(struct.pack("<ii", CHUNKS, len(text)) + text)
    return path


def write_gguf(path: Path, entries: Entries) -> Path:
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", [DATASET, "another.txt"])
    writer.add_uint32("imatrix.chunk_count", CHUNKS)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, (sums, counts) in entries.items():
        writer.add_tensor(f"{name}.in_sum2", sums)
        writer.add_tensor(f"{name}.counts", counts.reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


WRITERS = {"dat": write_dat, "gguf": write_gguf}
