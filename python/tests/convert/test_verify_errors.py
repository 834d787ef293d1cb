"""``verify A B`` prints the size of the error of each tensor whose values differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command import run, verified
from safetensors.torch import load_file, save_file

import loadstone

NAME = "model.layers.0.mlp.up_proj.weight"
OTHER = "model.layers.1.mlp.up_proj.weight"
EQUAL = "equal as real numbers"


def pair(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> tuple[Path, Path]:
    paths = folder / "a.safetensors", folder / "b.safetensors"
    for path, tensors in zip(paths, (first, second), strict=True):
        save_file(tensors, path)
    return paths


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def relative(first: torch.Tensor, second: torch.Tensor) -> float:
    first, second = first.double(), second.double()
    return float((first - second).norm() / first.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_floats(tmp_path: Path, dtype: torch.dtype) -> None:
    one, two = normal(40, 64).to(dtype), normal(8, 8).to(dtype)
    changed, shifted = one.clone(), two.clone()
    changed[3, 5] += 0.5
    shifted[-1] *= 2
    paths = pair(tmp_path, {"a": one, "b": two}, {"a": changed, "b": shifted})
    status, report = verified(*paths)
    assert status == 1
    rows = {each["name"]: each for each in report["differences"]}
    for name, before, after in (("a", one, changed), ("b", two, shifted)):
        largest = float((before.double() - after.double()).abs().max())
        assert rows[name]["largest_error"] == largest
        assert rows[name]["relative_error"] == pytest.approx(relative(before, after), rel=1e-6)
        assert f"; largest error {largest:.2g}, relative error " in rows[name]["found"]
    assert report["largest_error"] == max(row["largest_error"] for row in rows.values())
    assert rows[report["largest_error_in"]]["largest_error"] == report["largest_error"]
    assert report["relative_error_in"] == "b"
    assert report["relative_error"] == rows["b"]["relative_error"]
    assert "verdict" not in report
    text = run("verify", *paths).stdout
    assert f"info: largest error {report['largest_error']:.2g} ('" in text
    assert f"largest relative error {report['relative_error']:.2g} ('b')\n" in text


def test_a_difference_that_f32_cannot_represent(tmp_path: Path) -> None:
    one = torch.ones(4, dtype=torch.float64)
    report = verified(*pair(tmp_path, {"a": one}, {"a": one + 2.0**-40}))[1]
    assert report["largest_error"] == 2.0**-40


def test_zeros_of_both_signs(tmp_path: Path) -> None:
    paths = pair(tmp_path, {"a": torch.zeros(4)}, {"a": -torch.zeros(4)})
    status, report = verified(*paths)
    assert (status, report["ok"], report["verdict"]) == (1, False, EQUAL)
    assert f"not ok; {EQUAL}; " in run("verify", *paths).stdout


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    one = torch.tensor([1, float("nan"), float("inf"), 2])
    two = torch.tensor([1, float("nan"), 3, 2])
    paths = pair(tmp_path, {"a": one}, {"a": two})
    report = verified(*paths)[1]
    assert report["differences"][0]["largest_error"] is None
    assert "largest error inf" in run("verify", *paths).stdout
    two[2] = float("inf")
    one[0] = 1.5
    report = verified(*pair(tmp_path, {"a": one}, {"a": two}))[1]
    assert report["largest_error"] == 0.5


def test_integers_and_shapes_have_no_error(tmp_path: Path) -> None:
    first = {"a": torch.arange(4), "b": torch.ones(2), "c": torch.ones(4)}
    second = {"a": torch.arange(4) + 1, "b": torch.ones(3)}
    report = verified(*pair(tmp_path, first, second))[1]
    assert len(report["differences"]) == 3
    assert all("largest_error" not in each for each in report["differences"])
    assert "largest_error" not in report and "verdict" not in report


@pytest.fixture
def nvfp4(tmp_path: Path) -> Path:
    source = tmp_path / "plain.safetensors"
    save_file({NAME: normal(256, 256).bfloat16(), OTHER: normal(256, 256).bfloat16()}, source)
    loadstone.convert(source, tmp_path / "nvfp4.safetensors", quantize="nvfp4")
    return tmp_path / "nvfp4.safetensors"


def decoded(path: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    loadstone.convert(path, tmp_path / "wide.safetensors", dequantize=True, dtype="float32")
    values = load_file(tmp_path / "wide.safetensors")
    for each in tmp_path.glob("wide*"):
        each.unlink()
    return values


def test_codes_that_were_encoded_again(tmp_path: Path, nvfp4: Path) -> None:
    """The style compressed-tensors stores 1 / scale_2, whose rounding only --lossless reports."""
    again = tmp_path / "again.safetensors"
    loadstone.convert(nvfp4, again, quantize="nvfp4", style="compressed-tensors")
    before, after = decoded(nvfp4, tmp_path), decoded(again, tmp_path)
    different = {name for name in before if not torch.equal(before[name], after[name])}
    assert different == {NAME, OTHER}
    assert verified(nvfp4, again)[0] == 0
    report = loadstone.verify(nvfp4, again, lossless=True)
    (finding,) = report.findings
    assert not report.ok and finding["code"] == "verify.lossy" and "2 tensors" in finding["message"]


def test_components_that_differ(tmp_path: Path, nvfp4: Path) -> None:
    tensors = load_file(nvfp4)
    tensors[f"{NAME}_scale_2"] *= 1 + 2.0**-23
    save_file(tensors, tmp_path / "changed.safetensors")
    paths = nvfp4, tmp_path / "changed.safetensors"
    (found,) = verified(*paths)[1]["differences"]
    assert found["name"] == f"{NAME}_scale_2"
    assert f"; decoded values of '{NAME}': largest error " in found["found"]
    one, two = (decoded(path, tmp_path)[NAME] for path in paths)
    assert found["relative_error"] == pytest.approx(relative(one, two))
    assert 0 < found["relative_error"] < 2e-7


def test_components_that_decode_to_the_same_values(tmp_path: Path, nvfp4: Path) -> None:
    tensors = load_file(nvfp4)
    tensors[f"{NAME}_scale_2"] *= 2
    scale = tensors[f"{NAME}_scale"].float()
    tensors[f"{NAME}_scale"] = (scale / 2).to(torch.float8_e4m3fn)
    assert torch.equal(tensors[f"{NAME}_scale"].float() * 2, scale)
    save_file(tensors, tmp_path / "changed.safetensors")
    status, report = verified(nvfp4, tmp_path / "changed.safetensors")
    assert (status, report["verdict"]) == (1, EQUAL)
    names = {each["name"] for each in report["differences"]}
    assert names == {f"{NAME}_scale", f"{NAME}_scale_2"}
    assert all(each["found"].endswith(f"'{NAME}': {EQUAL}") for each in report["differences"])


def test_blocks(tmp_path: Path) -> None:
    source = tmp_path / "plain.safetensors"
    save_file({NAME: normal(8, 256)}, source)
    one, two = tmp_path / "a.gguf", tmp_path / "b.gguf"
    loadstone.convert(source, one, quantize="q8_0", metadata={"general.architecture": "none"})
    content = bytearray(one.read_bytes())
    content[-1] ^= 1  # the last code
    two.write_bytes(content)
    (found,) = verified(one, two)[1]["differences"]
    values = [decoded(path, tmp_path)[NAME] for path in (one, two)]
    assert found["largest_error"] == float((values[0] - values[1]).abs().max()) > 0
    assert found["relative_error"] == pytest.approx(relative(*values))


def test_samples_have_a_largest_error(tmp_path: Path, nvfp4: Path) -> None:
    plain = load_file(tmp_path / "plain.safetensors")
    values = decoded(nvfp4, tmp_path)
    status, report = verified(tmp_path / "plain.safetensors", nvfp4)
    assert status == 0
    for each in report["quantized"]:
        name = each["name"]
        assert each["largest_error"] == float((plain[name].float() - values[name]).abs().max())
    largest = max(each["largest_error"] for each in report["quantized"])
    assert (
        f"; largest error {largest:.3g}\n"
        in run("verify", tmp_path / "plain.safetensors", nvfp4).stdout
    )
