"""Merges from and into GGUF files: merged tensors become floats, the others are unchanged."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from merge_models import added, products, write_peft
from safetensors.torch import save_file

import loadstone

KEYS = {"general.architecture": "test"}
MERGED, OTHER = "blocks.0.attn.weight", "blocks.1.attn.weight"
SHAPE = (96, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a base in Q8_0, and an adapter for one of its two weights."""
    folder = tmp_path_factory.mktemp("merge_gguf")
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(SHAPE, generator=generator) for name in (MERGED, OTHER)}
    save_file(tensors, folder / "base.safetensors")
    loadstone.convert(
        folder / "base.safetensors", folder / "base.gguf", quantize="q8_0", metadata=KEYS
    )
    adapter = products(8, 1, {MERGED.removesuffix(".weight"): SHAPE})
    write_peft(folder / "adapter", adapter)
    return folder


def sum_of(folder: Path) -> torch.Tensor:
    """Return the merged weight, in F32."""
    base = loadstone.load_file(folder / "base.gguf", dtype=torch.float32)[MERGED]
    a, b = products(8, 1, {MERGED.removesuffix(".weight"): SHAPE}).values()
    return added(base, a, b, 2.0)


def blocks(path: Path) -> dict[str, tuple[str, bytes]]:
    """Return the type and the bytes of each tensor, as gguf-py reads them."""
    reader = gguf.GGUFReader(path)
    return {each.name: (each.tensor_type.name, each.data.tobytes()) for each in reader.tensors}


def test_what_is_not_merged_keeps_its_blocks(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    loadstone.merge(folder / "base.gguf", out, lora=folder / "adapter")
    before, after = blocks(folder / "base.gguf"), blocks(out)
    assert after[OTHER] == before[OTHER]
    assert after[MERGED][0] == "BF16"
    assert torch.equal(loadstone.load_file(out)[MERGED], sum_of(folder).bfloat16())


def test_a_quantized_base_is_quantized_again(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    loadstone.merge(folder / "base.gguf", out, lora=folder / "adapter", quantize="q8_0")
    save_file({MERGED: sum_of(folder)}, tmp_path / "sum.safetensors")
    expected = tmp_path / "sum.gguf"
    loadstone.convert(tmp_path / "sum.safetensors", expected, quantize="q8_0", metadata=KEYS)
    assert blocks(out)[MERGED] == blocks(expected)[MERGED]
    assert blocks(out)[OTHER] == blocks(folder / "base.gguf")[OTHER]


def test_a_plain_base_becomes_blocks(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    loadstone.merge(
        folder / "base.safetensors",
        out,
        lora=folder / "adapter",
        quantize="q8_0",
        metadata=KEYS,
    )
    assert {name: kind for name, (kind, _) in blocks(out).items()} == {
        MERGED: "Q8_0",
        OTHER: "Q8_0",
    }
    assert blocks(out)[OTHER] == blocks(folder / "base.gguf")[OTHER]


def test_blocks_stand_in_gguf_files_only(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    with pytest.raises(loadstone.Error) as error:
        loadstone.merge(folder / "base.gguf", out, lora=folder / "adapter", quantize="q8_0")
    assert error.value.code == "plan.options"
    assert not out.exists()


def test_a_file_without_an_architecture_is_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    with pytest.raises(loadstone.Error, match=r"general\.architecture"):
        loadstone.merge(folder / "base.safetensors", out, lora=folder / "adapter")
    assert not out.exists()


@pytest.mark.parametrize("tie", ["split", "keep"])
@pytest.mark.parametrize(("architecture", "has_head"), [("llama", True), ("bert", False)])
def test_a_head_that_is_the_embedding(
    architecture: str, has_head: bool, tie: str, tmp_path: Path
) -> None:
    """Without a head in the file, llama.cpp uses the embedding, except for encoders."""
    embedding, keys = torch.randn(SHAPE), {"general.architecture": architecture}
    save_file({"token_embd.weight": embedding}, tmp_path / "base.safetensors")
    base = tmp_path / "base.gguf"
    loadstone.convert(
        tmp_path / "base.safetensors", base, quantize="q8_0", include=".", metadata=keys
    )
    write_peft(tmp_path / "adapter", products(8, 1, {"token_embd": SHAPE}))
    report = loadstone.merge(base, tmp_path / "out.gguf", lora=tmp_path / "adapter", tie=tie)
    splits = has_head and tie == "split"
    assert [each.code for each in report.findings if each.code == "merge.tie"] == [
        "merge.tie"
    ] * splits
    after = blocks(tmp_path / "out.gguf")
    assert after.keys() == {"token_embd.weight"} | ({"output.weight"} if splits else set())
    assert after["token_embd.weight"][0] == "BF16"
    if splits:
        assert after["output.weight"] == blocks(base)["token_embd.weight"]


def test_a_head_of_its_own_is_no_tie(tmp_path: Path) -> None:
    tensors = {name: torch.randn(SHAPE) for name in ("token_embd.weight", "output.weight")}
    save_file(tensors, tmp_path / "base.safetensors")
    base = tmp_path / "base.gguf"
    keys = {"general.architecture": "llama"}
    loadstone.convert(
        tmp_path / "base.safetensors", base, quantize="q8_0", include=".", metadata=keys
    )
    write_peft(tmp_path / "adapter", products(8, 1, {"token_embd": SHAPE}))
    report = loadstone.merge(base, tmp_path / "out.gguf", lora=tmp_path / "adapter")
    assert not [each for each in report.findings if each.code == "merge.tie"]
    assert blocks(tmp_path / "out.gguf")["output.weight"] == blocks(base)["output.weight"]


@pytest.mark.parametrize("target", ["out.safetensors", "out.gguf"])
@pytest.mark.parametrize("quantize", [None, "q8_0"])
def test_the_head_of_a_split_tie_has_the_base_s_values(
    target: str, quantize: str | None, tmp_path: Path
) -> None:
    embedding, keys = torch.randn(SHAPE), {"general.architecture": "llama"}
    save_file({"token_embd.weight": embedding}, tmp_path / "base.safetensors")
    base = tmp_path / "base.gguf"
    options = {"quantize": "q8_0", "include": "."}
    loadstone.convert(tmp_path / "base.safetensors", base, metadata=keys, **options)
    write_peft(tmp_path / "adapter", products(8, 1, {"token_embd": SHAPE}))
    again = options if quantize and target.endswith("gguf") else {}
    loadstone.merge(base, tmp_path / target, lora=tmp_path / "adapter", dtype="float32", **again)
    found = loadstone.load_file(tmp_path / target, dtype=torch.float32)
    before = loadstone.load_file(base, dtype=torch.float32)["token_embd.weight"]
    assert torch.equal(found["output.weight"], before)
    assert not torch.equal(found["token_embd.weight"], before)


def test_a_head_that_cannot_be_a_tensor_of_its_own(tmp_path: Path) -> None:
    """llama.cpp rejects a Gemma 2 with an output.weight."""
    save_file({"token_embd.weight": torch.randn(SHAPE)}, tmp_path / "base.safetensors")
    base, keys = tmp_path / "base.gguf", {"general.architecture": "gemma2"}
    loadstone.convert(tmp_path / "base.safetensors", base, metadata=keys)
    write_peft(tmp_path / "adapter", products(8, 1, {"token_embd": SHAPE}))
    with pytest.raises(loadstone.PlanError, match="whose name is unknown"):
        loadstone.merge(base, tmp_path / "out.gguf", lora=tmp_path / "adapter")
    loadstone.merge(base, tmp_path / "out.gguf", lora=tmp_path / "adapter", tie="keep")
    assert blocks(tmp_path / "out.gguf").keys() == {"token_embd.weight"}
