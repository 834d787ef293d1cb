"""The cases that a loader of diffusers' files must pass, and the test that covers each.

=====  ===========================================================  ===============================
case   description                                                  covered by
=====  ===========================================================  ===============================
A1     a whole T2V file: 69 tensors of it, 2 tables, none on meta   `test_whole_file`, here
A2     the same as GGUF: packed bytes; values equal gguf-py's       `test_diffusers_gguf`,
                                                                    `test_diffusers_gguf_classes`
A3     1 of 87 is missing: the error comes before data is read      `test_one_is_missing`, here;
                                                                    bytes are counted in
                                                                    `test_diffusers_single_file`
A4     a set of them is missing: one finding that names the fields  `test_diffusers_diagnosis`
A5     policies for A3, and the filled values                       `test_diffusers_single_file`,
                                                                    by names here
A6     first-last-frame; without the rule two names are paired      `test_first_last_frame`, here
A7     16 bits: tables and declared modules stay in float32         `test_diffusers_single_file`,
                                                                    `test_diffusers_tables`
A8     device maps with disk                                        `test_placement`,
                                                                    `test_diffusers_single_file`
A9     hundreds of shape clashes are one error                      `test_diffusers_diagnosis`
A10    plain tensors: Qwen-Image, Lumina 2                          `test_diffusers_tables`
A11    the table of CogVideoX is in the predicted peak              `test_diffusers_memory`
A12    memory of a dequantized Q8_0 file                            `test_memory`
A13    poisoned memory never gets into a table; with a control      `test_diffusers_tables`
A14    two components of one file                                   `test_diffusers_single_file`
A15    the positions of DiT and PixArt                              `test_diffusers_tables`
=====  ===========================================================  ===============================

``test_diffusers_end_use`` covers the end use, and ``test_diffusers_patch`` covers scripts that do
not import loadstone.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_layouts import COMFY
from diffusers_models import (
    Case,
    assert_same,
    by_name,
    write_config,
    write_header_only,
    write_single_file,
)
from safetensors.torch import save_file

import loadstone
import loadstone.diffusers

pytest.importorskip("diffusers")

T2V, I2V, FLF2V = by_name("wan_t2v"), by_name("wan_i2v"), by_name("wan_flf2v")
POSITIONS = "img_emb.emb_pos"
POSITIONS_TARGET = "condition_embedder.image_embedder.pos_embed"


def from_file(case: Case, file: str, config: str, **options: Any) -> Any:
    return loadstone.diffusers.from_single_file(case.cls, file, config=config, **options)


@pytest.mark.parametrize("prefix", [COMFY, ""], ids=["prefixed", "bare"])
@pytest.mark.parametrize("includes_buffers", ["0", "1"])
def test_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, includes_buffers: str, prefix: str
) -> None:
    """A1: all tensors have a value, even if accelerate's setting leaves buffers on meta."""
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", includes_buffers)
    model = T2V.build()
    state = {
        prefix + name.removeprefix(COMFY): tensor for name, tensor in T2V.original(model).items()
    }
    assert len(state) == 69
    save_file(state, tmp_path / "model.safetensors")
    found = from_file(
        T2V, str(tmp_path / "model.safetensors"), write_config(model, tmp_path / "config")
    )
    assert_same(found, model)
    origins = loadstone.audit(found).provenance
    assert Counter(item.origin for item in origins.values()) == {"checkpoint": 69, "constructor": 2}
    assert {name for name, item in origins.items() if item.origin == "constructor"} == {
        "rope.freqs_cos", "rope.freqs_sin",
    }  # fmt: skip


def test_the_librarys_own_load_leaves_them_on_meta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    file, config = write_single_file(T2V, T2V.build(), tmp_path / "model.safetensors")
    with pytest.raises(NotImplementedError, match="meta tensor"):
        T2V.cls.from_single_file(file, config=config)


@pytest.mark.parametrize("number", [0, 40, 86], ids=["first", "middle", "last"])
def test_one_is_missing(tmp_path: Path, number: int) -> None:
    """A3 and A5: the error names the target and its key in the file; the file's data is a hole."""
    model = I2V.build()
    state = I2V.original(model)
    assert len(state) == 87
    gone = list(state)[number]
    names = dict(zip(state, model.state_dict(), strict=True))
    del state[gone]
    file = write_header_only(state, tmp_path / "model.safetensors")
    config = write_config(model, tmp_path / "config")
    with pytest.raises(loadstone.PlanError) as raised:
        from_file(I2V, file, config)
    errors = [item for item in raised.value.findings if item.severity == "error"]
    assert [(item.code, item.target) for item in errors] == [("plan.missing", names[gone])]
    assert gone.removeprefix(COMFY) in errors[0].message
    found = from_file(I2V, file, config, missing={names[gone]: "zeros"})
    filled = [
        name
        for name, item in loadstone.audit(found).provenance.items()
        if item.origin not in ("checkpoint", "constructor")
    ]
    assert filled == [names[gone]]


def test_first_last_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case A6: all 88 tensors load.

    Without the rule, the error pairs the unexpected tensor with the missing one.
    """
    from loadstone._adapters.diffusers import conversion

    model = FLF2V.build()
    assert len(FLF2V.original(model)) == 88
    file, config = write_single_file(FLF2V, model, tmp_path / "model.safetensors")
    found = from_file(FLF2V, file, config)
    assert_same(found, model)
    origins = Counter(item.origin for item in loadstone.audit(found).provenance.values())
    assert origins["checkpoint"] == 88

    monkeypatch.delitem(conversion.UNMAPPED_KEYS, POSITIONS)
    with pytest.raises(loadstone.PlanError) as raised:
        from_file(FLF2V, file, config)
    errors = [item for item in raised.value.findings if item.severity == "error"]
    assert [(item.code, item.target) for item in errors] == [("plan.missing", POSITIONS_TARGET)]
    assert POSITIONS in errors[0].message
    assert "same shape" in errors[0].message


def test_tensors_of_other_shapes_are_no_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loadstone._adapters.diffusers import conversion

    model = FLF2V.build()
    state = FLF2V.original(model)
    state[COMFY + POSITIONS] = torch.zeros(3, 5)
    save_file(state, tmp_path / "model.safetensors")
    monkeypatch.delitem(conversion.UNMAPPED_KEYS, POSITIONS)
    with pytest.raises(loadstone.PlanError) as raised:
        from_file(
            FLF2V, str(tmp_path / "model.safetensors"), write_config(model, tmp_path / "config")
        )
    errors = [item for item in raised.value.findings if item.severity == "error"]
    assert [(item.code, item.target) for item in errors] == [("plan.missing", POSITIONS_TARGET)]
    assert "same shape" not in errors[0].message
