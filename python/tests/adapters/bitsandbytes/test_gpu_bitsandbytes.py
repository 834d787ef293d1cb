"""Compares nf4, fp4 and LLM.int8 with bitsandbytes on a GPU: bytes, values and whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bnb_oracle as oracle
import pytest
import torch

pytest.importorskip("bitsandbytes")
from bitsandbytes import functional
from bitsandbytes_checkpoints import KINDS, assert_same, config, differences, plain, quantized
from bnb_numbers import BLOCK_SIZES, DTYPES, SHAPES, numbers, same
from gpu_marks import MARKS
from transformers_models import by_name

import loadstone

pytestmark = MARKS

# Without subnormals, NaN and infinity, for which GPUs differ: docs/formats/bitsandbytes.md.
CASES = [(kind, dtype) for kind in ("normal", "ties", "zeros") for dtype in DTYPES]
MODELS = ["llama", "gpt2", "t5"]
ours = loadstone.transformers.from_pretrained


def codes_of(data: torch.Tensor, count: int) -> torch.Tensor:
    """Unpack bytes that contain two codes each."""
    packed = data.cpu().flatten()
    return torch.stack([packed >> 4, packed & 15], 1).flatten()[:count]


def require_near(
    found: torch.Tensor, gpu: torch.Tensor, scaled: torch.Tensor, boundaries: torch.Tensor
) -> None:
    """Require the GPU's codes, except where its approximate reciprocal crosses a boundary.

    Args:
        scaled: the values before encoding, divided by the scale, in float64.
        boundaries: the boundaries between codes, ascending.
    """
    differ = (found != gpu).nonzero().flatten()
    places = scaled[differ]
    index = torch.searchsorted(boundaries, places).clamp(1, len(boundaries) - 1)
    near = torch.stack([boundaries[index - 1], boundaries[index]])
    distance = (near - places).abs().min(0).values
    assert bool((distance <= 4e-7 * places.abs()).all()), places[distance.argmax()].item()


@pytest.mark.parametrize("encoding", ["nf4", "fp4"])
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_four_bits(kind: str, dtype: torch.dtype, encoding: str) -> None:
    values = torch.from_numpy(oracle.VALUES[encoding])
    for shape in [*SHAPES, (1000, 1024)]:
        tensor = numbers(kind, shape, dtype)
        for block_size in BLOCK_SIZES:
            unit = loadstone.quantize(tensor, encoding, block_size, dialect="bnb-cuda")
            data, state = functional.quantize_4bit(
                tensor.cuda(), blocksize=block_size, quant_type=encoding
            )
            absmax = state.absmax.cpu()
            assert same(unit.parts["absmax"], absmax), shape
            found, gpu = (codes_of(each, tensor.numel()) for each in (unit.parts["data"], data))
            scales = absmax.double().repeat_interleave(block_size)[: tensor.numel()]
            scaled = tensor.double().flatten() / scales
            is_zero = (values[found.int()] == 0) & (values[gpu.int()] == 0)  # fp4 has two zeros
            found[is_zero | (scales == 0)] = gpu[is_zero | (scales == 0)]
            boundaries = torch.from_numpy(oracle.cuda_boundaries(encoding)).double()
            require_near(found, gpu, scaled, boundaries)
            decoded = functional.dequantize_4bit(data, state).cpu().view(shape)
            parts = {"data": data.cpu(), "absmax": absmax}
            ours = loadstone.dequantize(parts, encoding, shape, dtype, block_size=block_size)
            assert same(ours, decoded, zeros_alike=True), shape


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_int8(kind: str, dtype: torch.dtype) -> None:
    boundaries = torch.arange(-127, 127, dtype=torch.float64) + 0.5
    for shape in [*(shape for shape in SHAPES if len(shape) == 2), (1000, 1024)]:
        tensor = numbers(kind, shape, dtype).half()
        unit = loadstone.quantize(tensor, "int8", dialect="bnb-cuda")
        codes, scales, _ = functional.int8_vectorwise_quant(tensor.cuda())
        assert same(unit.parts["absmax"], scales.cpu()), shape
        scaled = tensor.double() * 127 / scales.cpu().double()[:, None]
        require_near(
            unit.parts["data"].flatten(), codes.cpu().flatten(), scaled.flatten(), boundaries
        )


@pytest.mark.parametrize("encoding", ["nf4", "fp4"])
def test_nested_statistics_with_the_offset_of_bitsandbytes(encoding: str) -> None:
    for seed in range(20):
        tensor = numbers("normal", (300, 130), torch.bfloat16, seed)
        data, state = functional.quantize_4bit(
            tensor.cuda(), blocksize=64, quant_type=encoding, compress_statistics=True
        )
        unit = loadstone.quantize(
            tensor, encoding, nested=True, nested_offset=state.offset.cpu(), dialect="bnb-cuda"
        )
        assert encoding == "fp4" or same(unit.parts["data"], data.cpu())
        assert same(unit.parts["absmax"], state.absmax.cpu())
        assert same(unit.parts["nested_absmax"], state.state2.absmax.cpu())


def offsets(model: torch.nn.Module) -> dict[str, float]:
    states = {name: getattr(each, "quant_state", None) for name, each in model.named_parameters()}
    return {
        name: state.offset.item() for name, state in states.items() if getattr(state, "nested", 0)
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("places", [None, "cuda", "auto"])
def test_a_model_is_as_the_library_quantizes_it(
    name: str, kind: str, places: str | None, tmp_path: Path
) -> None:
    cls, folder = by_name(name).cls, plain(name, tmp_path)
    options: dict[str, Any] = {"quantization_config": config(kind), "dtype": torch.bfloat16}
    if places is not None:
        options["device_map"] = places
    library = cls.from_pretrained(folder, **options)
    model = ours(cls, folder, nested_offset=offsets(library), **options)
    assert {each.device.type for each in model.parameters()} == {"cuda"}
    rows = list(differences(model, library))
    if "nf4" not in kind:  # codes may differ near boundaries, which require_near checks
        rows = [row for row in rows if not row.endswith("other bytes")]
    assert rows == []
    loadstone.audit(model).require_real()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_model(kind: str, tmp_path: Path) -> None:
    cls, folder = by_name("llama").cls, quantized("llama", kind, tmp_path)
    library = cls.from_pretrained(folder)
    model = ours(cls, folder)
    assert_same(model, library)
    ids = torch.arange(12, device="cuda").reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, library(ids).logits)
        layer = "model.layers.1"
        offload = {"device_map": {"": 0, layer: "disk"}, "offload_folder": tmp_path / "offload"}
        partly = ours(cls, folder, **offload)
        assert partly.get_submodule(f"{layer}.mlp.up_proj").weight.is_meta
        assert torch.equal(partly(ids).logits, library(ids).logits)
