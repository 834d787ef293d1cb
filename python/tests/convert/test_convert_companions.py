"""A conversion copies the files next to a model, or reports their names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from safetensors.torch import save_file

import loadstone

COMPANIONS = [
    "tekken.json",
    "params.json",
    "tokenizer.json",
    "qwen.tiktoken",
    "spiece.model",
    "vocab.bpe",
    "README.md",
    "LICENSE-MODEL",
    "trainer_state.json",
    "quantize_config.json",
    "nobody_knows_this.xyz",
    "picture.png",
    "assets/figure.png",
    "additional_chat_templates/tool_use.jinja",
]
NAMED = ["pytorch_model.bin", "tf_model.h5", "onnx/", "original/"]
CODE = ["modeling_own.py", "tokenization_own.py"]
SKIPPED = [
    ".gitattributes",
    ".cache/huggingface/download/model.lock",
    "__pycache__/modeling_own.cpython-311.pyc",
    "model.safetensors.index.json",
    "model.safetensors.index.fp16.json",
]
OTHERS = ["onnx/model.onnx", "onnx/config.json", "original/params.json", "original/weights.00.pth"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    for name in [*COMPANIONS, *CODE, *SKIPPED, *OTHERS, "pytorch_model.bin", "tf_model.h5"]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    index = {"metadata": {}, "weight_map": {"a.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a.weight": torch.randn(4, 4)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "own"}))
    return folder


def findings_of(report: Any) -> dict[str, str]:
    named = [each for each in report.findings if each.code == "convert.not_copied"]
    return {source: str(each.severity) for each in named for source in each.sources}


def by_convert(model: Path, target: Path, **options: Any) -> dict[str, str]:
    return findings_of(loadstone.convert(model, target, **options))


def by_merge(model: Path, target: Path) -> dict[str, str]:
    return findings_of(loadstone.merge([(model, 0.5), (model, 0.5)], target))


def by_command(model: Path, target: Path, *options: object) -> dict[str, str]:
    done = run("convert", model, target, "--json", *options)
    assert done.returncode == 0, done.stderr
    named = [each for each in json.loads(done.stdout)["findings"] if "not_copied" in each["code"]]
    return {source: each["severity"] for each in named for source in each["sources"]}


DOORS: dict[str, Callable[..., dict[str, str]]] = {
    "convert": by_convert,
    "merge": by_merge,
    "command": by_command,
}


def files_in(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}


@pytest.mark.parametrize("door", DOORS)
def test_each_file_comes_along_or_is_named(model: Path, tmp_path: Path, door: str) -> None:
    target = tmp_path / "out"
    named = DOORS[door](model, target)
    assert files_in(target) == {*COMPANIONS, "config.json", "model.safetensors"}
    for name in COMPANIONS:
        assert (target / name).read_bytes() == (model / name).read_bytes()
    assert {name: "info" for name in [*NAMED, *CODE]} == named
    # Control: the conversion copies, names or skips each file of the model.
    left = files_in(model) - files_in(target) - set(named) - set(SKIPPED)
    assert left == set(OTHERS)
    assert all(any(name.startswith(folder) for folder in NAMED) for name in left)


def test_code_on_request(model: Path, tmp_path: Path) -> None:
    assert set(CODE).isdisjoint(by_convert(model, tmp_path / "python", copy_code=True))
    assert set(CODE) <= files_in(tmp_path / "python")
    assert set(CODE).isdisjoint(by_command(model, tmp_path / "command", "--copy-code"))
    assert set(CODE) <= files_in(tmp_path / "command")


@pytest.mark.parametrize("door", DOORS)
def test_code_that_the_config_names_is_a_warning(model: Path, tmp_path: Path, door: str) -> None:
    auto_map = {"AutoModel": "modeling_own.Own"}
    (model / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    named = DOORS[door](model, tmp_path / "out")
    assert {named[name] for name in CODE} == {"warning"}
    assert run("convert", model, tmp_path / "strict", "--strict").returncode == 3
    assert run("convert", model, tmp_path / "strict", "--strict", "--copy-code").returncode == 0


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("kind", "is_named"),
    [("modeling_own.Own", True), ("sentence_transformers.models.Dense", False)],
)
def test_code_that_modules_name_is_a_warning(
    model: Path, tmp_path: Path, kind: str, is_named: bool, door: str
) -> None:
    modules = [{"idx": 0, "name": "0", "path": "", "type": kind}]
    (model / "modules.json").write_text(json.dumps(modules))
    named = DOORS[door](model, tmp_path / "out")
    assert {named[name] for name in CODE} == {"warning" if is_named else "info"}


def test_the_config_of_an_adapter_stays_with_its_weights(model: Path, tmp_path: Path) -> None:
    (model / "adapter_config.json").write_text("{}")
    by_convert(model, tmp_path / "base")
    assert "adapter_config.json" not in files_in(tmp_path / "base")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"a.lora_A.weight": torch.randn(4, 4)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text("{}")
    by_convert(adapter, tmp_path / "out", dtype="bfloat16")
    assert files_in(tmp_path / "out") == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_declarations_of_other_codes_do_not_come_along(
    model: Path, tmp_path: Path, name: str
) -> None:
    (model / "model.safetensors.index.json").unlink()
    save_file(
        {"model.layers.0.mlp.up_proj.weight": torch.randn(128, 128)}, model / "model.safetensors"
    )
    (model / name).write_text("{}")
    named = by_convert(model, tmp_path / "codes", quantize="fp8")
    assert named[name] == "info"
    assert name not in files_in(tmp_path / "codes")
    by_convert(model, tmp_path / "floats", dtype="bfloat16")  # control
    assert name in files_in(tmp_path / "floats")


NAMES = {  # config, requested name, file name
    "diffusers": ({"_class_name": "WanTransformer3DModel"}, None, "diffusion_pytorch_model"),
    "diffusers, named": ({"_class_name": "WanTransformer3DModel"}, "model", "model"),
    "transformers": ({"model_type": "llama"}, None, "model"),
    "without a config": (None, None, "model"),
}


@pytest.mark.parametrize("case", NAMES)
def test_files_are_called_what_the_library_looks_for(case: str, tmp_path: Path) -> None:
    config, name, stem = NAMES[case]
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {f"{part}.weight": torch.randn(64, 64) for part in "ab"}
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    words = [] if name is None else ["--name", name]
    given: dict[str, Any] = {} if name is None else {"name": name}
    assert run("convert", folder, tmp_path / "command", *words).returncode == 0
    loadstone.convert(folder, tmp_path / "python", **given)
    loadstone.merge([folder, folder], tmp_path / "merged", method="linear", **given)
    for out in ("command", "python", "merged"):
        assert [path.name for path in tmp_path.glob(f"{out}/*.safetensors")] == [
            f"{stem}.safetensors"
        ]
    if name is not None:
        with pytest.raises(loadstone.Error, match="single file"):
            loadstone.convert(folder, tmp_path / "one.safetensors", **given)
        assert run("convert", folder, tmp_path / "one.safetensors", *words).returncode == 2
    loadstone.convert(folder, tmp_path / "shards", shard_size="20KB", **given)
    index = json.loads((tmp_path / "shards" / f"{stem}.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {
        f"{stem}-0000{part}-of-00002.safetensors" for part in (1, 2)
    }
