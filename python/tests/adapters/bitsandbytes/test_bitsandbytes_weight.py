"""Tests QuantizedWeight: its form in checkpoints, and rejected inputs."""

from __future__ import annotations

import json
import subprocess
import sys

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes_models import FOUR_BIT, KINDS, copied, inputs, linear, same_bytes

import loadstone
from loadstone._adapters.bitsandbytes.checkpoint_format import QuantStateMetadata, check_components
from loadstone._adapters.bitsandbytes.quantized_weight import QuantizedWeight

kinds = pytest.mark.parametrize("kind", KINDS)
four_bit = pytest.mark.parametrize("kind", FOUR_BIT)


def layer(kind, outputs=96, width=96, dtype=torch.float32, **options):
    """Return a quantized layer of bitsandbytes on the CPU, without a bias."""
    torch.manual_seed(0)
    made = linear(kind, width, outputs, **options)
    made.bias = None
    made.weight.data = torch.randn(outputs, width).to(dtype)
    return made.to("cpu").requires_grad_(False).eval()


def form_of(kind, **options):
    """Return the tensors that bitsandbytes saves for a weight, and its QuantizedWeight."""
    made = layer(kind, **options)
    return copied(made.state_dict(prefix="a.b.")), QuantizedWeight.from_parameter(made.weight)


@kinds
@pytest.mark.parametrize("shape", [(96, 96), (5, 63), (64, 256), (1152, 430)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_checkpoint_form_is_that_of_bitsandbytes(kind, shape, dtype):
    saved, unit = form_of(kind, outputs=shape[0], width=shape[1], dtype=dtype)
    assert same_bytes(unit.state_dict("a.b"), saved)
    again = QuantizedWeight.from_state_dict(saved, "a.b")
    assert same_bytes(again.state_dict("a.b"), saved)
    assert again.quant_type == kind.partition("+")[0] and again.shape == shape
    again.check("a.b")


@four_bit
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_bytes_stored_as_floats_keep_their_dtype(kind, storage):
    saved, unit = form_of(kind, quant_storage=storage)
    assert saved["a.b.weight"].dtype == storage
    assert same_bytes(QuantizedWeight.from_state_dict(saved, "a.b").state_dict("a.b"), saved)
    assert same_bytes(unit.state_dict("a.b"), saved)


def test_the_state_has_the_known_length():
    for kind, length in (("nf4", 78), ("fp4", 78), ("nf4+double", 167)):
        _, unit = form_of(kind, dtype=torch.bfloat16)
        name = f"x.weight.quant_state.bitsandbytes__{unit.quant_type}"
        state = unit.state_dict("x")[name].numpy().tobytes()
        assert len(state) == length
        offset = None if unit.offset is None else unit.offset.item()
        expected = QuantStateMetadata(unit.quant_type, 64, "bfloat16", (96, 96), offset)
        assert QuantStateMetadata.parse(name, state) == expected


@kinds
def test_a_parameter_made_of_a_unit_is_bitsandbytes_own(kind):
    made = layer(kind, outputs=64, width=128)
    expected = made(inputs())
    saved = copied(layer(kind, outputs=64, width=128).state_dict())
    other = linear(kind, 128, 64)
    other.bias = None
    other.eval()
    other.weight = QuantizedWeight.from_state_dict(saved).to_parameter(other)
    assert type(other.weight) in (bnb.nn.Params4bit, bnb.nn.Int8Params)
    assert same_bytes(saved, copied(other.state_dict()))
    assert torch.equal(other(inputs()), expected)


@kinds
def test_an_8_bit_weight_is_found_with_its_scales_in_the_modules_state_too(kind):
    made = layer(kind, outputs=64, width=128)
    saved = copied(made.state_dict())
    made(inputs())
    scb = made.state.SCB if kind == "int8" else None
    assert kind != "int8" or made.weight.SCB is None
    assert (
        same_bytes(QuantizedWeight.from_parameter(made.weight, scb).state_dict(), saved)
        or kind != "int8"
    )


@kinds
def test_a_move_makes_a_new_unit(kind):
    saved, unit = form_of(kind)
    moved = unit.to("meta")
    assert moved.device.type == "meta" and moved.absmax.is_meta
    assert unit.device.type == "cpu" and same_bytes(unit.state_dict("a.b"), saved)
    moved.check("a.b")  # the check needs only shapes, so meta tensors pass


def test_a_weight_that_is_not_quantized_is_no_unit():
    for kind in KINDS:
        with pytest.raises(loadstone.FormatError) as caught:
            QuantizedWeight.from_parameter(linear(kind, 64, 64).weight)
        assert caught.value.code == "q.scale_missing"


def shortened(name, count=1):
    def damage(saved):
        saved[name] = saved[name].flatten()[:-count]

    return damage


def without(name):
    return lambda saved: saved.pop(name)


def replaced(name, value):
    def damage(saved):
        saved[name] = value(saved[name]) if callable(value) else value

    return damage


def state_with(**changes):
    """Return a function that changes fields of the saved state; ``None`` removes a field."""

    def damage(saved):
        name = next(name for name in saved if "bitsandbytes__" in name)
        fields = json.loads(saved[name].numpy().tobytes()) | changes
        fields = {key: value for key, value in fields.items() if value is not None}
        saved[name] = blob(json.dumps(fields))

    return damage


def blob(text):
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


STATE = "a.b.weight.quant_state.bitsandbytes__nf4"
NAN = torch.full((144,), float("nan"))
DAMAGED = [
    ("nf4", shortened("a.b.weight.absmax"), "q.scale_shape", "a.b.weight.absmax", "[143]", "[144]"),
    ("nf4", without("a.b.weight.absmax"), "q.scale_missing", "a.b.weight.absmax", "", ""),
    ("nf4", without(STATE), "q.scale_missing", "a.b.weight.quant_state.", "", ""),
    ("nf4", replaced(STATE, blob("not JSON")), "q.quant_state", STATE, "", ""),
    ("nf4", replaced(STATE, blob("\xff")), "q.quant_state", STATE, "", ""),
    ("nf4", replaced(STATE, blob("[1]")), "q.quant_state", STATE, "an array", "an object"),
    ("nf4", shortened("a.b.weight", 32), "q.shape", "a.b.weight", "4576 bytes", "4608 bytes"),
    ("int8", shortened("a.b.SCB"), "q.scale_shape", "a.b.SCB", "[95]", "[96]"),
    ("int8", without("a.b.SCB"), "q.scale_missing", "a.b.SCB", "", ""),
    (
        "int8",
        replaced("a.b.weight_format", torch.tensor(1, dtype=torch.uint8)),
        "q.weight_format",
        "a.b.weight_format",
        "1",
        "0",
    ),
    (
        "nf4",
        replaced("a.b.weight.extra", torch.ones(2)),
        "q.scale_unused",
        "a.b.weight.extra",
        "",
        "",
    ),
    ("nf4", state_with(extra=1), "q.quant_state", STATE, "extra", "blocksize"),
    ("nf4", state_with(shape=None), "q.quant_state", STATE, "", ""),
    ("nf4", state_with(shape=[0, 96]), "q.shape", "a.b.weight", "4608 bytes", "[0, 96]"),
    ("nf4", state_with(shape=[True, 96]), "q.quant_state", STATE, "true", "a whole number"),
    ("nf4", state_with(shape=[96, 96, 2]), "q.shape", "a.b.weight", "4608 bytes", "9216 bytes"),
    ("nf4", state_with(blocksize=63), "q.group_size", STATE, "63", "64"),
    ("nf4", state_with(blocksize=True), "q.quant_state", STATE, "true", "a whole number"),
    ("nf4", state_with(quant_type="fp4"), "q.quant_state", STATE, "fp4", ""),
    ("nf4", state_with(dtype="int64"), "q.quant_state", STATE, "int64", ""),
    ("nf4", replaced("a.b.weight.absmax", NAN), "q.nan", "a.b.weight.absmax", "144 of 144", ""),
    ("int8", replaced("a.b.SCB", NAN[:96]), "q.nan", "a.b.SCB", "96 of 96", ""),
    (
        "nf4",
        replaced("a.b.weight.absmax", lambda it: it.double()),
        "q.dtype",
        "a.b.weight.absmax",
        "F64",
        "F32",
    ),
    (
        "nf4+double",
        shortened("a.b.weight.nested_quant_map"),
        "q.scale_shape",
        "a.b.weight.nested_quant_map",
        "[255]",
        "[256]",
    ),
    (
        "nf4+double",
        without("a.b.weight.nested_absmax"),
        "q.scale_missing",
        "a.b.weight.nested_absmax",
        "",
        "",
    ),
    ("nf4+double", state_with(nested_offset="x"), "q.quant_state", STATE, "", ""),
    ("nf4+double", state_with(nested_offset=float("nan")), "q.quant_state", STATE, "", ""),
    ("nf4+double", state_with(nested_offset=None), "q.quant_state", STATE, "nested_dtype", ""),
    ("int8", replaced("a.b.weight", lambda it: it.float()), "q.dtype", "a.b.weight", "F32", "I8"),
    ("int8", replaced("a.b.weight", lambda it: it[0]), "q.shape", "a.b.weight", "[96]", ""),
]


@pytest.mark.parametrize(("kind", "damage", "code", "tensor", "found", "expected"), DAMAGED)
def test_what_is_damaged_is_refused_by_name(kind, damage, code, tensor, found, expected):
    saved, _ = form_of(kind)
    QuantizedWeight.from_state_dict(saved, "a.b").check("a.b")
    damage(saved)
    with pytest.raises(loadstone.FormatError) as caught:
        QuantizedWeight.from_state_dict(saved, "a.b").check("a.b")
    error = caught.value
    assert error.code == code and error.tensor.startswith(tensor)
    assert found in error.found and expected in error.expected
    assert error.tensor in str(error) and found in str(error)


def test_another_state_beside_the_first_is_refused():
    saved, _ = form_of("nf4")
    saved[STATE.replace("nf4", "fp4")] = saved[STATE]
    with pytest.raises(loadstone.FormatError) as caught:
        QuantizedWeight.from_state_dict(saved, "a.b")
    assert caught.value.code == "q.quant_state"


def test_sizes_are_checked_without_a_tensor_and_without_bitsandbytes():
    entries = {
        "weight": ("U8", (4608, 1)),
        "weight.absmax": ("F32", (144,)),
        "weight.quant_map": ("F32", (16,)),
        "weight.quant_state.bitsandbytes__nf4": ("U8", (78,)),
        "bias": ("F32", (96,)),
    }
    state = b'{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [96, 96]}'
    expected = QuantStateMetadata("nf4", 64, "bfloat16", (96, 96))
    assert check_components("x", entries, blob=state) == expected
    with pytest.raises(loadstone.FormatError, match=r"x\.weight\.absmax.*\[144\].*\[72\]"):
        check_components("x", entries, blob=state.replace(b"64", b"128"))
    assert check_components("", {"weight": ("I8", (3, 5)), "SCB": ("F32", (3,))}) is None
    script = (
        "import sys; sys.modules['bitsandbytes'] = None; "
        "import loadstone._adapters.bitsandbytes.checkpoint_format; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
