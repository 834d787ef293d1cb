"""nf4, fp4 and LLM.int8 against bitsandbytes on a CPU, and against a numpy model of its formats.

bitsandbytes' encoders are right. Its AVX-512 decoders are wrong if the row length is a multiple of
16 but not of the block size; one test shows this, and the others avoid such rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import bitsandbytes.functional
import bnb_oracle as oracle
import numpy as np
import pytest
import torch
from bitsandbytes_models import decoding_keeps_nan
from bnb_numbers import BLOCK_SIZES, DTYPES, SHAPES, numbers, same

import loadstone
from loadstone import _core

KINDS = ["normal", "wide", "small", "ties", "zeros", "subnormal", "special"]


def wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().reshape(-1).numpy()


def bitsandbytes_decodes_rightly(shape: tuple[int, ...], block_size: int) -> bool:
    return shape[-1] % 16 != 0 or shape[-1] % block_size == 0 or block_size >= 2048


CASES = [
    pytest.param(kind, dtype, id=f"{kind}-{dtype}".replace("torch.", ""))
    for kind in KINDS
    for dtype in DTYPES
]


# ---- 4 bits


@pytest.mark.parametrize("dialect", ["bnb-cpu", "bnb-cuda"])
@pytest.mark.parametrize("encoding", ["nf4", "fp4"])
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_four_bits_are_those_of_the_oracle(
    kind: str, dtype: torch.dtype, encoding: str, dialect: str
) -> None:
    for shape in SHAPES:
        tensor = numbers(kind, shape, dtype)
        for block_size in BLOCK_SIZES:
            unit = loadstone.quantize(
                tensor, encoding, block_size, dialect=dialect, allow_non_finite=True
            )
            data, absmax = oracle.encode_4bit(wide(tensor), encoding, block_size, dialect)
            assert np.array_equal(unit.components["data"].flatten().numpy(), data)
            assert same(unit.parts["absmax"], torch.from_numpy(absmax))
            values = oracle.decode_4bit(data, absmax, tensor.numel(), encoding, block_size)
            for target in DTYPES:
                expected = torch.from_numpy(values).to(target).view(shape)
                assert same(unit.dequantize(target), expected)


@pytest.mark.parametrize("encoding", ["nf4", "fp4"])
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_four_bits_are_those_of_bitsandbytes(kind: str, dtype: torch.dtype, encoding: str) -> None:
    decoded = 0
    keeps_nan = decoding_keeps_nan(dtype)
    for shape in SHAPES:
        tensor = numbers(kind, shape, dtype, seed=1)
        for block_size in BLOCK_SIZES:
            unit = loadstone.quantize(tensor, encoding, block_size, allow_non_finite=True)
            data, state = bitsandbytes.functional.quantize_4bit(
                tensor, blocksize=block_size, quant_type=encoding
            )
            assert same(unit.parts["data"], data)
            assert same(unit.parts["absmax"], state.absmax)
            assert same(unit.parts["code"], state.code)
            if bitsandbytes_decodes_rightly(shape, block_size):
                expected = bitsandbytes.functional.dequantize_4bit(data, state).view(shape)
                found = unit.dequantize()
                if not keeps_nan:
                    expected[found.isnan() & (expected == 0)] = torch.nan
                assert same(found, expected, zeros_alike=True)
                decoded += 1
    assert decoded > 20


def test_the_comparison_sees_one_bit() -> None:
    """Control: detect a changed last bit, a changed sign of zero, and a different dtype."""
    values = torch.tensor([1.0, 0.0, float("nan")])
    assert same(values, values.clone())
    assert not same(values, values.double())
    for place in (0, 1):
        other = values.clone()
        other.view(torch.int32)[place] ^= 1 if place == 0 else -(1 << 31)
        assert not same(values, other)
        assert same(values, other, zeros_alike=True) == (place == 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_bitsandbytes_decodes_wrongly(dtype: torch.dtype) -> None:
    """Decode a layer of SigLIP, which has rows of 16 * 269 values in blocks of 64."""
    tensor = numbers("normal", (1152, 4304), dtype)
    unit = loadstone.quantize(tensor, "nf4")
    data, state = bitsandbytes.functional.quantize_4bit(tensor, blocksize=64, quant_type="nf4")
    assert same(unit.parts["data"], data)
    absmax = unit.parts["absmax"].numpy()
    values = oracle.decode_4bit(data.flatten().numpy(), absmax, tensor.numel(), "nf4")
    right = torch.from_numpy(values).to(dtype).view(tensor.shape)
    assert same(unit.dequantize(), right)
    error = (right.float() - tensor.float()).norm() / tensor.float().norm()
    assert 0.08 < error < 0.1
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        wrong = bitsandbytes.functional.dequantize_4bit(data, state)
        assert (wrong != right).float().mean() > (0.9 if dtype is torch.float32 else 0.8)


def test_known_values() -> None:
    """Quantize a ramp of values that every dtype represents exactly."""
    ramp = torch.tensor([(37 * i % 101 - 50) / 64 for i in range(131)])

    def digest(tensor: torch.Tensor) -> str:
        memory = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(memory).hexdigest()[:16]

    for dtype in DTYPES:
        nf4 = loadstone.quantize(ramp.to(dtype), "nf4")
        assert digest(nf4.parts["data"]) == "f134bef9b82c06ad"
        assert digest(nf4.parts["code"]) == "8501941daa1b8a90"
        assert digest(nf4.dequantize(torch.float32)) == "aff9d959b6c61aa7"
        assert digest(nf4.dequantize(torch.bfloat16)) == "5df151693dd45ba2"
        fp4 = loadstone.quantize(ramp.to(dtype), "FP4")
        assert digest(fp4.parts["data"]) == "fd31cb32ed1c756f"
        assert digest(fp4.parts["code"]) == "b830bcf8857895e5"
        assert digest(fp4.dequantize(torch.bfloat16)) == "5bce25255d63f064"


# ---- nested statistics


@pytest.mark.parametrize("dialect", ["bnb-cpu", "bnb-cuda"])
@pytest.mark.parametrize("count", [1, 64 * 256, 64 * 257, 38417, 300_000])
def test_nested_statistics_are_those_of_the_oracle(count: int, dialect: str) -> None:
    for seed in range(4):
        tensor = numbers("normal", (count,), torch.bfloat16, seed)
        plain = loadstone.quantize(tensor, "nf4", dialect=dialect)
        unit = loadstone.quantize(tensor, "nf4", nested=True, dialect=dialect)
        scales = plain.parts["absmax"].numpy()
        offset = np.float32(scales.astype(np.float64).mean())
        data, nested_absmax = oracle.encode_nested(scales, offset, dialect)
        assert torch.equal(unit.parts["data"], plain.parts["data"])
        assert np.array_equal(unit.parts["absmax"].numpy(), data)
        assert np.array_equal(unit.parts["nested_absmax"].numpy(), nested_absmax)
        assert np.array_equal(unit.parts["nested_code"].numpy(), oracle.MAP)
        assert unit.parts["nested_offset"].item() == offset
        rebuilt = torch.from_numpy(oracle.decode_nested(data, nested_absmax, offset))
        expected = loadstone.dequantize(
            {"data": plain.parts["data"], "absmax": rebuilt}, "nf4", (count,), torch.float32
        )
        assert same(unit.dequantize(torch.float32), expected)


@pytest.mark.parametrize("encoding", ["nf4", "fp4"])
def test_nested_statistics_are_those_of_bitsandbytes_with_its_offset(encoding: str) -> None:
    for seed in range(20):
        tensor = numbers("normal", (300, 130), torch.bfloat16, seed)
        data, state = bitsandbytes.functional.quantize_4bit(
            tensor, blocksize=64, quant_type=encoding, compress_statistics=True
        )
        unit = loadstone.quantize(tensor, encoding, nested=True, nested_offset=state.offset)
        assert same(unit.parts["data"], data)
        assert same(unit.parts["absmax"], state.absmax)
        assert same(unit.parts["nested_absmax"], state.state2.absmax)
        assert same(unit.parts["nested_code"], state.state2.code)
        assert same(unit.parts["nested_offset"], state.offset)
        expected = bitsandbytes.functional.dequantize_4bit(data, state)
        assert same(unit.dequantize(), expected, zeros_alike=True)


def test_the_offset_does_not_depend_on_threads() -> None:
    tensor = numbers("normal", (1 << 20,), torch.float32)
    before = torch.get_num_threads()
    offsets = set()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            unit = loadstone.quantize(tensor, "nf4", nested=True)
            offsets.add(unit.parts["nested_offset"].item())
    finally:
        torch.set_num_threads(before)
    scales = loadstone.quantize(tensor, "nf4").parts["absmax"]
    assert offsets == {scales.double().mean().float().item()}


# ---- rows of 8 bits


@pytest.mark.parametrize("dialect", ["bnb-cpu", "bnb-cuda"])
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_int8_is_that_of_the_oracle(kind: str, dtype: torch.dtype, dialect: str) -> None:
    for shape in [shape for shape in SHAPES if len(shape) > 1]:
        tensor = numbers(kind, shape, dtype)
        unit = loadstone.quantize(tensor, "int8", dialect=dialect, allow_non_finite=True)
        rows = wide(tensor).reshape(-1, shape[-1])
        data, absmax = oracle.encode_int8(rows, dialect)
        assert np.array_equal(unit.parts["data"].numpy().reshape(data.shape), data)
        assert same(unit.parts["absmax"], torch.from_numpy(absmax))
        values = torch.from_numpy(oracle.decode_int8(data, absmax))
        for target in DTYPES:
            assert same(unit.dequantize(target), values.to(target).view(shape))


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_int8_is_that_of_bitsandbytes(kind: str, dtype: torch.dtype) -> None:
    for shape in [(1, 1), (7, 33), (129, 65), (2, 96), (64, 512)]:
        tensor = numbers(kind, shape, dtype, seed=1)
        unit = loadstone.quantize(tensor, "int8", allow_non_finite=True)
        data, absmax, _ = bitsandbytes.functional.int8_vectorwise_quant(tensor.half())
        assert same(unit.parts["data"], data)
        assert same(unit.parts["absmax"], absmax)
        expected = bitsandbytes.functional.int8_vectorwise_dequant(data, absmax)
        assert same(unit.dequantize(torch.float32), expected)


# ---- kernel arguments


def test_strides_and_ranks_do_not_matter() -> None:
    tensor = numbers("normal", (6, 4, 32), torch.bfloat16)
    strided = tensor.transpose(0, 2)
    for encoding in ("nf4", "fp4", "int8"):
        found = loadstone.quantize(strided, encoding)
        expected = loadstone.quantize(strided.contiguous(), encoding)
        assert found.shape == (32, 4, 6)
        assert found.dtype is torch.bfloat16
        for name, part in expected.parts.items():
            assert torch.equal(found.parts[name], part)
        assert torch.equal(found.dequantize(), expected.dequantize())
        parts = {name: torch.stack([part, part], -1)[..., 0] for name, part in found.parts.items()}
        back = loadstone.dequantize(parts, encoding.upper(), (32, 4, 6), torch.bfloat16)
        assert torch.equal(back, expected.dequantize())
    parameter = torch.nn.Parameter(tensor.float())
    assert not loadstone.quantize(parameter, "nf4").dequantize().requires_grad


def test_nothing_and_one_number() -> None:
    for encoding in ("nf4", "fp4", "int8"):
        for shape in [(0, 64), (64, 0)]:
            unit = loadstone.quantize(torch.zeros(shape), encoding)
            assert unit.dequantize(torch.float16).shape == shape
    one = loadstone.quantize(torch.tensor(-0.75), "nf4")
    assert one.parts["data"].shape == (1, 1)
    assert one.dequantize().shape == ()
    assert one.dequantize().item() == -0.75


def test_data_may_be_stored_as_another_dtype() -> None:
    tensor = numbers("normal", (16, 64), torch.bfloat16)
    data, state = bitsandbytes.functional.quantize_4bit(
        tensor, blocksize=64, quant_type="nf4", quant_storage=torch.bfloat16
    )
    parts = {"data": data, "absmax": state.absmax}
    found = loadstone.dequantize(parts, "nf4", (16, 64), torch.bfloat16)
    assert torch.equal(found, loadstone.quantize(tensor, "nf4").dequantize())


@pytest.mark.parametrize("encoding", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_first_number_that_is_not_finite_is_named(
    encoding: str, dtype: torch.dtype, value: float
) -> None:
    for place in (0, 5, 63, 64, 130, 199):
        tensor = torch.ones(4, 50, dtype=dtype)
        tensor.view(-1)[place:] = value
        with pytest.raises(loadstone.Error) as caught:
            loadstone.quantize(tensor, encoding)
        assert caught.value.code == "q.nan"
        assert caught.value.found == f"{value} at [{place // 50}, {place % 50}]"


def test_a_number_too_large_for_int8_is_named() -> None:
    tensor = torch.ones(3, 40)
    tensor[1, 7] = 65519.0
    assert loadstone.quantize(tensor, "int8").parts["absmax"][1] == 65504
    tensor[1, 7] = 65520.0
    with pytest.raises(loadstone.Error, match=r"F16.*65520.0 at \[1, 7\]") as caught:
        loadstone.quantize(tensor, "int8")
    assert caught.value.code == "q.nan"
    assert loadstone.quantize(tensor, "nf4").parts["absmax"][0] == 65520


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"encoding": "nf5"}, "plan.encoding"),
        ({"encoding": "q4_k"}, "plan.encoding"),
        ({"block_size": 48}, "q.group_size"),
        ({"block_size": 0}, "q.group_size"),
        ({"block_size": 8192}, "q.group_size"),
        ({"dialect": "exact"}, "plan.options"),
        ({"encoding": "int8", "nested": True}, "plan.options"),
        ({"nested_offset": 0.5}, "plan.options"),
        ({"nested": True, "nested_offset": float("nan")}, "q.nan"),
        ({"tensor": torch.zeros(4, 4, dtype=torch.float64)}, "plan.dtype"),
        ({"tensor": torch.zeros(4, 4, dtype=torch.uint8)}, "plan.dtype"),
        ({"tensor": torch.zeros(4, 4, device="meta")}, "plan.options"),
        ({"tensor": torch.zeros(4, 4).to_sparse()}, "plan.options"),
        ({"tensor": torch.zeros(4), "encoding": "int8"}, "q.shape"),
        (
            {"tensor": torch.full((64,), torch.inf), "nested": True, "allow_non_finite": True},
            "q.nan",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_quantized_is_refused(change: dict[str, Any], code: str) -> None:
    arguments = {"tensor": torch.zeros(4, 4), "encoding": "nf4"}
    with pytest.raises(loadstone.Error) as caught:
        loadstone.quantize(**{**arguments, **change})
    assert caught.value.code == code


# ---- damage

Parts = dict[str, torch.Tensor]


def damaged(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Parts], None]:
    def apply(parts: Parts) -> None:
        parts[name] = change(parts[name])

    return apply


def spoiled(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[0] = torch.nan
    return tensor


def shorter(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten()[:-1]


@pytest.mark.parametrize(
    ("encoding", "damage", "code", "part"),
    [
        ("nf4", damaged("absmax", shorter), "q.scale_shape", "absmax"),
        ("nf4", damaged("absmax", lambda part: part[:0]), "q.scale_shape", "absmax"),
        ("nf4", lambda parts: parts.pop("absmax"), "q.scale_missing", "absmax"),
        ("nf4", damaged("data", lambda part: part[:-32]), "q.shape", "data"),
        ("nf4", lambda parts: parts.pop("data"), "q.scale_missing", "data"),
        ("nf4", damaged("absmax", spoiled), "q.nan", "absmax"),
        ("nf4", damaged("absmax", lambda part: part.half()), "q.dtype", "absmax"),
        ("nf4", damaged("code", shorter), "q.scale_shape", "code"),
        ("nf4", damaged("code", lambda part: part * 2), "q.code", "code"),
        ("nf4", damaged("absmax", lambda part: part.to("meta")), "audit.on_meta", "absmax"),
        ("nested", damaged("nested_code", lambda part: part.to("meta")), "audit.on_meta", None),
        ("nested", damaged("absmax", shorter), "q.scale_shape", "absmax"),
        ("nested", damaged("absmax", lambda part: part.float()), "q.dtype", "absmax"),
        ("nested", lambda parts: parts.pop("nested_absmax"), "q.scale_missing", "nested_absmax"),
        ("nested", lambda parts: parts.pop("nested_offset"), "q.scale_missing", "nested_offset"),
        ("nested", damaged("nested_absmax", shorter), "q.scale_shape", "nested_absmax"),
        ("nested", damaged("nested_absmax", spoiled), "q.nan", "nested_absmax"),
        ("nested", damaged("nested_offset", spoiled), "q.nan", "nested_offset"),
        ("nested", damaged("nested_code", spoiled), "q.nan", "nested_code"),
        ("int8", damaged("absmax", shorter), "q.scale_shape", "absmax"),
        ("int8", damaged("absmax", spoiled), "q.nan", "absmax"),
        ("int8", damaged("data", shorter), "q.shape", "data"),
        ("int8", damaged("data", lambda part: part.view(torch.uint8)), "q.dtype", "data"),
        (
            "int8",
            lambda parts: parts.update(zeros=torch.zeros(1)),
            "q.scale_unused",
            "zeros",
        ),
    ],
)
def test_damage_is_named(
    encoding: str, damage: Callable[[Parts], object], code: str, part: str | None
) -> None:
    nested = encoding == "nested"
    name = "nf4" if nested else encoding
    unit = loadstone.quantize(numbers("normal", (300, 96), torch.bfloat16), name, nested=nested)
    parts = dict(unit.parts)
    loadstone.dequantize(parts, name, (300, 96), torch.bfloat16)
    damage(parts)
    with pytest.raises(loadstone.Error) as caught:
        loadstone.dequantize(parts, name, (300, 96), torch.bfloat16)
    assert caught.value.code == code
    assert part is None or caught.value.field == part


def test_a_shape_that_lies_costs_no_memory() -> None:
    """Arithmetic rejects shapes of terabytes and beyond 64 bits before any allocation."""
    unit = loadstone.quantize(torch.ones(2, 64), "nf4")
    for shape in [(1 << 40, 64), (1 << 62, 64), (1 << 63, 2)]:
        with pytest.raises(loadstone.Error) as caught:
            loadstone.dequantize(unit.parts, "nf4", shape, torch.float32)
        assert caught.value.code == "q.shape"
    with pytest.raises(loadstone.Error) as caught:
        loadstone.dequantize(unit.parts, "nf4", (-2, -64), torch.float32)
    assert caught.value.code == "q.shape"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"dialect": "exact"}, "plan.options"),
        ({"dtype": torch.float64}, "plan.dtype"),
        ({"dtype": "float64"}, "plan.dtype"),
        ({"dtype": "bf17"}, "plan.dtype"),
        ({"block_size": 48}, "q.group_size"),
        ({"block_size": 32}, "q.scale_shape"),
    ],
    ids=str,
)
def test_what_cannot_be_decoded_is_refused(change: dict[str, Any], code: str) -> None:
    unit = loadstone.quantize(torch.ones(2, 64), "nf4")
    arguments = {"parts": unit.parts, "encoding": "nf4", "shape": (2, 64), "dtype": torch.float32}
    with pytest.raises(loadstone.Error) as caught:
        loadstone.dequantize(**{**arguments, **change})
    assert caught.value.code == code


def test_the_kernels_take_no_buffer_of_another_size() -> None:

    def octets(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8)

    bnb = _core.bnb
    bnb.encode_4bit("nf4", "bnb-cpu", 64, octets(260), "F32", octets(33), octets(8))
    for sizes in [(261, 33, 8), (260, 32, 8), (260, 33, 4), (260, 33, 9)]:
        given = [octets(size) for size in sizes]
        with pytest.raises(loadstone.Error, match="usage"):
            bnb.encode_4bit("nf4", "bnb-cpu", 64, given[0], "F32", given[1], given[2])
        with pytest.raises(loadstone.Error, match="usage"):
            bnb.decode_4bit("nf4", 64, given[1], given[2], given[0], "F32")
    bnb.encode_int8("bnb-cpu", 5, octets(20), "BF16", octets(10), octets(8))
    for sizes in [(21, 10, 8), (20, 9, 8), (20, 10, 4), (18, 10, 8)]:
        given = [octets(size) for size in sizes]
        with pytest.raises(loadstone.Error, match="usage"):
            bnb.encode_int8("bnb-cpu", 5, given[0], "BF16", given[1], given[2])
        with pytest.raises(loadstone.Error, match="usage"):
            bnb.decode_int8(5, given[1], given[2], given[0], "BF16")
    bnb.encode_nested("bnb-cpu", octets(1200), 0.5, "F32", octets(300), octets(8))
    for sizes in [(1196, 300, 8), (1200, 300, 4), (1200, 300, 12)]:
        given = [octets(size) for size in sizes]
        with pytest.raises(loadstone.Error, match="usage"):
            bnb.encode_nested("bnb-cpu", given[0], 0.5, "F32", given[1], given[2])
        with pytest.raises(loadstone.Error, match="usage"):
            bnb.decode_nested(given[1], given[2], octets(1024), 0.5, given[0])
    with pytest.raises(loadstone.Error, match="usage"):
        bnb.decode_nested(octets(300), octets(8), octets(1020), 0.5, octets(1200))


def test_a_dtype_may_be_a_name() -> None:
    unit = loadstone.quantize(torch.ones(2, 64), "nf4")
    for name in ("bfloat16", "BF16"):
        assert torch.equal(unit.dequantize(name), unit.dequantize(torch.bfloat16))
        found = loadstone.dequantize(unit.parts, "nf4", (2, 64), name)
        assert found.dtype is torch.bfloat16
    with pytest.raises(loadstone.PlanError) as caught:
        unit.dequantize("int8")
    assert caught.value.code == "plan.dtype" and caught.value.found == "int8"
