"""A NaN or infinite scale spoils its values: for every codec, each entry point warns or rejects the
file, and names the tensor.

Only scales by which the library divides may be infinite. Then the decoded values are zeros, as in
the library, and ``verify`` reports the scale.
"""

from __future__ import annotations

import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_files import CODECS, Files, Written, each_once
from codec_gguf import HALVES
from codec_models import model_of, tensors_of
from command import run
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import loadstone
import loadstone.accelerate
from loadstone._base.errors import new_error

NAN, INFINITY = float("nan"), float("inf")
SAYS, REJECTED = "because of a scale", "rejected:"
# Bytes that every decoder reads as NaN, by the scale's dtype.
BYTES = {torch.uint8: 0xFF, torch.float8_e8m0fnu: 0xFF, torch.float8_e4m3fn: 0x7F}
# Offset of the scale in blocks whose scale is not F16. NVFP4 is excluded, because llama.cpp decodes
# a NaN scale as 0.
OTHER_BLOCKS = {"MXFP4": 0}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return each_once(tmp_path_factory.mktemp)


def scales(file: Written) -> Iterator[tuple[str, str]]:
    """Yield the role and the name of one scale tensor for each role and dtype."""
    seen = set()
    for value in file.quantized.values():
        for role, name in value.components.items():
            dtype = file.stored[name].dtype if file.stored else torch.float16
            is_scale = dtype.is_floating_point or (dtype == torch.uint8 and role == "scale")
            if is_scale and role != "data" and (role, dtype) not in seen:
                seen.add((role, dtype))
                yield role, name


def spoiled(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Return the tensor with its first scale set to this value."""
    made = tensor.clone()
    if made.dtype in BYTES:
        made.view(torch.uint8).view(-1)[0] = BYTES[made.dtype]
    else:
        made.view(-1)[0] = value
    return made


def copy_spoiled(file: Written, name: str, value: float, folder: Path) -> Path:
    """Copy a checkpoint of safetensors or torch files, with one scale set to this value."""
    source = file.path if file.path.is_dir() else file.path.parent
    shutil.copytree(source, folder)
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as opened:
                metadata = opened.metadata()
            tensors = load_file(path)
            if name in tensors:
                save_file(tensors | {name: spoiled(tensors[name], value)}, path, metadata)
        if path.suffix == ".bin":
            tensors = torch.load(path)
            torch.save(tensors | {name: spoiled(tensors[name], value)}, path)
    return folder if file.path.is_dir() else folder / file.path.name


def copy_spoiled_block(file: Written, kind: str, value: float, folder: Path) -> Path:
    """Copy a GGUF file, with the first scale of the first block set to this value."""
    raw = bytearray(file.path.read_bytes())
    begin = loadstone.inspect(file.path).tensors["blk.0.ffn_up.weight"].offset_begin
    if kind in OTHER_BLOCKS:
        raw[begin + OTHER_BLOCKS[kind]] = 0xFF
    elif kind == "IQ1_M":  # each of four 16-bit words contains four bits of the scale
        for i in range(4):
            word = struct.unpack("<H", struct.pack("<e", value))[0] >> 4 * i & 0xF
            raw[begin + 49 + 2 * i] = raw[begin + 49 + 2 * i] & 0x0F | word << 4
    else:
        at = begin + HALVES[kind][0]
        raw[at : at + 2] = struct.pack("<e", value)
    folder.mkdir()
    (folder / "model.gguf").write_bytes(raw)
    return folder / "model.gguf"


# ---- entry points, each of which warns or raises


def by_load(path: Path, file: Written, folder: Path) -> None:
    loadstone.load(model_of(file.numbers, torch.bfloat16), path)


def by_load_into_memory(path: Path, file: Written, folder: Path) -> None:
    loadstone.load(model_of(file.numbers, torch.float16, on_meta=False), path, in_place=True)


def by_float64_and_mmap(path: Path, file: Written, folder: Path) -> None:
    loadstone.load(model_of(file.numbers, torch.float64), path, mmap=True)


def by_saved_plan(path: Path, file: Written, folder: Path) -> None:
    model = model_of(file.numbers, torch.float32)
    loadstone.plan(model, path).save(folder / "plan.json")
    loadstone.Plan.load(folder / "plan.json").execute(model=model)


def by_disk(path: Path, file: Written, folder: Path) -> None:
    model = model_of(file.numbers, torch.float32)
    loadstone.load(model, path, device_map="disk", offload_folder=folder / "offload")


def by_open(path: Path, file: Written, folder: Path) -> None:
    opened = loadstone.open(path, dtype="float16")
    for name in file.quantized:
        assert len(opened[name][:])


def by_load_file(path: Path, file: Written, folder: Path) -> None:
    assert loadstone.load_file(path)


def by_dequantize(path: Path, file: Written, folder: Path) -> None:
    loadstone.convert(path, folder / "numbers.safetensors", dequantize=True)


def by_quantize(path: Path, file: Written, folder: Path) -> None:
    options: dict[str, Any] = {"dequantize": True, "quantize": "fp8-channel", "include": ".*"}
    loadstone.convert(path, folder / "codes.safetensors", dtype="bfloat16", **options)


def by_merge(path: Path, file: Written, folder: Path) -> None:
    zeros = {n: torch.zeros_like(t) for n, t in file.numbers.items() if t.is_floating_point()}
    save_file(zeros, folder / "zeros.safetensors")
    sources = [(path, 1.0), (folder / "zeros.safetensors", 1.0)]
    loadstone.merge(sources, folder / "merged.safetensors", dtype="float32")


def by_command(path: Path, file: Written, folder: Path) -> None:
    loadstone.save_skeleton(model_of(file.numbers, torch.float32), folder / "skeleton.json")
    done = run("load", path, "--skeleton", folder / "skeleton.json")
    if done.returncode != 0:
        raise new_error("usage", done.stderr)
    warnings.warn(done.stdout + done.stderr, stacklevel=1)


def by_accelerate(path: Path, file: Written, folder: Path) -> None:
    model = model_of(file.numbers, torch.float32)
    loadstone.accelerate.load_checkpoint_in_model(model, path)


Door = Callable[[Path, Written, Path], None]
DOORS: list[Door] = [
    by_load,
    by_load_into_memory,
    by_float64_and_mmap,
    by_saved_plan,
    by_disk,
    by_open,
    by_load_file,
    by_dequantize,
    by_quantize,
    by_merge,
    by_command,
    by_accelerate,
]


def said(door: Door, path: Path, file: Written, folder: Path) -> str:
    """Return the text of the warnings, or of the error."""
    folder.mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            door(path, file, folder)
        except loadstone.Error as error:
            return f"{REJECTED} {error} [{error.code}]"
    return "\n".join(str(each.message) for each in caught)


def is_reported(text: str) -> bool:
    return SAYS in text or text.startswith(REJECTED)


def doors_of(file: Written) -> list[Door]:
    """Return the entry points; accelerate does not use loadstone for bitsandbytes' tensors."""
    has_codes = any(value.encoding in ("nf4", "fp4", "int8") for value in file.quantized.values())
    return [door for door in DOORS if door is not by_accelerate or not has_codes]


SCALED = [
    codec
    for codec in CODECS
    if not codec.startswith("plain") and codec not in ("gguf-plain", "gguf-mixed", "gguf-NVFP4")
]


def spoiled_copies(codec: str, file: Written, value: float, folder: Path) -> Iterator[Path]:
    if codec.startswith("gguf-"):
        yield copy_spoiled_block(file, codec.removeprefix("gguf-"), value, folder / "gguf")
        return
    for i, (_, name) in enumerate(scales(file)):
        yield copy_spoiled(file, name, value, folder / str(i))


@pytest.mark.parametrize("codec", SCALED)
def test_every_entry_point_reports_a_scale_that_is_nan(
    codec: str, files: Files, tmp_path: Path
) -> None:
    file = files(codec)
    copies = 0
    for path in spoiled_copies(codec, file, NAN, tmp_path):
        copies += 1
        for door in doors_of(file):
            text = said(door, path, file, tmp_path / f"{copies}-{door.__name__}")
            assert is_reported(text), (path, door.__name__, text)
            is_named = any(name in text for name in file.quantized)
            assert is_named or text.startswith(REJECTED), (path, door.__name__, text)
    assert copies
    for door in doors_of(file):  # control
        text = said(door, file.path, file, tmp_path / f"control-{door.__name__}")
        assert not is_reported(text), (door.__name__, text)


@pytest.mark.parametrize("codec", SCALED)
def test_an_infinite_scale_is_reported_unless_it_divides(
    codec: str, files: Files, tmp_path: Path
) -> None:
    file = files(codec)
    for i, path in enumerate(spoiled_copies(codec, file, INFINITY, tmp_path)):
        model = model_of(file.numbers, torch.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                loadstone.load(model, path)
            except loadstone.Error as error:
                assert error.code == "q.nan"
                continue
        is_finite = all(
            bool(tensor.isfinite().all())
            for name, tensor in tensors_of(model).items()
            if name in file.quantized
        )
        assert is_finite != any(SAYS in str(each.message) for each in caught), (path, i)
        if is_finite:
            done = run("verify", path)
            assert done.returncode == 1 and "q.nan" in done.stdout + done.stderr
