"""Tests Wan pipelines whose transformer comes from a GGUF file of mixed types.

Text encoder, tokenizer, VAE and image encoder are real classes, tiny and random. The video after
two denoising steps must equal, bit for bit, that of a pipeline whose transformer is constructed and
filled with the decoded values, without a loader.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers_gguf import Kind
from wan_pipelines import Parts, diffusers, parts, text_is_clean

__all__ = ["parts", "text_is_clean"]

import loadstone
import loadstone.diffusers

SWEEP = pytest.mark.sweep


@pytest.mark.parametrize(
    "keeps_blocks, dtype",
    [
        pytest.param(True, torch.bfloat16, id="blocks-bfloat16"),
        pytest.param(True, torch.float32, id="blocks-float32", marks=SWEEP),
        pytest.param(False, torch.bfloat16, id="numbers-bfloat16", marks=SWEEP),
        pytest.param(False, torch.float32, id="numbers-float32", marks=SWEEP),
    ],
)
def test_two_steps_and_decoding(parts: Parts, keeps_blocks: bool, dtype: torch.dtype) -> None:
    assert {Kind.Q4_K, Kind.Q6_K, Kind.F16, Kind.F32} == set(parts.tensors.kinds.values())
    options: dict[str, Any] = {"config": parts.config, "torch_dtype": dtype}
    if keeps_blocks:
        options["quantization_config"] = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    model = loadstone.diffusers.from_single_file(parts.case.cls, parts.file, **options)
    assert loadstone.audit(model).ok
    pipeline = loadstone.diffusers.from_pretrained(
        parts.pipeline, parts.folder / "pipeline", transformer=model
    )
    for name, part in parts.others.items():
        if isinstance(part, torch.nn.Module):
            assert loadstone.audit(getattr(pipeline, name)).ok, name
    reference = parts.pipeline(
        **parts.others, transformer=parts.reference(dtype, keeps_blocks=keeps_blocks)
    )
    found, wanted = parts.video(pipeline), parts.video(reference)
    assert found.isfinite().all()
    assert found.std() > 0
    assert torch.equal(found, wanted)
    with torch.no_grad():  # control: one changed value is detected
        model.blocks[0].norm2.weight[0] += 1
    assert not torch.equal(parts.video(pipeline), wanted)
