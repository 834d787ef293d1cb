"""``verify --lossless`` has an exit status for "no value changed"."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command import output, verified
from safetensors.torch import load_file, save_file

import loadstone

NAME = "model.layers.{}.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three matrices and a norm in F32 whose values BF16 can represent."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    folder.mkdir()
    random = torch.Generator().manual_seed(0)
    tensors = {
        NAME.format(layer): torch.randn(256, 512, generator=random).bfloat16().float()
        for layer in range(3)
    }
    tensors["model.norm.weight"] = torch.ones(512)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def lossless(source: Path, made: Path) -> tuple[int, list[dict[str, object]]]:
    """Return the exit status and the findings; the package must agree with the command."""
    status, report = verified(source, made, "--lossless")
    found = loadstone.verify(source, made, lossless=True)
    assert found.ok == report["ok"] == (status == 0)
    assert found.findings == report["findings"]
    assert found.differences == report["differences"]
    return status, report["findings"]


def test_values_that_were_rounded_are_a_finding_per_change(plain: Path, tmp_path: Path) -> None:
    loadstone.convert(plain, tmp_path / "nvfp4", quantize="nvfp4")
    assert verified(plain, tmp_path / "nvfp4")[0] == 0
    status, (finding,) = lossless(plain, tmp_path / "nvfp4")
    assert (status, finding["code"], finding["severity"]) == (1, "verify.lossy", "error")
    assert finding["sources"] == [NAME.format(layer) for layer in range(3)]
    decoded = tmp_path / "decoded.safetensors"
    loadstone.convert(tmp_path / "nvfp4", decoded, dequantize=True, dtype="float32")
    source, values = load_file(plain / "model.safetensors"), load_file(decoded)
    largest = max(float((source[name] - values[name]).abs().max()) for name in source)
    assert (
        f"the values of 3 tensors changed from F32 to nvfp4: largest error {largest:.2g},"
        in str(finding["message"])
    )


def test_a_cast_is_lossless_only_if_the_values_fit(plain: Path, tmp_path: Path) -> None:
    loadstone.convert(plain, tmp_path / "bf16", dtype="bfloat16")
    assert verified(plain, tmp_path / "bf16")[1]["verdict"].startswith("equal up to rounding")
    assert lossless(plain, tmp_path / "bf16") == (0, [])
    assert "ok; equal as real numbers" in output("verify", plain, tmp_path / "bf16", "--lossless")
    # One value that BF16 cannot represent.
    tensors = load_file(plain / "model.safetensors")
    tensors[NAME.format(1)][7, 9] = 1 + 2.0**-12
    save_file(tensors, tmp_path / "one.safetensors")
    loadstone.convert(tmp_path / "one.safetensors", tmp_path / "rounded", dtype="bfloat16")
    assert verified(tmp_path / "one.safetensors", tmp_path / "rounded")[0] == 0
    status, (finding,) = lossless(tmp_path / "one.safetensors", tmp_path / "rounded")
    assert (status, finding["target"]) == (1, NAME.format(1))
    assert "1 tensor changed from F32 to BF16: largest error 0.00024," in str(finding["message"])


def test_codes_and_gguf(plain: Path, tmp_path: Path) -> None:
    loadstone.convert(plain, tmp_path / "mxfp4", quantize="mxfp4")
    loadstone.convert(
        tmp_path / "mxfp4", tmp_path / "nvfp4", quantize="nvfp4", require_lossless=True
    )
    assert lossless(tmp_path / "mxfp4", tmp_path / "nvfp4") == (0, [])
    metadata = {"general.architecture": "llama"}
    codes = tmp_path / "mxfp4" / "model.safetensors"
    loadstone.convert(codes, tmp_path / "a.gguf", metadata=metadata)
    assert lossless(tmp_path / "mxfp4", tmp_path / "a.gguf") == (0, [])
    floats = plain / "model.safetensors"
    loadstone.convert(floats, tmp_path / "b.gguf", metadata=metadata, quantize="q8_0")
    status, findings = lossless(plain, tmp_path / "b.gguf")
    assert status == 1
    assert ["changed from F32 to Q8_0" in str(each["message"]) for each in findings] == [True]
    assert lossless(tmp_path / "b.gguf", tmp_path / "b.gguf") == (0, [])


def test_different_bytes_of_equal_values_are_no_difference(plain: Path, tmp_path: Path) -> None:
    tensors = load_file(plain / "model.safetensors")
    for zero in (0.0, -0.0):
        tensors[NAME.format(0)][0, 0] = zero
        save_file(tensors, tmp_path / f"{zero}.safetensors")
    pair = (tmp_path / "0.0.safetensors", tmp_path / "-0.0.safetensors")
    assert verified(*pair)[0] == 1
    assert lossless(*pair) == (0, [])
    tensors[NAME.format(0)][0, 0] = 1e-30
    save_file(tensors, pair[1])
    assert lossless(*pair)[0] == 1
    del tensors["model.norm.weight"]
    save_file(tensors, pair[1])
    assert lossless(*pair)[0] == 1


def test_requests_that_do_not_compare_two_checkpoints(plain: Path) -> None:
    for words in (
        ("--lossless",),
        (plain, "--lossless", "--quantize", "nvfp4"),
        ("--lossless", "--digests"),
        (plain, "--lossless", "--receipt"),
    ):
        assert "--lossless compares the values of A and B as they are" in output(
            "verify", plain, *words, status=2
        )
    with pytest.raises(loadstone.Error, match="omit quantize=") as caught:
        loadstone.verify(plain, plain, lossless=True, quantize="nvfp4")
    assert (caught.value.code, caught.value.field) == ("plan.options", "quantize")
