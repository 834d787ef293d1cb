"""Tests the trace of a converter: its files, keys and errors, and side effects on the process.

The tests use a small converter (``llama_cpp_converter``) with the functions of llama.cpp that
loadstone hooks; ``test_llama_cpp_models.py`` tests llama.cpp's own converter.
"""

from __future__ import annotations

import importlib
import json
import math
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import llama_cpp_oracle as oracle
import psutil
import pytest
import torch
from safetensors.torch import save_file

import loadstone
from loadstone import llama_cpp
from loadstone._adapters.llama_cpp import metadata
from loadstone._adapters.llama_cpp.converter import Converter, converter_at, installed_converter
from loadstone._adapters.sites.llama_cpp import ConverterSites

CONVERTER = Path(__file__).parents[2] / "support" / "llama_cpp_converter"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a model folder for one of the small converter's classes."""

    def written(architecture: str, **tensors: torch.Tensor) -> Path:
        folder = tmp_path / architecture
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        torch.manual_seed(0)
        tensors = tensors or {
            "expert0": torch.randn(3, 5, dtype=torch.bfloat16),
            "expert1": torch.randn(3, 5, dtype=torch.bfloat16),
            "norm": torch.randn(5, dtype=torch.bfloat16),
            "w": torch.randn(4, 5),
        }
        save_file(tensors, folder / "model.safetensors")
        return folder

    return written


@pytest.fixture
def stack(make: Callable[..., Path]) -> Path:
    return make("Stack")


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", None])
def test_a_file_is_the_converters_own(stack: Path, tmp_path: Path, dtype: str | None) -> None:
    traced = llama_cpp.trace(stack, converter=CONVERTER, dtype=dtype)
    path = oracle.written(converter_at(CONVERTER), stack, tmp_path / "own.gguf", dtype)
    reader = oracle.read(path)
    oracle.require_same_keys(traced, reader)
    oracle.require_same_tensors(traced, reader, tmp_path / "traced.safetensors")
    assert traced.architecture == "Stack"


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def sparse(folder: Path, architecture: str, shape: tuple[int, int], names: list[str]) -> Path:
    """Write a model folder whose file has a header, but a hole as its data."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    size = shape[0] * shape[1] * 4
    header: dict[str, Any] = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + len(names) * size)
    return folder


def test_no_weights_are_read(tmp_path: Path) -> None:
    """A trace brings none of the 4 GB into memory; as a control, a traced sum does read data."""
    names = ["expert0", "expert1", "w0", "w1"]
    model = sparse(tmp_path / "large", "Stack", (1 << 14, 1 << 14), names)
    # A first trace, so that the counts below exclude imports.
    llama_cpp.trace(model, converter=CONVERTER)
    process = psutil.Process()
    read, memory = bytes_read(), process.memory_info().rss
    llama_cpp.trace(model, converter=CONVERTER)
    assert bytes_read() - read < 1 << 20
    assert process.memory_info().rss - memory < 64 << 20
    small = sparse(tmp_path / "small", "Sums", (1 << 10, 1 << 10), ["norm"])
    read = bytes_read()
    llama_cpp.trace(small, converter=CONVERTER, computed_bytes_max=4 << 20)
    assert bytes_read() - read > 4 << 20


def test_both_files_are_saved(stack: Path, tmp_path: Path) -> None:
    paths = llama_cpp.save_recipes(stack, tmp_path / "toy", converter=CONVERTER, dtype="bfloat16")
    assert [path.name for path in paths] == ["toy.recipes.json", "toy.metadata.json"]
    report = loadstone.convert(stack, tmp_path / "x.safetensors", rules=paths[0], dry_run=True)
    assert report.bytes_written > 0
    assert "experts.weight" in paths[0].read_text()
    document = json.loads(paths[1].read_text(encoding="utf-8"))
    assert document == {
        "format": "loadstone-gguf-metadata",
        "version": 1,
        "entries": [
            {"key": "general.architecture", "type": "string", "value": "toy"},
            {"key": "general.file_type", "type": "u32", "value": 32},
            {"key": "toy.runs", "type": "u32", "value": 1},
            {"key": "toy.eps", "type": "f32", "value": 9.999999747378752e-06},
            {
                "key": "tokenizer.ggml.tokens",
                "type": "array",
                "items": "string",
                "value": ["a", "\u2581b", "<0x0A>"],
            },
            {
                "key": "tokenizer.ggml.scores",
                "type": "array",
                "items": "f32",
                "value": [0.0, -1.5, "-inf"],
            },
        ],
    }


# --- arithmetic -----------------------------------------------------------------------------------


def test_arithmetic_is_refused_by_name(make: Callable[..., Path]) -> None:
    with pytest.raises(loadstone.PlanError, match=r"Sums: .*modify_tensors.* add on 'norm'") as it:
        llama_cpp.trace(make("Sums"), converter=CONVERTER)
    assert it.value.code == "plan.untraceable"
    assert it.value.tensor == "norm"


def test_small_tensors_are_computed_where_that_is_allowed(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    model = make("Sums")
    traced = llama_cpp.trace(model, converter=CONVERTER, dtype="BF16", computed_bytes_max=10)
    reader = oracle.read(
        oracle.written(converter_at(CONVERTER), model, tmp_path / "own.gguf", "BF16")
    )
    oracle.require_same_tensors(traced, reader, tmp_path / "traced.safetensors")
    with pytest.raises(loadstone.PlanError, match="norm"):
        llama_cpp.trace(model, converter=CONVERTER, computed_bytes_max=9)


def test_all_tensors_that_are_computed_share_one_limit(make: Callable[..., Path]) -> None:
    norms = {name: torch.randn(5, dtype=torch.bfloat16) for name in ("norm0", "norm1")}
    model = make("Sums", **norms)
    llama_cpp.trace(model, converter=CONVERTER, computed_bytes_max=20)
    with pytest.raises(loadstone.PlanError, match="norm1"):
        llama_cpp.trace(model, converter=CONVERTER, computed_bytes_max=19)


# --- the converter --------------------------------------------------------------------------------


def base_of(entered: Converter) -> Any:
    return entered.module("conversion.base").ModelBase


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Converter], None]], None]:
    """Change the converter's modules on import, before loadstone checks them."""
    own = Converter._check

    def change(by: Callable[[Converter], None]) -> None:
        def check(entered: Converter) -> None:
            by(entered)
            own(entered)

        monkeypatch.setattr(Converter, "_check", check)

    return change


def test_without_a_converter_one_error_says_how_to_get_it(
    stack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for given in (None, tmp_path):
        with pytest.raises(loadstone.Error, match="pip download --no-deps --no-binary") as caught:
            llama_cpp.trace(stack, converter=given)
        assert caught.value.code == "plan.options"
        assert caught.value.field == "converter"
        assert "conversion/base.py" in str(caught.value)
    assert llama_cpp.trace(stack, converter=CONVERTER).recipes  # follows the message's advice


def test_a_package_that_it_lacks_is_named(
    stack: Path, changed: Callable[[Callable[[Converter], None]], None]
) -> None:
    def load_hparams(dir_model: Path, is_mistral_format: bool) -> Any:
        return importlib.import_module("torch.from_nowhere")

    changed(lambda entered: setattr(base_of(entered), "load_hparams", load_hparams))
    with pytest.raises(loadstone.Error, match=r"needs the package 'torch\.from_nowhere'") as caught:
        llama_cpp.trace(stack, converter=CONVERTER)
    assert "pip install torch" in str(caught.value)


def test_the_folder_of_a_source_package_will_do(tmp_path: Path) -> None:
    vendor = tmp_path / "vendor"
    vendor.mkdir()
    (vendor / "llama.cpp").symlink_to(CONVERTER)
    assert converter_at(tmp_path).folder == vendor / "llama.cpp"


def test_it_is_found_in_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(CONVERTER)])
    found = installed_converter()
    assert found is not None
    assert found.folder == CONVERTER


def test_the_process_keeps_its_own_modules(stack: Path) -> None:
    before = list(sys.path)
    assert sys.modules["gguf"] is gguf
    traced = llama_cpp.trace(stack, converter=CONVERTER)
    assert traced.metadata
    assert sys.modules["gguf"] is gguf
    assert sys.path == before
    assert "conversion" not in sys.modules
    with converter_at(CONVERTER).entered():
        assert sys.modules["gguf"] is not gguf


def test_a_model_leaves_nothing_to_the_next(stack: Path) -> None:
    """The converter's classes keep state, such as the number of runs."""
    first, second = (llama_cpp.trace(stack, converter=CONVERTER) for _ in range(2))
    assert first.metadata == second.metadata
    assert first.recipes_json() == second.recipes_json()


def sites() -> list[Any]:
    return list(ConverterSites("1", "folder").table)


def owner_of(entered: Converter, site: Any) -> tuple[Any, str]:
    owner: Any = entered.module(site.module)
    *path, name = site.path.split(".")
    for each in path:
        owner = getattr(owner, each)
    return owner, name


@pytest.mark.parametrize("site", sites(), ids=str)
def test_without_a_place_it_is_not_entered(
    site: Any, stack: Path, changed: Callable[[Callable[[Converter], None]], None]
) -> None:
    def take_away(entered: Converter) -> None:
        owner, name = owner_of(entered, site)
        delattr(owner if name in vars(owner) else owner.__mro__[1], name)

    if site.path.startswith(("LlamaFileType", "ModelType")):
        pytest.skip("the names of an enumeration cannot be taken away")
    changed(take_away)
    with pytest.raises(loadstone.Error, match=r"unsupported version of llama\.cpp") as caught:
        llama_cpp.trace(stack, converter=CONVERTER)
    assert caught.value.code == "plan.options"
    assert str(site) in str(caught.value)
    assert str(CONVERTER) in str(caught.value)


def test_another_release_is_refused_and_the_advice_works(
    stack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both suggestions work: the release's own script, and a supported release."""
    other = tmp_path / "other"
    shutil.copytree(CONVERTER, other)
    base = other / "conversion" / "base.py"
    base.write_text(base.read_text().replace("from_local_tensor", "from_a_local_tensor"))
    with pytest.raises(loadstone.Error, match="with the library's own script"):
        llama_cpp.trace(stack, converter=other)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(Converter, "_check", lambda _: None)
        path = oracle.written(converter_at(other), stack, tmp_path / "own.gguf", None)
    shutil.copytree(CONVERTER, other, dirs_exist_ok=True)
    traced = llama_cpp.trace(stack, converter=other)
    oracle.require_same_tensors(traced, oracle.read(path), tmp_path / "traced.safetensors")


def test_the_rows_hold_for_the_release_at_hand() -> None:
    with converter_at(CONVERTER).entered():
        assert ConverterSites("1", "folder").lacking() == ()


# --- rejected before anything runs ----------------------------------------------------------------


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    for config in (None, "[]", "no JSON", '{"_class_name": "WanTransformer3DModel"}'):
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        with pytest.raises(loadstone.Error, match=r"a folder with .* config\.json"):
            llama_cpp.trace(tmp_path, converter=CONVERTER)


def test_files_of_torch_are_converted_first(stack: Path) -> None:
    (stack / "model.safetensors").unlink()
    torch.save({"w": torch.zeros(2, 2)}, stack / "pytorch_model.bin")
    with pytest.raises(loadstone.Error, match="requires safetensors") as caught:
        llama_cpp.trace(stack, converter=CONVERTER)
    assert caught.value.path.endswith("pytorch_model.bin")


def test_blocks_are_refused(make: Callable[..., Path]) -> None:
    """The converter forces a block format, or computes the blocks of an array."""
    tensors = {"forced": torch.zeros(2, 32), "w": torch.zeros(2, 32)}
    with pytest.raises(loadstone.PlanError, match="needs this tensor in blocks") as caught:
        llama_cpp.trace(make("Blocks", **tensors), converter=CONVERTER)
    assert caught.value.code == "plan.encoding"
    assert caught.value.tensor == "blk.forced"
    assert "Q8_0" in str(caught.value)


def test_work_on_arrays_is_refused(make: Callable[..., Path]) -> None:
    with pytest.raises(loadstone.PlanError, match=r"Arrays: .* __mul__ \(numpy\) on 'w'") as caught:
        llama_cpp.trace(make("Arrays", w=torch.zeros(2, 32)), converter=CONVERTER)
    assert caught.value.code == "plan.untraceable"
    assert caught.value.tensor == "w"


def test_what_the_converter_catches_is_refused_all_the_same(make: Callable[..., Path]) -> None:
    with pytest.raises(loadstone.PlanError, match=r"Caught: .*modify_tensors.* on 'w'") as caught:
        llama_cpp.trace(make("Caught", w=torch.zeros(2, 32)), converter=CONVERTER)
    assert caught.value.code == "plan.data_dependent"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_code_of_the_folder_is_not_run(stack: Path, name: str) -> None:
    config = {"architectures": ["Stack"], "auto_map": {"AutoTokenizer": ["tok.Tok", None]}}
    (stack / name).write_text(json.dumps(config))
    with pytest.raises(loadstone.Error, match="Python code") as caught:
        llama_cpp.trace(stack, converter=CONVERTER)
    assert caught.value.field == "trust_code"
    assert llama_cpp.trace(stack, converter=CONVERTER, trust_code=True).architecture == "Stack"
    # This code is allowed, because the converter does not construct the model.
    config["auto_map"] = {"AutoModel": "modeling.Model"}
    (stack / name).write_text(json.dumps(config))
    assert llama_cpp.trace(stack, converter=CONVERTER).architecture == "Stack"


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_dtypes_that_it_does_not_write(stack: Path, dtype: str) -> None:
    with pytest.raises(loadstone.PlanError, match="does not support this dtype"):
        llama_cpp.trace(stack, converter=CONVERTER, dtype=dtype)


def test_a_model_that_it_does_not_know(make: Callable[..., Path]) -> None:
    with pytest.raises(loadstone.PlanError, match="fails for Other: KeyError") as caught:
        llama_cpp.trace(make("Other"), converter=CONVERTER)
    assert caught.value.code == "plan.conversion"


# --- keys and values ------------------------------------------------------------------------------


def typed(kind: str, value: Any, items: str | None = None) -> Any:
    sub_type = gguf.GGUFValueType[items] if items else None
    return SimpleNamespace(value=value, type=gguf.GGUFValueType[kind], sub_type=sub_type)


def entry(kind: str, value: Any, items: str | None = None) -> metadata.MetadataEntry:
    found = metadata.entries_of([("key", typed(kind, value, items))], gguf.GGUFValueType.get_type)
    return found[0]


def test_values_of_every_type() -> None:
    assert entry("UINT32", True).value == 1
    assert entry("INT64", -(2**63)).value == -(2**63)
    assert entry("FLOAT32", 0.1).value == struct.unpack("<f", struct.pack("<f", 0.1))[0]
    assert entry("FLOAT64", 0.1).value == 0.1
    assert entry("BOOL", 1).value is True
    assert entry("STRING", "\u00e4".encode()).value == "\u00e4"
    assert entry("ARRAY", b"\x00\xff") == metadata.MetadataEntry("key", "array", [0, 255], "u8")
    assert entry("ARRAY", [1, 2], "UINT16").items == "u16"
    assert entry("ARRAY", [1, 2]).items == "i32"
    text = metadata.to_json([entry("FLOAT32", math.nan), entry("FLOAT32", -math.inf)])
    assert [each["value"] for each in json.loads(text)["entries"]] == ["nan", "-inf"]


@pytest.mark.parametrize(
    ("kind", "value", "items"),
    [
        ("UINT8", 256, None),
        ("INT8", -129, None),
        ("UINT32", -1, None),
        ("UINT32", 1.5, None),
        ("FLOAT32", 1e39, None),
        ("STRING", b"\xff", None),
        ("STRING", "\udc80", None),
        ("ARRAY", [], None),
        ("ARRAY", [1, "a"], None),
        ("ARRAY", [[1]], None),
        ("ARRAY", [300], "UINT8"),
    ],
)
def test_values_that_are_not_of_their_type(kind: str, value: Any, items: str | None) -> None:
    with pytest.raises(loadstone.PlanError) as caught:
        entry(kind, value, items)
    assert caught.value.code == "plan.conversion"
    assert caught.value.field == "key"
