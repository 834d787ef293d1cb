"""Finite values that a target's dtype cannot represent, on every path that changes the dtype.

Conversions and merges reject such values unless ``allow_non_finite`` is given; a load warns once.
The controls are the same files with a value that fits, and with values that were already infinite.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from command import output, run, verified
from overflow_models import LLAMA
from safetensors.torch import load_file, save_file

import loadstone
from loadstone._base.errors import new_error

F8 = torch.float8_e4m3fn
NAME = "x.weight"
# Source dtype, target dtype, a value that is too large for the target, and one that fits.
CASTS = [
    (torch.bfloat16, torch.float16, 70000.0, 65024.0),
    (torch.float32, torch.float16, 65520.0, 65519.0),
    (torch.float32, torch.bfloat16, 3.4e38, 3.38e38),
    (torch.float64, torch.float32, 1e39, 3e38),
    (torch.float64, torch.float16, 1e5, 6e4),
    (torch.float16, torch.float8_e5m2, 61440.0, 57344.0),
    (torch.bfloat16, F8, 1000.0, 448.0),
]
IDS = [f"{a}-{b}".replace("torch.", "") for a, b, _, _ in CASTS]
METADATA = {  # the same content as a file for --metadata
    "format": "loadstone-gguf-metadata",
    "version": 1,
    "entries": [{"key": "general.architecture", "type": "string", "value": "none"}],
}
Convert = Callable[[Path, Path, str, bool], Any]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def values(dtype: torch.dtype, *large: float) -> torch.Tensor:
    """Return a matrix with these values at known elements, and with infinities and a NaN."""
    numbers = torch.linspace(-2, 2, 64 * 64, dtype=torch.float64).reshape(64, 64)
    for i, each in enumerate(large):
        numbers[3 + i, 5] = -each if i % 2 else each
    made = numbers.to(dtype)
    if dtype not in (F8,):
        made[10, 0], made[11, 0], made[12, 0] = float("inf"), -float("inf"), float("nan")
    return made


def written(path: Path, **tensors: torch.Tensor) -> Path:
    save_file({name.replace("_", "."): each.clone() for name, each in tensors.items()}, path)
    return path


def python(source: Path, target: Path, dtype: str, allows: bool) -> Any:
    metadata = LLAMA if target.suffix == ".gguf" else None
    loadstone.convert(source, target, dtype=dtype, metadata=metadata, allow_non_finite=allows)


def folder(source: Path, target: Path, dtype: str, allows: bool) -> Any:
    loadstone.convert(source, target.parent / "out", dtype=dtype, allow_non_finite=allows)
    (target.parent / "out" / "model.safetensors").rename(target)


def command(source: Path, target: Path, dtype: str, allows: bool) -> Any:
    file = source.with_suffix(".json")
    file.write_text(json.dumps(METADATA))
    more = ["--metadata", file] if target.suffix == ".gguf" else []
    more += ["--allow-non-finite"] if allows else []
    done = run("convert", source, target, "--dtype", dtype, "--json", *more)
    if done.returncode == 0:
        return
    error = json.loads(done.stdout)["error"]
    assert done.returncode == (1 if error["code"] == "convert.overflow" else 3)
    raise new_error(error["code"], error["message"], tensor=error["tensor"])


def merge(source: Path, target: Path, dtype: str, allows: bool) -> Any:
    """Merge with a second model of zeros, which does not change the values."""
    tensors = {name: torch.zeros_like(each) for name, each in load_file(source).items()}
    save_file(tensors, other := source.with_name("zeros.safetensors"))
    metadata = LLAMA if target.suffix == ".gguf" else None
    loadstone.merge(
        [(source, 1.0), (other, 1.0)],
        target,
        dtype=dtype,
        metadata=metadata,
        allow_non_finite=allows,
    )


def read(path: Path) -> torch.Tensor:
    if path.suffix == ".safetensors":
        return load_file(path)[NAME]
    return loadstone.load_file(path)[NAME]


DOORS: dict[str, tuple[Convert, str]] = {
    "convert": (python, "o.safetensors"),
    "folder": (folder, "o.safetensors"),
    "gguf": (python, "o.gguf"),
    "command": (command, "o.safetensors"),
    "command gguf": (command, "o.gguf"),
}


def in_gguf(target: torch.dtype) -> bool:
    return target in (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("source", "target", "large", "small"), CASTS, ids=IDS)
def test_a_conversion_refuses_what_becomes_infinite(
    door: str,
    source: torch.dtype,
    target: torch.dtype,
    large: float,
    small: float,
    tmp_path: Path,
) -> None:
    convert, file = DOORS[door]
    if file.endswith(".gguf") and not in_gguf(target):
        pytest.skip("GGUF has no such dtype")
    tensor = values(source, large, large, small)
    path, out = written(tmp_path / "a.safetensors", x_weight=tensor), tmp_path / file
    with pytest.raises(loadstone.Error) as caught:
        convert(path, out, name_of(target), False)
    assert (caught.value.code, caught.value.tensor) == ("convert.overflow", NAME)
    largest = tensor[tensor.double().isfinite()].double().abs().max().item()
    assert f"2 of 4096 values are too large for {loaded_name(target)}" in str(caught.value)
    assert float(str(caught.value).split("the largest is ")[1].split(";")[0]) == largest
    assert not out.exists()
    convert(path, out, name_of(target), True)
    cast = tensor.to(target)
    assert same(read(out), cast)
    control = values(source, small)  # includes the values that were already infinite
    written(path, x_weight=control)
    convert(path, out, name_of(target), False)
    assert same(read(out), control.to(target))


def loaded_name(dtype: torch.dtype) -> str:
    names = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", F8: "F8_E4M3"}
    return names.get(dtype, "F8_E5M2")


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare values; any two NaNs are equal."""
    assert found.dtype == expected.dtype
    return torch.equal(
        found.double().nan_to_num(nan=7e77, posinf=8e88, neginf=-8e88),
        expected.double().nan_to_num(nan=7e77, posinf=8e88, neginf=-8e88),
    )


def quantized_file(path: Path, kind: str, scale: float) -> torch.Tensor:
    """Write quantized values up to 4 times the scale; return the decoded values as F32."""
    if kind == "fp8":
        codes = torch.linspace(-4, 4, 64 * 64).reshape(64, 64).to(F8)
        save_file({NAME: codes, f"{NAME}_scale": torch.tensor(scale)}, path)
        return codes.float() * scale
    blocks = gguf.quants.quantize(
        torch.linspace(-4 * scale, 4 * scale, 64 * 64).reshape(64, 64).numpy(),
        gguf.GGMLQuantizationType.Q8_0,
    )
    writer = gguf.GGUFWriter(path, "none")
    writer.add_tensor(NAME, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0).copy())


@pytest.mark.parametrize("kind", ["fp8", "q8_0"])
@pytest.mark.parametrize("file", ["o.safetensors", "o.gguf"])
def test_decoded_numbers_are_counted(kind: str, file: str, tmp_path: Path) -> None:
    """Decoders round the values themselves; no cast follows."""
    path = tmp_path / ("a.gguf" if kind == "q8_0" else "a.safetensors")
    options: dict[str, Any] = {"dtype": "float16", "dequantize": True}
    if file.endswith(".gguf"):
        options["metadata"] = LLAMA
    numbers = quantized_file(path, kind, 30000.0)
    count = int((numbers.half().isinf()).sum())
    assert count > 0
    with pytest.raises(loadstone.Error, match=f"{count} of 4096 values are too large") as caught:
        loadstone.convert(path, tmp_path / file, **options)
    assert (caught.value.code, caught.value.tensor) == ("convert.overflow", NAME)
    loadstone.convert(path, tmp_path / file, **options, allow_non_finite=True)
    assert torch.equal(read(tmp_path / file), numbers.half())
    numbers = quantized_file(path, kind, 3.0)
    loadstone.convert(path, tmp_path / file, **options)
    assert torch.equal(read(tmp_path / file), numbers.half())


def spoiled_file(path: Path, kind: str, scale: float) -> int:
    """Write codes, some of which have the given scale; return the number of those codes."""
    codes = torch.ones(64, 64)
    match kind:
        case "fp8":
            stored = {NAME: codes.to(F8), f"{NAME}_scale": torch.full((64, 1), 2.0)}
            stored[f"{NAME}_scale"][3] = scale
        case "int8":
            stored = {NAME: codes.to(torch.int8), f"{NAME}_scale": torch.full((64, 1), 2.0)}
            stored[f"{NAME}_scale"][3] = scale
        case "fp8-block":
            codes = torch.ones(256, 128)
            stored = {NAME: codes.to(F8), f"{NAME}_scale_inv": torch.full((2, 1), 2.0)}
            stored[f"{NAME}_scale_inv"][1] = scale
            save_file(stored, path)
            return 128 * 128
        case "nvfp4":
            stored = {
                NAME: torch.full((64, 32), 0x22, dtype=torch.uint8),
                f"{NAME}_scale": torch.ones(64, 4).to(F8),
                f"{NAME}_scale_2": torch.tensor(scale),
            }
            save_file(stored, path)
            return 64 * 64
        case _:
            raise KeyError(kind)
    save_file(stored, path)
    return 64


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("scale", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("kind", ["fp8", "int8", "fp8-block", "nvfp4"])
def test_a_scale_that_is_not_finite_spoils_its_codes(
    kind: str, scale: float, dtype: str, tmp_path: Path
) -> None:
    path, out = tmp_path / "a.safetensors", tmp_path / "o.safetensors"
    count = spoiled_file(path, kind, scale)
    options: dict[str, Any] = {"dtype": dtype, "dequantize": True}
    sentence = f"{count} of [0-9]+ values are NaN or infinite because of a scale"
    with pytest.raises(loadstone.Error, match=sentence) as caught:
        loadstone.convert(path, out, **options)
    assert (caught.value.code, caught.value.tensor) == ("convert.overflow", NAME)
    assert not out.exists()
    report = loadstone.convert(path, out, **options, allow_non_finite=True)
    assert [each.code for each in report.findings] == ["convert.overflow"]
    assert int((~read(out).isfinite()).sum()) == count
    shape = read(out).shape
    model = torch.nn.ModuleDict({"x": torch.nn.Linear(shape[1], shape[0], False)})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = loadstone.load(model, path).findings
    assert [each.code for each in found] == ["convert.overflow"] and len(told) == 1
    # Controls: a finite scale, and a code that is NaN itself.
    spoiled_file(path, kind, 2.0)
    loadstone.convert(path, out, **options)
    assert read(out).isfinite().all()
    if kind.startswith("fp8"):
        stored = load_file(path)
        stored[NAME].view(torch.uint8)[0, 0] = 0x7F
        save_file(stored, path)
        loadstone.convert(path, out, **options)
        assert int(read(out).isnan().sum()) == 1


@pytest.mark.parametrize("quantize", ["f16", {"x": "f16", "": "q8_0"}, {"x": "none", "": "q8_0"}])
def test_types_of_gguf(quantize: Any, tmp_path: Path) -> None:
    path, out = tmp_path / "a.safetensors", tmp_path / "o.gguf"
    options: dict[str, Any] = {"quantize": quantize, "metadata": LLAMA, "dtype": "float16"}
    options["include"] = ["y"] if isinstance(quantize, dict) else ["x"]
    other = torch.randn(64, 64, dtype=torch.bfloat16)
    written(path, x_weight=values(torch.bfloat16, 70000.0), y_weight=other)
    if quantize == "f16":
        del options["dtype"]
    with pytest.raises(loadstone.Error, match="1 of 4096 values is too large for F16") as caught:
        loadstone.convert(path, out, **options)
    assert (caught.value.code, caught.value.tensor) == ("convert.overflow", NAME)
    written(path, x_weight=values(torch.bfloat16, 7000.0), y_weight=other)
    loadstone.convert(path, out, **options)
    assert read(out).dtype == torch.float16


@pytest.mark.parametrize("file", ["o.safetensors", "o.gguf"])
def test_a_merge_follows_the_rule(file: str, tmp_path: Path) -> None:
    path, out = tmp_path / "a.safetensors", tmp_path / file
    finite = values(torch.bfloat16, 70000.0).nan_to_num(nan=0, posinf=0, neginf=0)
    written(path, x_weight=finite)
    with pytest.raises(loadstone.Error, match="1 of 4096 values is too large for F16") as caught:
        merge(path, out, "float16", False)
    assert (caught.value.code, caught.value.tensor) == ("convert.overflow", NAME)
    assert not out.exists()
    merge(path, out, "float16", True)
    assert torch.equal(read(out), finite.half())
    merge(path, out, "bfloat16", False)  # control
    assert torch.equal(read(out), finite)


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype, transposes: bool = False) -> None:
        super().__init__()
        self.x = torch.nn.Linear(64, 64, bias=False, dtype=dtype)
        self.y = torch.nn.Linear(64, 64, bias=False, dtype=dtype)


def skeleton(dtype: torch.dtype) -> Model:
    with loadstone.skeleton():
        return Model(dtype)


def loads(source: Path, dtype: torch.dtype, **options: Any) -> tuple[Model, list[str], list[str]]:
    """Return the model, the targets of the findings, and the warnings."""
    model = skeleton(dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = loadstone.load(model, source, **options)
    found = [each.target for each in report.findings if each.code == "convert.overflow"]
    return model, found, [str(each.message) for each in caught]


RULES = [
    {
        "op": "transpose",
        "sources": ["(.)\\.weight"],
        "targets": ["$1.weight"],
        "dims": [0, 1],
    }
]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(("source", "target", "large", "small"), CASTS, ids=IDS)
def test_a_load_warns_once(
    source: torch.dtype,
    target: torch.dtype,
    large: float,
    small: float,
    threads: int,
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"x.weight": values(source, large), "y.weight": values(source, large, large)}
    save_file(tensors, path)
    model, found, told = loads(path, target, threads=threads)
    assert found == ["x.weight", "y.weight"] and len(told) == 1
    assert f"'x.weight': 1 of 4096 values is too large for {loaded_name(target)}" in told[0]
    assert "1 more tensor" in told[0]
    for name, tensor in tensors.items():
        assert same(model.get_parameter(name).data, tensor.to(target))
    save_file({name: values(source, small) for name in tensors}, path)
    assert loads(path, target, threads=threads)[1:] == ([], [])


def test_a_load_that_transposes_and_one_that_decodes(tmp_path: Path) -> None:
    path, stored = tmp_path / "a.safetensors", tmp_path / "q.safetensors"
    tensor = values(torch.float32, 1e5)
    written(path, x_weight=tensor, y_weight=tensor.T.contiguous())
    _, found, told = loads(path, torch.float16, rules=RULES)
    assert found == ["x.weight", "y.weight"] and len(told) == 1
    numbers = quantized_file(stored, "fp8", 30000.0)
    save_file(load_file(stored) | {"y.weight": torch.zeros(64, 64)}, stored)
    model, found, told = loads(stored, torch.float16)
    assert found == ["x.weight"] and len(told) == 1
    assert torch.equal(model.x.weight.data, numbers.half())
    quantized_file(stored, "fp8", 3.0)
    save_file(load_file(stored) | {"y.weight": torch.zeros(64, 64)}, stored)
    assert loads(stored, torch.float16)[1:] == ([], [])


def test_a_warning_that_is_an_error_leaves_the_model_alone(tmp_path: Path) -> None:
    tensor = values(torch.bfloat16, 70000.0)
    path = written(tmp_path / "a.safetensors", x_weight=tensor, y_weight=tensor)
    model = skeleton(torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="too large for F16"):
            loadstone.load(model, path)
    assert model.x.weight.is_meta


def test_saved_plans_and_the_command(tmp_path: Path) -> None:
    path, plan = tmp_path / "a.safetensors", tmp_path / "plan.json"
    for large, status in ((70000.0, 3), (60000.0, 0)):
        tensor = values(torch.bfloat16, large)
        written(path, x_weight=tensor, y_weight=tensor)
        loadstone.plan(skeleton(torch.float16), path).save(plan)
        for how in ([path, "--dtype", "f16"], ["--plan", plan]):
            told = output("load", *how)
            assert ("1 of 4096 values is too large for F16" in told) == (status == 3)
            output("load", *how, "--strict", status=status)


def test_an_adapter_in_a_load_is_refused(tmp_path: Path) -> None:
    """A load that merges adapters rejects overflow, because it computes new values."""
    path = written(
        tmp_path / "a.safetensors",
        x_weight=torch.full((64, 64), 6e4).half(),
        y_weight=torch.zeros(64, 64).half(),
    )
    (tmp_path / "lora").mkdir()
    ones = {"x.lora_up.weight": torch.ones(64, 1), "x.lora_down.weight": torch.ones(1, 64) * 1e4}
    save_file(ones, tmp_path / "lora" / "a.safetensors")
    with pytest.raises(loadstone.Error, match="4096 of 4096 values are too large") as caught:
        loads(path, torch.float16, lora=tmp_path / "lora")
    assert (caught.value.code, caught.value.tensor) == ("convert.overflow", NAME)
    model, found, told = loads(path, torch.float16, lora=tmp_path / "lora", allow_non_finite=True)
    assert found == [NAME] and len(told) == 1 and bool(model.x.weight.isinf().all())
    assert loads(path, torch.float32, lora=tmp_path / "lora")[1:] == ([], [])


@pytest.mark.parametrize("shards", [None, 4096])
def test_a_conversion_in_shards_stops_at_the_tensor(shards: int | None, tmp_path: Path) -> None:
    tensors = {f"{i}.weight": torch.randn(64, 64) for i in range(8)}
    tensors["5.weight"] = values(torch.float32, 1e5)
    save_file(tensors, tmp_path / "a.safetensors")
    for resume in (False, True):
        with pytest.raises(loadstone.Error) as caught:
            loadstone.convert(
                tmp_path / "a.safetensors",
                tmp_path / "out",
                dtype="float16",
                shard_size=shards,
                resume=resume,
            )
        assert (caught.value.code, caught.value.tensor) == ("convert.overflow", "5.weight")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("source", "target", "large", "small"), CASTS, ids=IDS)
def test_verify_compares_across_dtypes(
    source: torch.dtype, target: torch.dtype, large: float, small: float, tmp_path: Path
) -> None:
    """verify accepts values that are equal after rounding, but not changed or overflowed values."""
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    tensor = values(source, small)
    written(first, x_weight=tensor)
    written(second, x_weight=tensor.to(target))
    status, report = verified(first, second)
    assert (status, report["differences"]) == (0, [])
    assert [each["name"] for each in report["rounded"]] == [NAME]
    changed = tensor.to(target)
    changed[20, 20] = 3.0
    written(second, x_weight=changed)
    status, report = verified(first, second)
    assert (status, report["differences"][0]["kind"]) == (1, "values")
    assert f"first at element {20 * 64 + 20}" in report["differences"][0]["found"]
    assert report["rounded"] == []
    tensor = values(source, large)
    written(first, x_weight=tensor)
    written(second, x_weight=tensor.to(target))
    status, report = verified(first, second)
    assert (status, report["differences"][0]["kind"]) == (1, "values")
    assert "1 of the values is too large" in report["differences"][0]["found"]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0])
def test_only_delivered_values_are_counted(kind: Any, dim: int, tmp_path: Path) -> None:
    """Ignore decoded values that a slice drops or that a split gives to a different target."""
    large = torch.linspace(1, 2, 64 * 64).reshape(64, 64)
    large.narrow(dim, 32, 32).mul_(1e5)
    file = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(file, "none")
    writer.add_tensor("x", gguf.quants.quantize(large.numpy(), kind), raw_dtype=kind)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    exact = loadstone.open(file, dtype="float32")["x"][:]
    counts = [int((part.abs() > 65519).sum()) for part in exact.split(32, dim)]
    assert counts[0] == 0 and counts[1] > 0
    model = torch.nn.Module()
    shape = (32, 64) if dim == 0 else (64, 32)
    for name in ("a", "b"):
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(shape).half()))
    rule = {"op": "split", "sources": ["x"], "targets": ["a", "b"], "dim": dim, "sizes": [32, 32]}
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        report = loadstone.load(model, file, rules=[rule])
    found = {f.target: f.message for f in report.findings if f.code == "convert.overflow"}
    assert found.keys() == {"b"}
    assert f"{counts[1]} of 2048 values" in found["b"]
    assert int(model.b.isinf().sum()) == counts[1] and not model.a.isinf().any()


def test_the_command_load_warns_once(tmp_path: Path) -> None:
    file = written(tmp_path / "x.safetensors", x=torch.tensor([70000.0, 1.0]))
    done = run("load", file, "--dtype", "f16")
    assert done.returncode == 0
    assert (done.stdout + done.stderr).count("too large for F16") == 1
