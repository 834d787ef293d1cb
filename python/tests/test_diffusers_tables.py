"""Buffers and plain tensors that no file holds are the constructor's, whatever was done to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_models import CONSTRUCTED, Case, by_name, differences, with_meta

import loadstone
import loadstone.diffusers
from loadstone._skeleton_walk import walk

pytest.importorskip("diffusers")


def assert_same(found: Any, expected: Any) -> None:
    lines = differences(found, expected)
    assert not lines, "\n".join(lines[:20])
    assert loadstone.audit(found).ok


TABLES = {
    "qwen_image": {"pos_embed.pos_freqs", "pos_embed.neg_freqs"},
    "lumina2_narrow": {f"rope_embedder.freqs_cis[{index}]" for index in range(3)},
    "dit": {"pos_embed.pos_embed"},
    "pixart": {"pos_embed.pos_embed"},
    "cogvideox": {"patch_embed.pos_embedding"},
    "kandinsky5": {"time_embeddings.freqs", "text_rope_embeddings.args"},
    "wan_t2v": {"rope.freqs_cos", "rope.freqs_sin"},
}
NARROW = Case(
    "lumina2_narrow",
    "Lumina2Transformer2DModel",
    {
        "hidden_size": 96, "num_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 4,
        "num_kv_heads": 2, "multiple_of": 32, "in_channels": 4, "cap_feat_dim": 16,
        "axes_dim_rope": [8, 8, 8], "axes_lens": [16, 16, 16], "sample_size": 8,
    },
)  # fmt: skip


def table_case(name: str) -> Case:
    return NARROW if name == "lumina2_narrow" else by_name(name)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("includes_buffers", ["0", "1"])
def test_tables_are_the_constructors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, includes_buffers: str
) -> None:
    """Whatever accelerate is told to leave on meta."""
    case = table_case(name)
    model = case.build()
    tables = {slot.name for slot in walk(model) if slot.kind in CONSTRUCTED}
    assert TABLES[name] <= tables
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", includes_buffers)
    for dtype in (None, torch.float16):
        found = loadstone.diffusers.from_pretrained(
            case.cls, str(tmp_path / "model"), torch_dtype=dtype
        )
        values = {slot.name: slot.tensor for slot in walk(found)}
        right = {slot.name: slot.tensor for slot in walk(model)}
        for table in tables:
            assert torch.equal(values[table], right[table]), table
            assert values[table].dtype == right[table].dtype


POISONED = (
    "wan_animate",
    "qwen_image",
    "kandinsky5",
    "pixart",
    "cogvideox",
    "dit",
)


@pytest.mark.parametrize("recovers", [True, False], ids=["loadstone", "control"])
@pytest.mark.parametrize("name", POISONED)
def test_memory_that_nobody_wrote_never_gets_into_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, recovers: bool
) -> None:
    """Tables that a skeleton left on meta are given poisoned memory before the load.

    With loadstone's skeleton there is none; with the library's, which is the control, each of them
    is wrong.
    """
    from loadstone._diffusers import hooks, load

    case = by_name(name)
    model = case.build()
    model.save_pretrained(tmp_path / "model")
    if not recovers:
        monkeypatch.setattr(hooks, "skeleton", with_meta)
    original = load.Load.read

    def read(self: Any, request: Any) -> Any:
        for slot in walk(request.model):
            if slot.kind in CONSTRUCTED and slot.tensor.is_meta:
                memory = torch.full((slot.tensor.nbytes,), 0x5A, dtype=torch.uint8)
                slot.replace(memory.view(slot.tensor.dtype).reshape(slot.tensor.shape))
        return original(self, request)

    monkeypatch.setattr(load.Load, "read", read)
    found = loadstone.diffusers.from_pretrained(case.cls, str(tmp_path / "model"))
    lines = differences(found, model)
    if recovers:
        assert_same(found, model)
    else:
        tables = {slot.name for slot in walk(model) if slot.kind in CONSTRUCTED}
        assert {line.split(":")[0] for line in lines} == tables
        assert all(line.endswith("other values") for line in lines)
