"""GGUF conversions of image and video models: diffusers opens the files without metadata."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from diffusers_gguf import BLOCK_CASES, MORE_BLOCK_CASES, quantization
from diffusers_models import Case, differences, library_converted, with_meta, write_config
from safetensors.torch import save_file

import loadstone

ARCHITECTURES = {
    "wan_t2v_256": "wan",
    "sd35_256": "sd3",
    "qwen_image_256": "qwen_image",
    "hidream_256": "hidream",
}
CASES = [
    pytest.param(case, id=case.name, marks=() if case in BLOCK_CASES else pytest.mark.sweep)
    for case in (*BLOCK_CASES, *MORE_BLOCK_CASES)
    if case.name in ARCHITECTURES
]


@pytest.mark.parametrize("case", CASES)
def test_a_mix_of_an_image_model(tmp_path: Path, case: Case) -> None:
    model = case.build()
    config = write_config(model, tmp_path / "config")
    source, target = tmp_path / "model.safetensors", tmp_path / "model.gguf"
    original = case.original(model, torch.bfloat16)
    save_file(original, source)
    report = loadstone.convert(source, target, quantize="q4_k_m", beyond_ggml=True)
    assert "convert.architecture" in [finding.code for finding in report.findings]

    reader = gguf.GGUFReader(target)
    architecture = reader.fields["general.architecture"].contents()
    assert architecture == ARCHITECTURES[case.name]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors.keys() == original.keys()
    assert any(tensor.tensor_type.name == "Q4_K" for tensor in tensors.values())
    numbers = {}
    for name, tensor in tensors.items():
        assert original[name].dim() > 1 or tensor.tensor_type.name == "F32", name
        decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()
        numbers[name] = torch.from_numpy(decoded).reshape(original[name].shape)
        error = numbers[name] - original[name]
        assert error.norm() <= 0.1 * original[name].norm(), name

    case.cls.from_single_file(str(target), config=config, quantization_config=quantization())
    found = loadstone.diffusers.from_single_file(case.cls, str(target), config=config)
    with with_meta():
        empty = case.construct()
    expected = case.construct()
    expected.load_state_dict(library_converted(case, numbers, empty))
    assert not differences(found, expected)
