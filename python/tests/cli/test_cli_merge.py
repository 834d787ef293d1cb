"""Errors of ``loadstone merge``, and its exit status."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from .conftest import Run, WriteFile

GOOD = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
MODULE = "base_model.model.l"


@pytest.fixture
def base(tmp_path: Path, write_safetensors: WriteFile) -> Path:
    numbers = struct.pack("<64f", *range(64))
    return write_safetensors(tmp_path / "base.safetensors", {"l.weight": ("F32", [8, 8])}, numbers)


@pytest.fixture
def adapter(
    tmp_path: Path, write_safetensors: WriteFile
) -> Callable[[Mapping[str, Any] | str], Path]:
    def write(config: Mapping[str, Any] | str) -> Path:
        folder = tmp_path / "adapter"
        folder.mkdir()
        text = config if isinstance(config, str) else json.dumps({**GOOD, **config})
        (folder / "adapter_config.json").write_text(text)
        write_safetensors(
            folder / "adapter_model.safetensors",
            {
                f"{MODULE}.lora_A.weight": ("F32", [2, 8]),
                f"{MODULE}.lora_B.weight": ("F32", [8, 2]),
            },
            struct.pack("<32f", *[0.5] * 32),
        )
        return folder

    return write


@pytest.mark.parametrize(
    "config",
    [
        "",
        "{",
        "[]",
        '{"r": 2, "r": 2}',
        {"r": "2"},
        {"r": 1e30},
        {"r": 4},
        {"lora_alpha": float("nan")},
        {"lora_alpha": 1e300},
        {"peft_type": "LOHA"},
        {"lora_bias": True},
        {"rank_pattern": {"(": 2}},
    ],
)
def test_a_malformed_adapter_is_a_bad_file(
    run: Run, base: Path, adapter: Callable[..., Path], tmp_path: Path, config: Any
) -> None:
    out = tmp_path / "out.safetensors"
    done = run("merge", base, "--lora", adapter(config), "-o", out, status=3)
    assert "[format.adapter]" in done.stderr
    assert "Traceback" not in done.stderr and not out.exists()


@pytest.mark.parametrize("factor", ["1e39", "-1e39", "inf", "nan", "1e-60"])
def test_a_factor_beyond_f32_is_no_path(
    run: Run, base: Path, adapter: Callable[..., Path], tmp_path: Path, factor: str
) -> None:
    lora = f"{adapter({})}:{factor}"
    done = run("merge", base, "--lora", lora, "-o", tmp_path / "o.safetensors", status=2)
    assert "finite" in done.stderr


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--seed", "1"], 2),
        (["--seed", "0"], 2),
        (["--density", "1"], 2),
        (["--scale", "1"], 2),
        (["--method", "ties", "--seed", "1"], 2),
        (["--method", "task-arithmetic", "--density", "0.5"], 2),
        (["--method", "slerp", "--normalise"], 2),
        (["--method", "dare-ties", "--seed", "1", "--density", "0.5", "--scale", "2"], 0),
    ],
)
def test_options_that_the_method_does_not_use(
    run: Run, base: Path, tmp_path: Path, options: list[str], status: int
) -> None:
    done = run(
        "merge", base, f"{base}:1", *options, "-o", tmp_path / "o.safetensors", status=status
    )
    assert status == 0 or "[plan.options]" in done.stderr


def test_a_sum_beyond_f32(
    run: Run, base: Path, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    lora = f"{adapter({'lora_alpha': 1e38})}:3"
    out = tmp_path / "o.safetensors"
    done = run("merge", f"{base}:3e38", "--lora", lora, "-o", out, status=3)
    assert "[q.nan]" in done.stderr and "l.weight" in done.stderr and not out.exists()
    done = run("merge", f"{base}:3e38", "-o", out, "--lora", lora, "--allow-non-finite", status=0)
    assert "[q.nan]" in done.stderr


def test_a_sum_beyond_f32_while_loading(
    run: Run, base: Path, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    lora = f"{adapter({'lora_alpha': 1e38})}:6"
    thrice = [base, "--lora", lora, "--lora", lora, "--lora", lora]
    assert "[q.nan]" in run("load", *thrice, status=3).stderr
    run("load", *thrice, "--allow-non-finite", status=0)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"key": "general.file_type", "type": "string", "value": "7"}, "u32"),
        ({"key": "general.file_type", "type": "i32", "value": 7}, "u32"),
        ({"key": "general.architecture", "type": "u32", "value": 1}, "string"),
        ({"key": "general.name", "type": "array", "items": "string", "value": ["a"]}, "string"),
        ({"key": "general.tags", "type": "array", "items": "u32", "value": [1]}, "array of string"),
        ({"key": "tokenizer.ggml.scores", "type": "f32", "value": 1}, "array of f32"),
    ],
)
def test_keys_of_gguf_have_their_types(
    run: Run, base: Path, tmp_path: Path, entry: dict[str, Any], expected: str
) -> None:
    entries = [{"key": "general.architecture", "type": "string", "value": "test"}, entry]
    if entry["key"] == "general.architecture":
        entries = [entry]
    file = tmp_path / "m.json"
    file.write_text(
        json.dumps({"format": "loadstone-gguf-metadata", "version": 1, "entries": entries})
    )
    out = tmp_path / "o.gguf"
    done = run("convert", base, out, "--metadata", file, status=2)
    assert entry["key"] in done.stderr and expected in done.stderr and not out.exists()
