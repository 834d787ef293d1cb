"""Values that cannot be quantized: the error distinguishes values that are NaN or infinite in the
file, values that a scale makes infinite, and finite values too large for the intermediate dtype."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from overflow_models import LLAMA
from safetensors.torch import save_file

import loadstone

NAME = "x.weight"
AT = 197  # [3, 5]
INFINITY, NAN = float("inf"), float("nan")
ENCODINGS = ["nf4", "fp4", "int8", "fp8", "fp8-channel", "nvfp4", "mxfp8", "q8_0", "q4_k"]
GGUF = {"q8_0", "q4_k"}


def checkpoint(path: Path, dtype: torch.dtype, value: float) -> Path:
    numbers = torch.linspace(-2, 2, 64 * 256, dtype=torch.float64)
    numbers[AT] = value
    save_file({NAME: numbers.to(dtype).reshape(64, 256)}, path)
    return path


def fp8_checkpoint(path: Path, scale: float) -> Path:
    """Write codes of 1 and one code of 448, whose row has the given scale."""
    codes, scales = torch.ones(64, 256), torch.ones(64, 1)
    codes.view(-1)[AT] = 448
    scales[AT // 256] = scale
    save_file({NAME: codes.to(torch.float8_e4m3fn), f"{NAME}_scale": scales}, path)
    return path


def by_convert(source: Path, encoding: str, dtype: str) -> None:
    suffix = "gguf" if encoding in GGUF else "safetensors"
    metadata = LLAMA if encoding in GGUF else None
    options: dict[str, Any] = {"quantize": encoding, "include": "x", "metadata": metadata}
    loadstone.convert(source, source.with_name(f"o.{suffix}"), dtype=dtype, **options)


def by_merge(source: Path, encoding: str, dtype: str) -> None:
    save_file({NAME: torch.zeros(64, 256)}, zeros := source.with_name("zeros.safetensors"))
    metadata = LLAMA if encoding in GGUF else None
    target = source.with_name("merged.gguf" if encoding in GGUF else "merged.safetensors")
    options: dict[str, Any] = {"quantize": encoding, "include": "x", "metadata": metadata}
    loadstone.merge([(source, 1.0), (zeros, 1.0)], target, dtype=dtype, **options)


def by_command(source: Path, encoding: str, dtype: str) -> None:
    target = source.with_name("o.safetensors")
    options = ("--quantize", encoding, "--include", "x", "--dtype", dtype, "--json")
    done = run("convert", source, target, *options)
    if done.returncode:
        error = json.loads(done.stdout)["error"]
        raise loadstone.Error(error["message"], error["code"])


Door = Callable[[Path, str, str], None]
DOORS: dict[str, Door] = {"convert": by_convert, "merge": by_merge, "command": by_command}


def error_of(door: Door, source: Path, encoding: str, dtype: str = "float16") -> tuple[str, str]:
    """Return the error's code and message."""
    with pytest.raises(loadstone.Error) as caught:
        door(source, encoding, dtype)
    return caught.value.code, str(caught.value)


@pytest.mark.parametrize(
    ("door", "encoding"),
    [("convert", each) for each in ENCODINGS]
    + [(door, each) for door in DOORS for each in ("nf4", "nvfp4") if door != "convert"],
)
def test_finite_values_are_not_called_nan(encoding: str, door: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for dtype, value in ((torch.float32, 1e5), (torch.bfloat16, -1e5), (torch.float64, 1e30)):
        stored = torch.tensor(value, dtype=dtype).item()
        code, message = error_of(DOORS[door], checkpoint(path, dtype, value), encoding)
        assert code == "convert.overflow"
        assert f"element {AT} is " in message and "too large for F16" in message
        found = float(message.split(f"element {AT} is ")[1].split(", which")[0])
        assert found == pytest.approx(stored, rel=1e-6)
    # Controls: NaN and infinite values in the file, and a value that fits.
    for value in (INFINITY, -INFINITY, NAN):
        code, message = error_of(DOORS[door], checkpoint(path, torch.float32, value), encoding)
        assert code == "q.nan"
        assert f"element {AT} is NaN or infinite" in message and "scale" not in message
    DOORS[door](checkpoint(path, torch.float32, 6e4), encoding, "float16")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_decoded_values(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    if encoding in ("nf4", "fp4", "int8"):
        code, message = error_of(by_convert, fp8_checkpoint(path, 1000.0), encoding)
        assert code == "convert.overflow" and f"element {AT} is 448000, which" in message
    else:  # other encodings get the values in F32
        by_convert(fp8_checkpoint(path, 1000.0), encoding, "float16")
    for scale in (INFINITY, NAN):
        code, message = error_of(by_convert, fp8_checkpoint(path, scale), encoding)
        assert code == "q.nan" and "element 0 is NaN or infinite because of a scale" in message
    by_convert(fp8_checkpoint(path, 100.0), encoding, "float16")


@pytest.mark.parametrize("encoding", ["nf4", "int8"])
def test_a_load_that_quantizes(encoding: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    path = tmp_path / "a.safetensors"

    def load(**options: Any) -> list[tuple[str, str]]:
        with loadstone.skeleton():
            model = torch.nn.ModuleDict({"x": torch.nn.Linear(256, 64, False).half()})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = loadstone.load(model, path, quantize=encoding, **options)
        return [(each.code, each.message) for each in report.findings]

    checkpoint(path, torch.float32, 1e5)
    with pytest.raises(loadstone.Error) as caught:
        load()
    assert caught.value.code == "convert.overflow"
    found = load(allow_non_finite=True)
    assert {code for code, _ in found if code != "plan.cast"} == {"convert.overflow"}, found
    assert any(f"element {AT} is 100000" in message for _, message in found)
    checkpoint(path, torch.float32, NAN)
    assert "q.nan" in {code for code, _ in load(allow_non_finite=True)}  # control
