"""``verify`` of a quantized copy accepts quantization errors and detects a damaged component.

The limits follow from the error bound of each encoding, so verify detects a single wrong row.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import run
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ENCODINGS = ["fp8", "fp8-channel", "fp8-block", "int8-channel", "int4", "int4-awq", "nvfp4"]
ENCODINGS += ["mxfp4", "mxfp8", "nf4", "fp4", "int8"]
NIBBLES = ["int4", "int4-awq", "nvfp4", "mxfp4", "nf4", "fp4"]
WEIGHT = "model.layers.0.mlp.up_proj.weight"
MORE = ("absmax", "SCB")  # names of scales without "scale" in them
ROWS, COLUMNS = 256, 512


def converted(weight: torch.Tensor, encoding: str, folder: Path) -> tuple[Path, Path]:
    """Write a file with this weight, and a quantized copy; return both paths."""
    source, target = folder / "source.safetensors", folder / "quantized"
    save_file({WEIGHT: weight}, source)
    done = run("convert", source, target, "--quantize", encoding)
    assert done.returncode == 0, done.stderr
    return source, target


def status(source: Path, target: Path) -> int:
    done = run("verify", source, target, "--json")
    document = json.loads(done.stdout)
    assert document["ok"] == (done.returncode == 0), done.stdout
    return done.returncode


def normal(dtype: torch.dtype = torch.bfloat16, scale: float = 0.02) -> torch.Tensor:
    generator = torch.Generator().manual_seed(14)
    return (torch.randn(ROWS, COLUMNS, generator=generator) * scale).to(dtype)


def heavy_tails() -> torch.Tensor:
    """Return samples of Student's t-distribution with three degrees of freedom."""
    generator = torch.Generator().manual_seed(15)
    parts = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(4)]
    spread = (parts[1] ** 2 + parts[2] ** 2 + parts[3] ** 2).div(3).sqrt()
    return (0.02 * parts[0] / spread).bfloat16()


LEGAL: dict[str, Callable[[], torch.Tensor]] = {
    "normal": normal,
    "heavy tails": heavy_tails,
    "near the largest F32": lambda: torch.full((ROWS, COLUMNS), 2.6e38),
    "one outlier": lambda: normal(torch.float32).index_put(
        (torch.tensor([3]), torch.tensor([5])), torch.tensor(3e38)
    ),
    "subnormal": lambda: normal(torch.float32, 1e-39),
    "least subnormals": lambda: normal(torch.bfloat16, 1e-41),
    "zeros": lambda: torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16),
}


# LLM.int8 computes in F16, in which the largest of these weights are infinite.
BEYOND_F16 = {"near the largest F32", "one outlier"}
COPIES = [(e, w) for e in ENCODINGS for w in LEGAL if e != "int8" or w not in BEYOND_F16]


@pytest.mark.parametrize(("encoding", "weights"), COPIES)
def test_a_legal_copy_passes(encoding: str, weights: str, tmp_path: Path) -> None:
    assert status(*converted(LEGAL[weights](), encoding, tmp_path)) == 0


TOO_LARGE = [(e, f) for e in ENCODINGS for f in (2**8, 2**12, 2**40) if e != "int8" or f < 2**16]


@pytest.mark.parametrize(("encoding", "factor"), TOO_LARGE)
def test_scales_for_larger_numbers_explain_no_zeros(
    encoding: str, factor: float, tmp_path: Path
) -> None:
    """The scales are so large that each value is within half a step of the code of zero."""
    files = {}
    for name, weight in {
        "zeros": torch.zeros(ROWS, COLUMNS),
        "large": normal(torch.float32) * factor,
        "copy": normal(torch.float32),
    }.items():
        (tmp_path / name).mkdir()
        source, target = converted(weight, encoding, tmp_path / name)
        files[name] = next(target.glob("*.safetensors"))
    codes = load_file(files["zeros"])
    scales = {
        n: t for n, t in load_file(files["large"]).items() if "scale" in n or n.endswith(MORE)
    }
    assert scales
    with safe_open(files["copy"], "pt") as file:
        metadata = file.metadata()
    assert status(source, target) == 0
    save_file(codes | scales, files["copy"], metadata)
    assert status(source, target) == 1


def rows_of(codes: torch.Tensor) -> torch.Tensor:
    """Return the codes with one row per row of the weight, or per two rows for int4-awq."""
    return codes.view(torch.uint8).reshape(
        min(len(codes), ROWS) if codes.shape[-1] > 1 else ROWS, -1
    )


def swap_two_rows(codes: torch.Tensor) -> None:
    rows = rows_of(codes)
    rows[[0, 1]] = rows[[1, 0]]


def shift_a_row(codes: torch.Tensor) -> None:
    rows = rows_of(codes)
    rows[0] = rows[0].roll(1)


def swap_nibbles_of_a_row(codes: torch.Tensor) -> None:
    rows = rows_of(codes)
    rows[0] = (rows[0] >> 4) | (rows[0] << 4)


def damaged(target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Return a copy of the folder whose tensors `change` has edited."""
    copy = target.with_name("damaged")
    shutil.copytree(target, copy)
    (file,) = copy.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata)
    return copy


HARMS = [(e, harm) for e in ENCODINGS for harm in (swap_two_rows, shift_a_row)]
HARMS += [(e, swap_nibbles_of_a_row) for e in NIBBLES]


@pytest.mark.parametrize("weight", [normal, heavy_tails])
@pytest.mark.parametrize(("encoding", "harm"), HARMS)
def test_one_damaged_row_is_found(
    encoding: str,
    harm: Callable[[torch.Tensor], None],
    weight: Callable[[], torch.Tensor],
    tmp_path: Path,
) -> None:
    source, target = converted(weight(), encoding, tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        (name,) = {WEIGHT, f"{WEIGHT}_packed"} & set(tensors)
        harm(tensors[name])

    assert status(source, target) == 0
    assert status(source, damaged(target, change)) == 1


@pytest.mark.parametrize("factor", [2.0, 0.5])
@pytest.mark.parametrize("encoding", ["fp8-channel", "int8-channel", "int4", "nvfp4", "nf4", "fp4"])
def test_one_wrong_scale_is_found(encoding: str, factor: float, tmp_path: Path) -> None:
    source, target = converted(normal(), encoding, tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        names = [f"{WEIGHT}_scale", f"{WEIGHT}.absmax"]
        (scales,) = (tensors[name] for name in names if name in tensors)
        flat = scales.reshape(-1)
        flat[0] = (flat[0].float() * factor).to(scales.dtype)

    assert status(source, damaged(target, change)) == 1
