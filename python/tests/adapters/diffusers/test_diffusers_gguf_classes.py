"""Tests GGUF files of the K types for wide models, VAEs and the remaining classes (a sweep).

``test_diffusers_gguf`` tests the types for narrow rows, and four classes with all types.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import gguf
import pytest
import torch
from diffusers_gguf import (
    FIRST_LAST_CASE,
    MORE_BLOCK_CASES,
    SCALES,
    VAE_CASE,
    WIDE_CASES,
    File,
    Kind,
    assert_same,
    mixed,
    quantization,
)
from diffusers_models import Case, cast_copy, refuse

pytest.importorskip("diffusers")
pytestmark = pytest.mark.sweep

POSITIONS = "model.diffusion_model.img_emb.emb_pos"
POSITIONS_TARGET = "condition_embedder.image_embedder.pos_embed"
ALL_KINDS = (Kind.Q8_0, Kind.Q4_0, *SCALES, Kind.F16)


def check(file: File, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Compare packed values with the library's own load, and dequantized values with gguf-py."""
    expected = file.library_load(quantization_config=quantization())
    with monkeypatch.context() as patched:
        patched.setattr(gguf, "GGUFReader", refuse)
        assert_same(file.load(quantization_config=quantization()), expected)
        del expected
        reference = file.reference()
        assert_same(file.load(), reference)
        found = file.load(torch_dtype=dtype)
        assert_same(found, cast_copy(file.case, reference, dtype))


@pytest.mark.parametrize("kind", SCALES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", MORE_BLOCK_CASES, ids=repr)
def test_k_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, kind: Kind) -> None:
    file = File(tmp_path, case, lambda _: kind)
    assert list(file.tensors.kinds.values()).count(kind) > 2
    check(file, monkeypatch, torch.bfloat16)


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.name)
def test_first_last_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    """diffusers ignores one key, so its file stores this tensor under the target's name."""
    file = File(tmp_path, FIRST_LAST_CASE, lambda _: kind)
    theirs = File(tmp_path / "theirs", FIRST_LAST_CASE, lambda _: kind)
    for part in (theirs.tensors.data, theirs.tensors.kinds):
        part[POSITIONS_TARGET] = part.pop(POSITIONS)
    theirs.tensors.write(Path(theirs.path))
    expected = theirs.library_load(quantization_config=quantization())
    monkeypatch.setattr(gguf, "GGUFReader", refuse)
    assert_same(file.load(quantization_config=quantization()), expected)
    assert_same(file.load(), theirs.reference())


@pytest.mark.parametrize("case", MORE_BLOCK_CASES, ids=repr)
def test_mixed_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    file = File(tmp_path, case, mixed)
    assert len(set(file.tensors.kinds.values())) > 2
    check(file, monkeypatch, torch.float16)


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.name)
def test_matrices_of_a_vae(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    file = File(tmp_path, VAE_CASE, lambda _: kind)
    assert list(file.tensors.kinds.values()).count(kind) > 2
    check(file, monkeypatch, torch.bfloat16)


@pytest.mark.parametrize("case", WIDE_CASES, ids=repr)
def test_wide_models_in_all_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    kinds = itertools.cycle(ALL_KINDS)
    file = File(tmp_path, case, lambda _: next(kinds))
    assert set(ALL_KINDS) <= set(file.tensors.kinds.values())
    check(file, monkeypatch, torch.bfloat16)
