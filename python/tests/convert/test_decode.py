"""Kernels that decode quantized weights, against transformers' own functions, bit for bit.

The weights contain all byte values; the scales contain every exponent, zero and subnormals; the
grids are all ways to divide a matrix into blocks that the format allows. Loads that decode are also
compared with the whole chain of operations in torch.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

import loadstone
from loadstone import _core

NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
}
OUTPUTS = [torch.float32, torch.bfloat16, torch.float16]
# Shapes of weights and scales: blocks of one element to the whole weight, shared scales, scalars.
GRIDS = [
    ((16, 96), (1, 1)),
    ((16, 96), (16, 96)),
    ((16, 96), (4, 3)),
    ((16, 96), (1, 3)),
    ((16, 96), (16, 3)),
    ((256, 384), (2, 3)),
    ((7, 3000), (7, 2)),
    ((3, 8, 32), (3, 2, 4)),
    ((2, 3, 8, 32), (2, 3, 8, 1)),
    ((3, 8, 32), (2, 4)),
    ((16, 96), ()),
    ((16, 96), (1,)),
    ((3, 8, 32), (3,)),
]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, which compare as equal even for NaN."""
    return tensor.contiguous().flatten().view(torch.uint8)


def random_bytes(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return all byte values in a random order, each about equally often."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    values = torch.arange(count).remainder(256)[torch.randperm(count, generator=generator)]
    return values.to(torch.uint8).reshape(shape)


def random_scales(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)
    scales = torch.randn(shape, generator=generator)
    scales = scales * torch.randint(-140, 120, shape, generator=generator).float().exp2()
    flat = scales.flatten()
    flat[::5] = flat[::5].sign() * 2.0**-20  # most other scales exceed the range of F16
    if flat.numel() > 4:
        flat[3] = 0.0
    return scales.to(dtype)


def decoded(kernel, parts, shape, dtype) -> torch.Tensor:
    rows = [(raw(part), NAMES[part.dtype], tuple(part.shape)) for part in parts]
    result = _core.decode(kernel, rows, shape, NAMES[dtype])
    return torch.frombuffer(bytearray(result), dtype=dtype).reshape(shape)


def wanted(weights, scales, dtype) -> torch.Tensor:
    return Fp8Dequantize(None)._dequantize_one(weights, scales, output_dtype=dtype)


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize(
    "scale", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8]
)
@pytest.mark.parametrize("weight", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_blocks(weight, scale, dtype):
    for seed, (shape, grid) in enumerate(GRIDS):
        weights = random_bytes(shape, seed).view(weight)
        scales = random_scales(grid, scale, seed)
        found = decoded("fp8_block", [weights, scales], shape, dtype)
        expected = wanted(weights, scales, dtype)
        assert found.shape == expected.shape
        assert torch.equal(bits(found), bits(expected)), (shape, grid)


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize("scale", [torch.float32, torch.float8_e8m0fnu, torch.uint8])
def test_fp4_blocks(scale, dtype):
    for seed, (shape, grid) in enumerate(GRIDS):
        packed = random_bytes((*shape[:-1], shape[-1] // 2), seed).view(torch.int8)
        scales = random_scales(grid, scale, seed)
        found = decoded("fp4_block", [packed, scales], shape, dtype)
        assert torch.equal(bits(found), bits(wanted(packed, scales, dtype))), (shape, grid)


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize("shape", [(3, 5, 4), (1, 16, 16), (2, 7, 1)])
def test_mxfp4(shape, dtype):
    experts, rows, groups = shape
    blocks = random_bytes((*shape, 16), 1)
    scales = random_bytes(shape, 2)
    found = decoded("mxfp4", [blocks, scales], (experts, rows, groups * 32), dtype)
    expected = _convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(bits(found.transpose(1, 2)), bits(expected))


def test_every_scale_of_mxfp4():
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(256, 1, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None, None].repeat(1, 1, 16)
    for dtype in OUTPUTS:
        found = decoded("mxfp4", [blocks, scales], (256, 1, 512), dtype)
        expected = _convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert torch.equal(bits(found.transpose(1, 2)), bits(expected)), dtype


def test_the_comparison_sees_another_block_size():
    weights = random_bytes((16, 96), 0).view(torch.float8_e4m3fn)
    scales = random_scales((4, 4), torch.float32, 0)
    found = decoded("fp8_block", [weights, scales], (16, 96), torch.float32)
    other = wanted(weights, scales.reshape(2, 8), torch.float32)
    assert not torch.equal(bits(found), bits(other))


@pytest.mark.parametrize(
    ("kernel", "weight", "scale", "shape"),
    [
        ("fp8", ("F8_E4M3", (4, 4)), ("F32", (1, 1)), (4, 4)),
        ("fp8_block", ("F8_E4M3", (4, 4)), ("F32", (3, 1)), (4, 4)),
        ("fp8_block", ("F8_E4M3", (4, 4)), ("F32", (8, 1)), (4, 4)),
        ("fp8_block", ("F8_E4M3", (4, 4)), ("F32", (0, 1)), (4, 4)),
        ("fp8_block", ("F8_E4M3", (3, 4, 4)), ("F32", (2, 1, 1)), (3, 4, 4)),
        ("fp8_block", ("F8_E4M3", (4, 4)), ("I32", (1, 1)), (4, 4)),
        ("fp8_block", ("I8", (4, 4)), ("F32", (1, 1)), (4, 4)),
        ("fp8_block", ("F8_E4M3", (4, 4)), ("F32", (1, 1)), (4, 8)),
        ("fp8_block", ("F8_E4M3", (16,)), ("F32", (1, 1)), (16,)),
        ("fp4_block", ("I8", (4, 4)), ("F32", (1, 1)), (4, 4)),
        ("mxfp4", ("U8", (4, 4, 16)), ("U8", (4, 3)), (4, 128)),
        ("mxfp4", ("U8", (4, 4, 8)), ("U8", (4, 4)), (4, 64)),
        ("mxfp4", ("U8", (4, 4, 16)), ("F8_E8M0", (4, 4)), (4, 128)),
    ],
)
def test_what_does_not_fit_is_refused(kernel, weight, scale, shape):
    rows = []
    for name, extents in (weight, scale):
        dtype = next(
            dtype for dtype, known in [*NAMES.items(), (torch.int32, "I32")] if known == name
        )
        rows.append(
            (
                raw(torch.zeros(extents, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)),
                name,
                extents,
            )
        )
    with pytest.raises(loadstone.Error) as caught:
        _core.decode(kernel, rows, shape, "F32")
    assert caught.value.code == "plan.recipe"
    assert caught.value.found


class Experts(torch.nn.Module):
    """Parameters as in fused models: stacked, transposed and plain ones, and gates next to ups."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.empty(4, 512, 256, dtype=torch.bfloat16))
        self.down = torch.nn.Parameter(torch.empty(4, 256, 128))
        self.turned = torch.nn.Parameter(torch.empty(128, 384, dtype=torch.float16))
        self.packed = torch.nn.Parameter(torch.empty(2, 320, 48, dtype=torch.bfloat16))
        self.plain = torch.nn.Parameter(torch.empty(33, 7))


def quantized_state() -> dict[str, torch.Tensor]:
    state = {}
    for expert in range(4):
        for name, shape in (("gate", (256, 256)), ("up", (256, 256)), ("down", (256, 128))):
            generator = torch.Generator().manual_seed(expert)
            weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
            state[f"e.{expert}.{name}.weight"] = weight
            grid = (shape[0] // 128, shape[1] // 128)
            state[f"e.{expert}.{name}.scale"] = torch.rand(grid, generator=generator)
    state["turned.weight"] = torch.randn(384, 128).to(torch.float8_e5m2)
    state["turned.scale"] = torch.rand(3, 1)
    state["packed_blocks"] = random_bytes((2, 48, 10, 16), 5)
    state["packed_scales"] = torch.randint(110, 140, (2, 48, 10), dtype=torch.uint8)
    state["plain"] = torch.randn(33, 7)
    return state


def build(builder: _core.RecipeBuilder) -> None:
    def pair(name: str, shape: tuple[int, ...], dtype: str) -> int:
        sources = [builder.source(f"{name}.weight"), builder.source(f"{name}.scale")]
        return builder.decode("fp8_block", sources, shape, dtype)

    gates = builder.stack([pair(f"e.{i}.gate", (256, 256), "BF16") for i in range(4)], 0)
    ups = builder.stack([pair(f"e.{i}.up", (256, 256), "BF16") for i in range(4)], 0)
    builder.add("gate_up", builder.concat([gates, ups], 1))
    # Decoded to BF16, then widened to F32.
    builder.add(
        "down", builder.stack([pair(f"e.{i}.down", (256, 128), "BF16") for i in range(4)], 0)
    )
    builder.add("turned", builder.transpose(pair("turned", (384, 128), "F16"), 0, 1))
    packed = [builder.source("packed_blocks"), builder.source("packed_scales")]
    made = builder.decode("mxfp4", packed, (2, 48, 320), "BF16")
    builder.add("packed", builder.transpose(made, 1, 2))


def quantized_result(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    def pair(name: str, dtype: torch.dtype) -> torch.Tensor:
        return wanted(state[f"{name}.weight"], state[f"{name}.scale"], dtype)

    half = torch.bfloat16
    gates = torch.stack([pair(f"e.{i}.gate", half) for i in range(4)])
    ups = torch.stack([pair(f"e.{i}.up", half) for i in range(4)])
    return {
        "gate_up": torch.cat([gates, ups], 1),
        "down": torch.stack([pair(f"e.{i}.down", half) for i in range(4)]).float(),
        "turned": pair("turned", torch.float16).T.contiguous(),
        "packed": _convert_moe_packed_tensors(
            state["packed_blocks"], state["packed_scales"], dtype=half
        ),
        "plain": state["plain"],
    }


def planned(path, staging: int = 64 << 20) -> _core.Plan:
    catalog = _core.open_checkpoint([str(path)])
    builder = _core.RecipeBuilder(catalog)
    build(builder)
    recipes = builder.finish()
    recipes = _core.Recipes.from_json(catalog, recipes.to_json(catalog))
    targets = [
        _core.Target(name, tensor.shape, NAMES[tensor.dtype])
        for name, tensor in Experts().state_dict().items()
    ]
    return _core.make_plan(
        catalog,
        targets,
        True,
        missing="error",
        unexpected="error",
        staging_bytes_max=staging,
        recipes=recipes,
    )


def loaded(plan: _core.Plan, threads: int = 0) -> tuple[dict[str, torch.Tensor], _core.Report]:
    tensors = {
        name: torch.empty_like(tensor).fill_(7.0) for name, tensor in Experts().state_dict().items()
    }
    rows = [(t.data_ptr(), t.nbytes, NAMES[t.dtype]) for t in tensors.values()]
    return tensors, _core.execute(plan, rows, threads)


@pytest.mark.parametrize("staging", [1, 1000, 1 << 20, 64 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_loads_are_what_transformers_makes(tmp_path, staging, threads):
    state = quantized_state()
    save_file(state, tmp_path / "model.safetensors")
    plan = planned(tmp_path / "model.safetensors", staging)
    assert plan.ok and [finding.code for finding in plan.findings] == ["plan.cast"]
    tensors, report = loaded(plan, threads)
    for name, tensor in quantized_result(state).items():
        assert torch.equal(bits(tensors[name]), bits(tensor)), name
    assert plan.bytes_to_read == sum(tensor.nbytes for tensor in state.values())
    # The staging has room for at least two elements, each decoded from 16 bytes.
    assert report.numbers()["staging_bytes_peak"] <= max(staging, 32)
    _core.require_delivered(plan, report)
    rows = (report.provenance(index) for index in range(len(report)))
    row = next(row for row in rows if row[0] == "turned")
    assert [source[0] for source in row[4]] == ["turned.weight", "turned.scale"]


def test_a_saved_plan_decodes_too(tmp_path):
    state = quantized_state()
    save_file(state, tmp_path / "model.safetensors")
    plan = planned(tmp_path / "model.safetensors")
    again = _core.plan_from_json(plan.to_json())
    assert again.to_json() == plan.to_json()
    assert "fp8_block" in again.to_table() and "mxfp4" in again.to_html("", [], {}, None)
    tensors, _ = loaded(again)
    for name, tensor in quantized_result(state).items():
        assert torch.equal(bits(tensors[name]), bits(tensor)), name
    document = json.loads(plan.to_json())
    document["decodings"][0]["kernel"] = "fp9_block"
    with pytest.raises(loadstone.PlanError) as caught:
        _core.plan_from_json(json.dumps(document))
    assert caught.value.code == "plan.json"
