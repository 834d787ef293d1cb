"""Tests that loadstone's CPU decode is correct for every row length; bitsandbytes' is not."""

from __future__ import annotations

import bitsandbytes as bnb
import bitsandbytes.functional as library
import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes_models import FOUR_BIT, inputs, linear

import loadstone
import loadstone.bitsandbytes as ours
from loadstone._adapters.bitsandbytes import layout
from loadstone._adapters.bitsandbytes.experts import QuantizedStack

four_bit = pytest.mark.parametrize("kind", FOUR_BIT)
SIGLIP = (1152, 4304)  # a row of 4304 is a multiple of 16 but not of the block size


def quantized(kind, shape, dtype=torch.float32, blocksize=64):
    """Quantize random values with bitsandbytes; return the packed codes and the state."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    quant_type, _, double = kind.partition("+")
    packed, state = library.quantize_4bit(
        values, blocksize=blocksize, compress_statistics=bool(double), quant_type=quant_type
    )
    return values, packed, state


def by_definition(packed, state, dtype):
    """Decode each code separately: its value times the scale of its block in the flat weight."""
    codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).flatten()
    count = state.shape.numel()
    absmax = state.absmax
    if state.nested:
        outer = state.state2
        each = outer.absmax[torch.arange(len(absmax)) // outer.blocksize]
        absmax = outer.code[absmax.long()] * each + state.offset
    block = torch.arange(count) // state.blocksize
    values = state.code[codes[:count].long()] * absmax[block]
    return values.reshape(state.shape).to(dtype)


def bytes_of(tensor):
    """Return the bytes without the sign of zeros, which differs in one entry of the code tables."""
    return (tensor + 0.0).view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype)


def is_misread_here():
    """Return true if bitsandbytes decodes some rows wrongly on this CPU."""
    _, packed, state = quantized("nf4", (64, 96))
    return not torch.equal(
        library.dequantize_4bit(packed, state), by_definition(packed, state, torch.float32)
    )


@four_bit
@pytest.mark.parametrize("shape", [(3, 5, 9), (3, 64, 2), (2, 1, 1)])
def test_matrices_of_a_stack_are_decoded_alone(kind, shape):
    """Blocks, and bytes, may contain values of two matrices."""
    _, packed, state = quantized(kind, shape)
    whole = by_definition(packed, state, torch.float32)
    stack = QuantizedStack(packed, state)
    for index in range(-1, shape[0]):
        assert torch.equal(stack[index], whole[index]), index


@four_bit
@pytest.mark.parametrize(
    "shape", [(1, 1), (7, 33), (5, 63), (64, 96), (129, 65), (3, 4304), (260,)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_number_is_its_code_times_the_scale_of_its_block(kind, shape, dtype):
    for blocksize in (32, 64, 4096):
        _, packed, state = quantized(kind, shape, blocksize=blocksize)
        found = layout.decode(packed, state, dtype)
        assert found.dtype == dtype and found.shape == shape
        assert torch.equal(bytes_of(found), bytes_of(by_definition(packed, state, dtype)))


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_bytes_stored_as_floats_are_decoded(storage):
    _, packed, state = quantized("nf4", (64, 64))
    assert torch.equal(
        layout.decode(packed.flatten().view(storage), state), layout.decode(packed, state)
    )


@pytest.mark.parametrize("blocksize", [32, 64, 128, 512])
def test_what_bitsandbytes_reads_wrongly_is_known_by_the_shape(blocksize):
    """``is_misread`` must cover every row length that bitsandbytes' AVX-512 decode gets wrong."""
    rows = [2, 4, 34, 62, 100, *range(8, 150, 8), 240, 256, 1024, 1040, 4304]
    wrong, said = [], []
    for row in rows:
        _, packed, state = quantized("nf4", (9, row), blocksize=blocksize)
        if 9 * row <= blocksize:
            continue  # a single block is always decoded correctly
        if layout.is_misread(state):
            said.append(row)
        elif not torch.equal(library.dequantize_4bit(packed, state), layout.decode(packed, state)):
            pytest.fail(f"a row of {row} is read wrongly, and not known to be")
        if not torch.equal(library.dequantize_4bit(packed, state), layout.decode(packed, state)):
            wrong.append(row)
    assert said
    assert set(wrong) <= set(said)
    assert bool(wrong) == is_misread_here()


@four_bit
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_pass_with_rows_of_4304_is_right(kind, dtype):
    x = inputs(5, SIGLIP[1]).to(dtype)
    layer, values = siglip(kind)
    healed = ours.heal(layer)
    state = healed.weight.quant_state
    decoded = by_definition(healed.weight.data, state, dtype)
    expected = torch.nn.functional.linear(x, decoded, healed.bias.to(dtype))
    assert torch.equal(healed(x), expected)
    assert error(decoded, values) < 0.13  # the rounding error of 4-bit quantization
    again = healed(x)
    assert torch.equal(again, expected)


def siglip(kind):
    """Return the second MLP layer of a SigLIP-so400m block, and its values before quantization."""
    torch.manual_seed(0)
    layer = linear(kind, SIGLIP[1], SIGLIP[0]).eval().requires_grad_(False)
    values = torch.randn(SIGLIP, generator=torch.Generator().manual_seed(0)) * 0.02
    layer.weight.data = values.clone()
    return layer.to("cpu"), values


def error(found, values):
    return float((found.float() - values).norm() / values.norm())


@four_bit
def test_control_bitsandbytes_alone_is_wrong_with_rows_of_4304(kind):
    if not is_misread_here():
        pytest.skip("bitsandbytes does not vectorise on this CPU")
    layer, values = siglip(kind)
    found = library.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    right = by_definition(layer.weight.data, layer.weight.quant_state, torch.float32)
    assert error(found, values) > 0.2 > error(right, values)
    assert float((found != right).float().mean()) > 0.9
    layer.support_avx512bf16_for_cpu = False
    x = inputs(5, SIGLIP[1])
    wrong = layer(x)
    assert not torch.allclose(wrong, ours.heal(layer)(x), rtol=0.1, atol=0.1)


@pytest.mark.skipif(not has_avx512bf16(), reason="bitsandbytes rearranges nothing on this CPU")
@pytest.mark.parametrize("shape", [SIGLIP, (50, 128)])
def test_control_bitsandbytes_alone_fails_where_it_cannot_rearrange(shape):
    layer = linear("nf4", shape[1], shape[0]).to("cpu").eval().requires_grad_(False)
    with pytest.raises((RuntimeError, AssertionError), match=r"invalid for input|divisible"):
        layer(inputs(2, shape[1]))


@four_bit
@pytest.mark.parametrize("shape", [(50, 128), (64, 96), (33, 63), (64, 128)])
def test_layers_of_every_size_run(kind, shape):
    layer = ours.heal(linear(kind, shape[1], shape[0]).to("cpu").eval().requires_grad_(False))
    unit = ours.QuantizedWeight.from_parameter(layer.weight)
    decoded = by_definition(unit.data, unit.state(), torch.float32)
    x = inputs(4, shape[1])
    expected = torch.nn.functional.linear(x, decoded, layer.bias)
    if shape == (64, 128):  # for this shape bitsandbytes computes in bfloat16
        assert torch.allclose(layer(x), expected, rtol=0.02, atol=0.02)
    else:
        assert torch.equal(layer(x), expected)
    assert layer(x[:0]).shape == (0, shape[0])
    assert layer(x.view(2, 2, -1)).shape == (2, 2, shape[0])


@four_bit
def test_gradients_are_those_of_the_decoded_weight(kind):
    layer = ours.heal(linear(kind, 96, 64).to("cpu"))
    layer.bias.requires_grad_(True)
    x = inputs(4, 96).requires_grad_(True)
    layer(x).square().sum().backward()
    decoded = by_definition(layer.weight.data, layer.weight.quant_state, torch.float32)
    y, bias = x.detach().clone().requires_grad_(True), layer.bias.detach().clone()
    bias.requires_grad_(True)
    torch.nn.functional.linear(y, decoded, bias).square().sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=1e-5) and x.grad.abs().sum() > 0
    assert torch.allclose(layer.bias.grad, bias.grad)


def test_a_weight_that_was_quantized_the_other_way_round_is_turned():
    _, packed, state = quantized("nf4", (64, 48))
    layer = linear("nf4", 64, 48, bias=False)
    unit = ours.QuantizedWeight.from_state(packed, state)
    layer.weight = unit.to_parameter(layer)
    x = inputs(3, 64)
    expected = torch.nn.functional.linear(x, by_definition(packed, state, torch.float32).T)
    assert torch.equal(ours.heal(layer.eval())(x), expected)


def test_half_precision_inputs_use_the_dtype_to_compute_in():
    for compute in (None, torch.bfloat16, torch.float32):
        layer = linear("nf4", 96, 64, compute_dtype=compute).to("cpu").eval()
        layer.requires_grad_(False)
        x = inputs(4, 96).half()
        state = layer.weight.quant_state
        dtype = compute or torch.float16
        decoded = by_definition(layer.weight.data, state, dtype)
        expected = torch.nn.functional.linear(x.to(dtype), decoded, layer.bias.to(dtype)).half()
        assert torch.equal(ours.heal(layer)(x), expected)


@four_bit
def test_inside_patch_the_librarys_decode_is_right(kind):
    original = library.dequantize_4bit
    _, packed, state = quantized(kind, (64, 96))
    expected = by_definition(packed, state, torch.float32)
    with loadstone.patch("bitsandbytes"):
        found = bnb.functional.dequantize_4bit(packed, state)
        with_names = bnb.functional.dequantize_4bit(A=packed, quant_state=state)
        one = quantized(kind, (64, 128))
        assert torch.equal(bnb.functional.dequantize_4bit(*one[1:]), original(*one[1:]))
    assert torch.equal(bytes_of(found), bytes_of(expected))
    assert torch.equal(found, with_names)
    assert bnb.functional.dequantize_4bit is original


@four_bit
def test_inside_patch_a_weight_that_has_run_is_decoded(kind):
    """bitsandbytes cannot decode a rearranged weight, which merging an adapter requires."""
    layer = ours.heal(linear(kind, 128, 64).to("cpu").eval().requires_grad_(False))
    unit = ours.QuantizedWeight.from_parameter(layer.weight)
    expected = by_definition(unit.data, unit.state(), torch.float32)
    layer(inputs())
    with loadstone.patch("bitsandbytes"):
        found = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert torch.equal(bytes_of(found), bytes_of(expected))


@pytest.mark.parametrize("width", [96, 48])
def test_embeddings_with_such_rows_are_right(width):
    torch.manual_seed(0)
    table = bnb.nn.Embedding4bit(20, width, quant_type="nf4").to("cpu")
    rows = torch.tensor([[0, 7], [19, 3]])
    decoded = by_definition(table.weight.data, table.weight.quant_state, torch.float32)
    assert torch.equal(ours.heal(table)(rows), decoded[rows])
