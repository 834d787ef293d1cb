"""Codes and scales of fp8, int8, int4, nvfp4, mxfp4 and mxfp8 against numpy code and ModelOpt."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import modelopt_oracle as oracle
import numpy as np
import pytest
import torch
from modelopt.torch.quantization import qtensor

import loadstone

ENCODINGS = tuple(oracle.ENCODE)
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SHAPE = (64, 384)


def dialects(encoding: str) -> tuple[str, ...]:
    extra = ("modelopt-export",) if encoding == "fp8" else ()
    return ("exact", "modelopt-compat", *extra)


CASES = [(encoding, dialect) for encoding in ENCODINGS for dialect in dialects(encoding)]


def normal(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _with_zeros() -> torch.Tensor:
    x = normal()
    x[3] = 0
    x[:, 128:256] = 0
    x[5, :16] = -0.0
    x[7, ::2] = -0.0
    x[9, 5] = 1e-20
    return x


def _ties() -> torch.Tensor:
    """Return values whose quotients are halfway between codes, for many encodings."""
    steps = torch.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE) % 225
    x = (steps - 112).float() / 16
    x[:, ::16] = 7.0
    x[:, ::32] = 6.0
    x[1::4, ::128] = 448.0
    x[2::4, ::128] = 127.0
    x[3::4, ::128] = 2688.0
    return x


def _outlier() -> torch.Tensor:
    x = normal() * 0.02
    x[11, 77] = 900.0
    return x


def _bit_patterns() -> torch.Tensor:
    """Return all finite bfloat16 values, padded with zeros to whole blocks."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16).float()
    numbers = numbers[torch.isfinite(numbers)]
    return torch.nn.functional.pad(numbers, (0, (1 << 16) - len(numbers))).reshape(128, 512)


def _small_patterns() -> torch.Tensor:
    """Return all bfloat16 values with magnitudes of 1e-3 to 1e3."""
    numbers = _bit_patterns().reshape(-1)
    keep = (numbers.abs() > 1e-3) & (numbers.abs() < 1e3)
    numbers = numbers[keep]
    return numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(1))][
        : 12 * 384
    ].reshape(12, 384)


SAMPLES: dict[str, Callable[[], torch.Tensor]] = {
    "normal": normal,
    "weights": lambda: normal(seed=1) * 0.02,
    "heavy": lambda: normal(seed=2) ** 5,
    "tiny": lambda: normal(seed=3) * 1e-30,
    "zeros": _with_zeros,
    "all zeros": lambda: torch.zeros(SHAPE),
    "ties": _ties,
    "outlier": _outlier,
    "patterns": _bit_patterns,
    "shuffled": _small_patterns,
}


def sample(name: str, dtype: str) -> torch.Tensor:
    x = SAMPLES[name]().to(DTYPES[dtype])
    return torch.where(torch.isfinite(x), x, torch.zeros_like(x))


def as_bytes(array: Any, part: torch.Tensor) -> bytes:
    """Return the bytes of the oracle's array, cast to the dtype of loadstone's component."""
    if array.dtype == np.float32:
        stored = torch.from_numpy(np.ascontiguousarray(array)).to(part.dtype)
        assert torch.equal(stored.float(), torch.from_numpy(np.ascontiguousarray(array)))
        return stored.reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(array).tobytes()


def raw(part: torch.Tensor) -> bytes:
    return part.reshape(-1).view(torch.uint8).numpy().tobytes()


def check(found: loadstone.Quantized, expected: oracle.Parts, what: str) -> None:
    assert list(found.parts) == list(expected), what
    for name, part in found.parts.items():
        theirs = as_bytes(expected[name], part)
        ours = raw(part)
        assert len(ours) == len(theirs), (what, name)
        if ours != theirs:
            a, b = np.frombuffer(ours, np.uint8), np.frombuffer(theirs, np.uint8)
            wrong = np.flatnonzero(a != b)
            pytest.fail(f"{what}, {name}: {len(wrong)} bytes, first at {wrong[0]}: {a[wrong[0]]}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("encoding", "dialect"), CASES)
def test_bytes_are_those_of_the_oracle(encoding: str, dialect: str, dtype: str) -> None:
    for name in SAMPLES:
        x = sample(name, dtype)
        unit = loadstone.quantize(x, encoding, dialect=dialect)
        expected = oracle.ENCODE[encoding](x.float().numpy(), dtype, dialect)
        check(unit, expected, f"{encoding} {dialect} {dtype} {name}")
        for part_name, part in unit.parts.items():
            if part_name != "data" and part.dtype is not torch.uint8:
                assert bool((torch.isfinite(part.float()) & (part.float() > 0)).all()), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("encoding", "dialect"), CASES)
def test_decoding_is_the_oracle_s(encoding: str, dialect: str, dtype: str) -> None:
    for name in ("normal", "heavy", "zeros", "ties"):
        x = sample(name, dtype)
        unit = loadstone.quantize(x, encoding, dialect=dialect)
        parts = oracle.ENCODE[encoding](x.float().numpy(), dtype, dialect)
        expected = torch.from_numpy(oracle.decode(parts, encoding, SHAPE))
        for target in DTYPES.values():
            assert torch.equal(unit.dequantize(target), expected.to(target)), (name, target)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_decoded_is_near(encoding: str) -> None:
    x = normal() * 0.02
    steps = {"fp8": 16, "mxfp8": 14, "int8": 127}.get(encoding.split("-")[0], 4)
    for dialect in dialects(encoding):
        back = loadstone.quantize(x, encoding, dialect=dialect).dequantize()
        assert back.dtype is x.dtype
        assert (back - x).abs().max() <= x.abs().max() / steps


def theirs(encoding: str, x: torch.Tensor) -> tuple[Any, ...]:
    """Return the packed tensor and the scales that ModelOpt computes."""
    if encoding == "fp8":
        return qtensor.FP8QTensor.quantize(x)
    if encoding == "fp8-channel":
        return qtensor.FP8QTensor.quantize(x, axis=0)
    if encoding == "fp8-block":
        return qtensor.FP8QTensor.quantize(x, block_sizes={-1: 128, -2: 128})
    if encoding == "int8-channel":
        return qtensor.INT8QTensor.quantize(x, axis=0)
    if encoding == "int4":
        return qtensor.INT4QTensor.quantize(x, 128)
    if encoding == "nvfp4":
        return qtensor.NVFP4QTensor.quantize(x, 16)
    if encoding == "mxfp4":
        return qtensor.MXFP4QTensor.quantize(x, 32)
    return qtensor.MXFP8QTensor.quantize(x)


# Dtypes for which ModelOpt's bytes are undefined, because a scale is 0 or infinite (docs/formats).
UNDEFINED = {
    "normal": (),
    "heavy": (),
    "ties": (),
    "outlier": (),
    "shuffled": (),
    "tiny": ("F16",),
    "zeros": (),
    "patterns": ("F16",),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encoding", [e for e in ENCODINGS if e != "int4-awq"])
def test_compat_is_modelopt(encoding: str, dtype: str) -> None:
    divides_by_zero = encoding in ("fp8-channel", "fp8-block", "int8-channel", "int4")
    compared = overflows = 0
    for name, undefined in UNDEFINED.items():
        if dtype in undefined and not encoding.startswith("mx"):
            continue
        if divides_by_zero and name in ("zeros", "patterns"):
            continue
        x = sample(name, dtype)
        packed, *scales = theirs(encoding, x)
        unit = loadstone.quantize(x, encoding, dialect="modelopt-compat")
        expected = [packed._quantized_data, *scales]
        form: dict[str, Any] = {"scale": scales[0]}
        if encoding == "nvfp4":
            form["double_scale"] = scales[1]
        sizes = {"fp8-block": {-1: 128, -2: 128}, "int4": {-1: 128}, "nvfp4": {-1: 16}}
        form["block_sizes"] = sizes.get(encoding, {-1: 32} if encoding == "mxfp4" else None)
        numbers = packed.dequantize(x.dtype, **form)
        is_finite = torch.isfinite(numbers)
        assert torch.isfinite(unit.dequantize()).all(), name
        if encoding == "fp8" and not is_finite.all():
            overflows += 1  # all values share one scale, so the others differ too
            continue
        for (part, ours), their in zip(unit.parts.items(), expected, strict=True):
            if part != "data" or is_finite.all():
                assert raw(ours) == raw(their.contiguous()), (name, part)
        assert torch.equal(unit.dequantize()[is_finite], numbers[is_finite]), name
        overflows += int(not is_finite.all())
        compared += 1
    assert compared >= 5
    # ModelOpt encodes the largest values as infinities, unlike loadstone.
    assert overflows == int(encoding.startswith("mx") or (encoding, dtype) == ("fp8", "BF16"))


def test_export_of_fp8_is_modelopt_with_a_scale_of_float32() -> None:
    for dtype in DTYPES.values():
        x = (normal() * 0.02).to(dtype)
        scale = x.abs().max().float() / 448
        packed, _ = qtensor.FP8QTensor.quantize(x, scales=scale)
        unit = loadstone.quantize(x, "fp8", dialect="modelopt-export")
        assert raw(unit.parts["data"]) == raw(packed._quantized_data)
        assert torch.equal(unit.parts["scale"], scale)


@pytest.mark.parametrize(("encoding", "most"), [("mxfp4", 6.0), ("mxfp8", 448.0)])
def test_exponents_next_to_a_power_of_two(encoding: str, most: float) -> None:
    """compat's exponent is one less if a float32 logarithm rounds down to the power of two."""
    rows = []
    for power in range(-120, 115 if most == 448 else 125):
        near = torch.tensor(most * 2.0**power, dtype=torch.float32).view(torch.int32)
        rows.append((near + torch.arange(-8, 56)).to(torch.int32).view(torch.float32))
    x = torch.stack(rows).reshape(-1, 1).repeat(1, 32)
    x = x[torch.isfinite(x[:, 0])].contiguous()
    _, scale = theirs(encoding, x)
    compat = loadstone.quantize(x, encoding, dialect="modelopt-compat").parts
    assert torch.equal(compat["scale"].reshape(-1), scale.reshape(-1))
    exact = loadstone.quantize(x, encoding).parts["scale"]
    check(loadstone.quantize(x, encoding), oracle.ENCODE[encoding](x.numpy(), "F32", "exact"), "")
    differ = exact.int() - compat["scale"].int()
    assert set(differ.reshape(-1).tolist()) == {0, 1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_stack_is_its_matrices(encoding: str, dtype: str) -> None:
    stack = torch.stack([normal((6, 128), seed) * 10.0**seed for seed in range(4)])
    x = stack.reshape(2, 2, 6, 128).to(DTYPES[dtype])
    for dialect in dialects(encoding):
        unit = loadstone.quantize(x, encoding, dialect=dialect)
        for i in range(4):
            one = loadstone.quantize(x.reshape(4, 6, 128)[i], encoding, dialect=dialect)
            for name, part in unit.parts.items():
                assert part.shape[:2] == (2, 2), name
                assert raw(part.flatten(0, 1)[i]) == raw(one.parts[name]), name
        flat = torch.stack(
            [loadstone.quantize(m, encoding, dialect=dialect).dequantize() for m in x.flatten(0, 1)]
        )
        assert torch.equal(unit.dequantize().flatten(0, 1), flat)


@pytest.mark.parametrize("encoding", ["fp8", "nvfp4"])
def test_partners_share_a_scale(encoding: str) -> None:
    gate, up = normal(seed=1) * 0.02, normal(seed=2) * 0.03
    amax = torch.cat([gate, up]).abs().max()
    both = loadstone.quantize(torch.cat([gate, up]), encoding).parts
    last = list(both)[-1]
    for x, rows in ((gate, slice(None, 64)), (up, slice(64, None))):
        parts = loadstone.quantize(x, encoding, amax=amax).parts
        assert torch.equal(parts[last], both[last])
        assert raw(parts["data"]) == raw(both["data"][rows])
        alone = loadstone.quantize(x, encoding).parts
        assert torch.equal(alone[last], parts[last]) == (x is up)  # control
    stack = torch.stack([gate, up])
    given = loadstone.quantize(stack, encoding, amax=[float(amax), float(amax)]).parts
    assert torch.equal(given[last], both[last].expand(2))


def test_amax_is_checked() -> None:
    for amax in (math.nan, math.inf, -1.0, [1.0, 2.0]):
        with pytest.raises(loadstone.Error) as caught:
            loadstone.quantize(normal(), "nvfp4", amax=amax)
        assert caught.value.code == "plan.options"
    for encoding in ("mxfp8", "nf4"):
        with pytest.raises(loadstone.Error) as caught:
            loadstone.quantize(normal(), encoding, amax=1.0)
        assert caught.value.code == "plan.options"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("encoding", "dialect"), CASES)
def test_numbers_that_are_not_finite(encoding: str, dialect: str, dtype: str) -> None:
    clean = sample("normal", dtype)
    x = clean.clone()
    x[33, 150], x[40, 7], x[41, 8] = math.nan, math.inf, -math.inf
    with pytest.raises(loadstone.Error) as caught:
        loadstone.quantize(x, encoding, dialect=dialect)
    assert caught.value.code == "q.nan"
    assert "nan at [33, 150]" in str(caught.value)
    unit = loadstone.quantize(x, encoding, dialect=dialect, allow_non_finite=True)
    # Non-finite values do not affect any scale, as if they were zeros.
    places = (x.float() - x.float()) != 0
    without = torch.where(places, torch.zeros_like(x), x)
    expected = loadstone.quantize(without, encoding, dialect=dialect)
    for name in unit.parts:
        if name != "data":
            assert raw(unit.parts[name]) == raw(expected.parts[name]), name
    back, other = unit.dequantize(torch.float32), expected.dequantize(torch.float32)
    assert torch.equal(back[~places], other[~places])
    assert back[40, 7] > 0 > back[41, 8]
    assert bool(back[33, 150].isnan()) == ("fp8" in encoding)
    assert back[33, 150].nan_to_num(0.0) == 0


TAILS = {
    "fp8": (5, 7),
    "fp8-channel": (3, 131),
    "fp8-block": (131, 200),
    "int8-channel": (3, 19),
    "nvfp4": (3, 37),
    "mxfp8": (3, 77),
    "int4": (2, 192),
    "int4-awq": (2, 384),
    "mxfp4": (3, 96),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("encoding", "dialect"), CASES)
def test_tails(encoding: str, dialect: str, dtype: str) -> None:
    rows, columns = TAILS[encoding]
    for width in range(columns, columns + (20 if encoding == "nvfp4" else 1)):
        x = (normal((rows, width)) ** 3).to(DTYPES[dtype])
        unit = loadstone.quantize(x, encoding, dialect=dialect)
        expected = oracle.ENCODE[encoding](x.float().numpy(), dtype, dialect)
        check(unit, expected, f"{width} columns")
        back = torch.from_numpy(oracle.decode(expected, encoding, (rows, width)))
        assert torch.equal(unit.dequantize(torch.float32), back)


REFUSED = [
    ("int4", (3, 64), "128"),
    ("int4-awq", (3, 128), "128"),
    ("int4-awq", (2, 64), "128"),
    ("mxfp4", (2, 48), "32"),
    ("fp8-channel", (64,), "matrices"),
    ("int8-channel", (64,), "matrices"),
    ("fp8", (0, 4), "rows"),
    ("nvfp4", (), "rows"),
]


@pytest.mark.parametrize(("encoding", "shape", "word"), REFUSED)
def test_shapes_that_are_refused(encoding: str, shape: tuple[int, ...], word: str) -> None:
    with pytest.raises(loadstone.Error) as caught:
        loadstone.quantize(torch.ones(shape), encoding)
    assert caught.value.code == "plan.quantize"
    assert word in str(caught.value)
    assert str(list(shape)) in str(caught.value)


def test_what_is_no_weight_is_refused_by_name() -> None:
    for dtype in (torch.float64, torch.int32, torch.float8_e4m3fn):
        with pytest.raises(loadstone.Error) as caught:
            loadstone.quantize(torch.ones(4, 32).to(dtype), "nvfp4")
        assert caught.value.code == "plan.dtype"
        assert str(dtype) in str(caught.value)
    with pytest.raises(loadstone.Error) as caught:
        loadstone.quantize(normal(), "nvfp4", dialect="modelopt-export")
    assert caught.value.code == "plan.options"


def test_parts_are_checked() -> None:
    unit = loadstone.quantize(normal(), "nvfp4")

    def code(**changed: torch.Tensor | None) -> str:
        parts = {**unit.parts, **changed}
        given = {name: part for name, part in parts.items() if part is not None}
        with pytest.raises(loadstone.Error) as caught:
            loadstone.dequantize(given, "nvfp4", SHAPE, torch.float32)
        return caught.value.code

    parts = unit.parts
    assert code(scale_2=None) == "q.scale_missing"
    assert code(zero_point=parts["scale_2"]) == "q.scale_unused"
    assert code(data=parts["data"][:-1]) == "q.shape"
    assert code(scale=parts["scale"][:, :-1]) == "q.scale_shape"
    assert code(scale=parts["scale"].float()) == "q.dtype"
    assert code(scale_2=torch.tensor(math.nan)) == "q.nan"
    assert (
        code(
            scale=torch.full_like(parts["scale"].view(torch.uint8), 0x7F).view(parts["scale"].dtype)
        )
        == "q.nan"
    )
    assert code(data=parts["data"].to("meta")) == "audit.on_meta"
    back = loadstone.dequantize(parts, "NVFP4", SHAPE, torch.float32)
    assert torch.equal(back, unit.dequantize())  # control


def test_strides_do_not_matter() -> None:
    x = normal((256, 128)).t()
    for encoding in ENCODINGS:
        ours = loadstone.quantize(x, encoding).parts
        plain = loadstone.quantize(x.contiguous(), encoding).parts
        assert all(raw(ours[name]) == raw(plain[name]) for name in plain)
