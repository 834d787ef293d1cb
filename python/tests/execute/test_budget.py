"""A load's peak memory is at most what its plan promises: 50 loads, each in a fresh process.

The loads choose at random the encoding of the file, the dtype, layout and encoding of the targets,
the number of readers and the staging. Each test measures the largest resident set, minus that of an
empty load. Files are read and not mapped, so only anonymous memory counts. The engine's own count
of bytes in flight must agree.
"""

from __future__ import annotations

import dataclasses
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from budget_files import LISTS, MIB, Stored, write_tensors
from codec_gguf import ALIGNMENT, block_size, type_number
from command import run
from quantize_targets import quantizing

import loadstone
from loadstone import Quantization
from loadstone._plan.planning import make_plan

SHAPES = {"square": (2048, 2048), "wide": (128, 53_248), "tall": (24_576, 256), "odd": (1411, 1283)}
SOURCES = ["BF16", "F32", "fp8", "fp8-block", "nf4", "gptq", "Q4_K", "Q8_0", "Q6_K"]
QUANTIZED = ["", "nf4", "nf4 nested", "int8", "fp8", "fp8-block", "nvfp4", "int8-channel", "mxfp8"]


@dataclasses.dataclass(frozen=True)
class Load:
    source: str
    shape: tuple[int, int]
    count: int
    dtype: str
    layout: str  # layout of the targets: "", "transpose" or "stack"
    quantize: str
    threads: int
    staging: int

    def __str__(self) -> str:
        words = [self.source, "x".join(map(str, self.shape)), f"{self.count} times", self.dtype]
        words += [self.layout, self.quantize, f"{self.threads} threads", f"{self.staging} bytes"]
        return ", ".join(filter(None, words))


def drawn(count: int) -> list[Load]:
    chance = random.Random(14)
    loads = [  # regression: this load needed 58 MB with a limit of 8 MB
        Load("BF16", SHAPES["wide"], 2, "F32", "", "fp8-block", 1, 8 * MIB)
    ]
    while len(loads) < count:
        source, shape = chance.choice(SOURCES), chance.choice(list(SHAPES.values()))
        if source not in ("BF16", "F32", "fp8", "fp8-block") and shape == SHAPES["odd"]:
            continue
        layout = chance.choice(["", "", "transpose", "stack"])
        quantize = chance.choice(QUANTIZED) if chance.random() < 0.5 and not layout else ""
        loads.append(
            Load(
                source,
                shape,
                chance.choice([1, 2, 8]),
                chance.choice(["BF16", "F32"]),
                layout,
                quantize,
                chance.choice([1, 2, 4]),
                chance.choice([1, 8, 64]) * MIB,
            )
        )
    return loads


def names(load: Load) -> list[str]:
    return [f"model.layers.{i}.mlp.up_proj.weight" for i in range(load.count)]


def tensors_of(load: Load) -> Stored:
    rows, columns = load.shape
    tensors: Stored = {}
    for name in names(load):
        module = name.removesuffix(".weight")
        if load.source in ("BF16", "F32"):
            tensors[name] = (load.source, [rows, columns], None)
        elif load.source == "fp8":
            tensors[name] = ("F8_E4M3", [rows, columns], None)
            tensors[f"{name}_scale"] = ("F32", [], struct.pack("<f", 0.5))
        elif load.source == "fp8-block":
            tensors[name] = ("F8_E4M3", [rows, columns], None)
            tensors[f"{name}_scale_inv"] = ("F32", [-(-rows // 128), -(-columns // 128)], None)
        elif load.source == "nf4":
            state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"}
            text = json.dumps(state | {"shape": [rows, columns]}).encode()
            code = struct.pack("<16f", *_nf4())
            tensors[name] = ("U8", [rows * columns // 2, 1], None)
            tensors[f"{name}.absmax"] = ("F32", [rows * columns // 64], None)
            tensors[f"{name}.quant_map"] = ("F32", [16], code)
            tensors[f"{name}.quant_state.bitsandbytes__nf4"] = ("U8", [len(text)], text)
        else:  # a GPTQ weight is stored as [inputs, outputs]
            groups, order = columns // 128, [i * 7 % (columns // 128) for i in range(columns)]
            tensors[f"{module}.qweight"] = ("I32", [columns // 8, rows], None)
            tensors[f"{module}.qzeros"] = ("I32", [groups, rows // 8], None)
            tensors[f"{module}.scales"] = ("F16", [groups, rows], None)
            g_idx = struct.pack(f"<{columns}i", *order)
            tensors[f"{module}.g_idx"] = ("I32", [columns], g_idx)
    return tensors


def _nf4() -> list[float]:
    import bnb_oracle

    return [float(value) for value in bnb_oracle.VALUES["nf4"]]


def write_safetensors(load: Load, folder: Path) -> Path:
    write_tensors(tensors_of(load), folder)
    if load.source == "gptq":
        config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
        config |= {"sym": False, "checkpoint_format": "gptq_v2"}
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def write_gguf(load: Load, folder: Path) -> Path:
    rows, columns = load.shape
    elements, block_bytes = block_size(load.source)
    size = rows * columns // elements * block_bytes
    infos, at = b"", 0
    for name in names(load):
        infos += struct.pack("<Q", len(name)) + name.encode()
        infos += struct.pack("<IQQIQ", 2, columns, rows, type_number(load.source), at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    head = struct.pack("<4sIQQ", b"GGUF", 3, load.count, 0) + infos
    head += b"\0" * (-len(head) % ALIGNMENT)
    path = folder / "model.gguf"
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + at)
    return path


def write_skeleton(load: Load, path: Path) -> Path:
    rows, columns = load.shape
    if load.layout == "stack":
        targets = {"experts": [load.count, rows, columns]}
    else:
        shape = [columns, rows] if load.layout == "transpose" else [rows, columns]
        targets = dict.fromkeys(names(load), shape)
    rows_of_file = [
        {"name": name, "shape": shape, "dtype": load.dtype, "kind": "parameter"}
        for name, shape in targets.items()
    ]
    path.write_text(json.dumps({"targets": rows_of_file}))
    return path


RULES = {
    "transpose": {"op": "transpose", "sources": ["(.*)"], "targets": ["$1"], "dims": [0, 1]},
    "stack": {
        "op": "stack",
        "sources": [r"model\.layers\.(\d+)\.mlp\.up_proj\.weight"],
        "targets": ["experts"],
        "dim": 0,
    },
}


def planned(load: Load, folder: Path) -> Path:
    write = write_safetensors if load.source in SOURCES[:6] else write_gguf
    checkpoint = write(load, folder)
    encoding, _, nested = load.quantize.partition(" ")
    how = Quantization(encoding, nested=bool(nested))
    plan = make_plan(
        write_skeleton(load, folder / "skeleton.json"),
        loadstone.inspect(checkpoint),
        quantizing(names(load), how) if load.quantize else None,
        rules=[RULES[load.layout]] if load.layout else None,
        staging_bytes_max=load.staging,
        threads=load.threads,
    )
    plan.require_ok()
    path = folder / "plan.json"
    path.write_text(plan.core.to_json())
    return path


def loaded(plan: Path) -> dict[str, Any]:
    done = run("load", "--plan", plan, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def resident_bytes_of_nothing(tmp_path_factory) -> int:
    small = Load("BF16", (1, 1), 1, "BF16", "", "", 1, MIB)
    plan = planned(small, tmp_path_factory.mktemp("small"))
    return max(loaded(plan)["process"]["resident_bytes_peak"] for _ in range(3))


@pytest.mark.parametrize("load", drawn(50), ids=str)
def test_the_peak_is_the_promised_one(
    load: Load, resident_bytes_of_nothing: int, tmp_path: Path
) -> None:
    document = loaded(planned(load, tmp_path))
    promised = document["peak_bytes"]["cpu"]
    model = document["bytes_written"]
    measured = document["process"]["resident_bytes_peak"] - resident_bytes_of_nothing
    print(f"{load}: promised {promised / MIB:.1f} MiB, measured {measured / MIB:.1f}")
    assert measured <= promised + LISTS
    assert promised <= 1.1 * measured + 8 * MIB
    assert document["staging_bytes_peak"] <= promised - model
    assert measured <= model + document["staging_bytes_peak"] + LISTS  # the engine's own count


def test_a_conversion_of_many_sources_keeps_its_limit(tmp_path: Path) -> None:
    """The limit includes what each thread keeps for every source of a target, such as digests."""
    tensors: Stored = {f"s{i}": ("BF16", [256, 1], None) for i in range(20_000)}
    checkpoint = write_tensors(tensors, tmp_path)
    rule = {"op": "concat", "sources": [r"s(\d+)"], "targets": ["model.layers.0.w"], "dim": 1}
    (tmp_path / "rules.json").write_text(json.dumps([rule]))
    arguments = ["--rules", tmp_path / "rules.json", "--threads", 16, "--json"]
    small = write_tensors({"t": ("BF16", [1], None)}, tmp_path / "small")
    nothing = json.loads(run("convert", small, tmp_path / "nothing", "--json").stdout)
    before = nothing["process"]["anonymous_bytes_peak"]
    for limit in ([], ["--max-memory", "64MiB"]):
        done = run("convert", checkpoint, tmp_path / f"out{len(limit)}", *arguments, *limit)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["peak_bytes"] <= 64 * MIB or not limit
        measured = document["process"]["anonymous_bytes_peak"] - before
        print(f"promised {document['peak_bytes'] / MIB:.1f} MiB, measured {measured / MIB:.1f}")
        assert 0 < measured <= document["peak_bytes"]


def test_memory_beyond_the_promise_would_be_seen(
    resident_bytes_of_nothing: int, tmp_path: Path
) -> None:
    """Control: the memory of a large load exceeds the promise of a small load's plan."""
    large = Load("F32", SHAPES["square"], 8, "F32", "transpose", "", 4, 64 * MIB)
    small = dataclasses.replace(large, layout="", threads=1)
    document = loaded(planned(large, tmp_path))
    measured = document["process"]["resident_bytes_peak"] - resident_bytes_of_nothing
    other = tmp_path / "small"
    other.mkdir()
    assert measured > loaded(planned(small, other))["peak_bytes"]["cpu"] + LISTS
