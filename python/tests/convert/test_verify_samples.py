"""``verify SOURCE QUANTIZED`` compares all values of a small tensor, and samples across the whole
of a large one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command import output, verified
from readback_cells import styles_of, written_encodings
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import loadstone

WHOLE = 65536
# The last three shapes have more than WHOLE values. Every encoding accepts rows of EACH.
SHAPES = [
    (127, 64),
    (160, 64),
    (63, 100),
    (1000, 64),
    (128, 512),
    (384, 256),
    (300, 300),
    (257, 256),
]
EACH = {128, 384}
SCALES = ("weight_scale", "weight_scale_inv", "weight.absmax", "SCB", "scales", "weight_scale_2")


def rows_of(shape: tuple[int, int]) -> list[int]:
    """Return the rows to damage; each tensor has one damaged row."""
    rows, columns = shape
    if rows * columns > WHOLE:
        return [0, rows - 1]
    return sorted({*range(0, rows, 1 + rows // 100), rows - 1})


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        f"model.layers.{row}.s{shape[0]}.up_proj.weight": torch.randn(shape).mul(0.1).bfloat16()
        for shape in SHAPES
        for row in rows_of(shape)
    }


def scale_of(module: str, tensors: dict[str, torch.Tensor]) -> str:
    """Return the name of the module's scale with the most elements."""
    names = [f"{module}.{each}" for each in SCALES if f"{module}.{each}" in tensors]
    return max(names, key=lambda name: tensors[name].numel())


def shrink(scale: torch.Tensor, row: int, rows: int) -> torch.Tensor:
    """Divide the scales of a row by four."""
    flat = scale.clone().reshape(-1)
    last = max(row * len(flat) // rows + 1, (row + 1) * len(flat) // rows)
    part = slice(row * len(flat) // rows, last)
    if scale.dtype == torch.uint8:  # the bytes are exponents or codes of scales
        flat[part] -= 2
    else:
        flat[part] = flat[part].float().div(4).to(scale.dtype)
    return flat.reshape(scale.shape)


@pytest.mark.parametrize("encoding", [each for each in written_encodings() if styles_of(each)])
def test_each_row_is_compared(encoding: str, tmp_path: Path) -> None:
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(weights(), source)
    style = styles_of(encoding)[-1]
    loadstone.convert(source, out, quantize=encoding, style=style)
    assert verified(source, out)[0] == 0  # control
    tensors = load_file(out)
    wrong = set()
    for name, plain in weights().items():
        stored = tensors.get(name)
        if stored is not None and stored.dtype == plain.dtype:
            continue  # the encoding does not accept rows of this length
        scale = scale_of(name.removesuffix(".weight"), tensors)
        tensors[scale] = shrink(tensors[scale], int(name.split(".")[2]), plain.shape[0])
        wrong.add(name)
    assert {int(name.split(".")[3][1:]) for name in wrong} >= EACH
    with safe_open(out, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, out, metadata)
    status, report = verified(source, out)
    assert status == 1
    assert {each["name"] for each in report["differences"]} == wrong


def test_the_report_tells_that_only_samples_were_compared(tmp_path: Path) -> None:
    """A tensor of at most WHOLE values is compared completely."""
    for rows, count in ((256, 0), (1024, 2)):
        state = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(rows, 128) for i in range(2)}
        save_file(state, tmp_path / "in.safetensors")
        out = tmp_path / "out.safetensors"
        loadstone.convert(tmp_path / "in.safetensors", out, quantize="nf4")
        text = output("verify", tmp_path / "in.safetensors", out)
        note = f"only samples of {count} quantized tensors were compared"
        assert (note in text) == (count > 0)
        assert ("(--receipt)" in text) == ("(--quantize ...)" in text) == (count > 0)
        words = ["verify", tmp_path / "in.safetensors", out, "--quantize", "nf4"]
        assert "samples" not in output(*words)
