"""Errors for arguments of a wrong kind name the argument, its kind and the accepted kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import loadstone

MODULE = "a torch.nn.Module"
CALLS: dict[str, tuple[Callable[[Any, Path], object], str]] = {
    "audit": (lambda value, _: loadstone.audit(value), MODULE),
    "plan": (lambda value, file: loadstone.plan(value, file), MODULE),
    "load": (lambda value, file: loadstone.load(value, file), MODULE),
    "save_skeleton": (lambda value, file: loadstone.save_skeleton(value, file), MODULE),
    "execute": (lambda value, file: planned(file).execute(model=value), MODULE),
    "inspect": (lambda value, _: loadstone.inspect(value), "a path, or a sequence of paths"),
    "load_file": (lambda value, _: loadstone.load_file(value), "a path, or a sequence of paths"),
    "parts": (lambda value, file: loadstone.inspect([file, value]), "a path"),
}

OPTIONS: dict[str, dict[str, str]] = {
    "load": {
        "lora": "a path, or several with a weight each",
        "max_memory": "a mapping of devices to bytes",
        "missing": "a policy, or a mapping of patterns to policies",
        "progress": "True, False or a function",
        "rules": "rules, a mapping of names, or the path of a file",
        "strip_prefix": "a string, or a sequence of strings",
    },
    "plan": {"offload_folder": "a path"},
    "Plan.load": {
        "offload_folder": "a path",
        "path": "a path",
        "root": "a path, or a sequence of paths",
    },
    "Plan.execute": {"progress": "True, False or a function"},
    "Plan.save": {"path": "a path"},
    "save_skeleton": {"path": "a path"},
    "convert in a cluster": {"imatrix": "a path", "target": "a path"},
    "convert": {
        "exclude": "a string, or a sequence of strings",
        "imatrix": "a path",
        "include": "a string, or a sequence of strings",
        "part": "two integers: (1, 4)",
        "progress": "True, False or a function",
        "target": "a path",
    },
    "merge": {
        "lora_ignore": "a string, or a sequence of strings",
        "models": "a path, or several with a weight each",
        "target": "a path",
    },
    "quantize": {"tensor": "a torch.Tensor"},
}


def call_with(function: str, file: Path, options: dict[str, Any]) -> object:
    output = file.parent / "out"
    model = torch.nn.Linear(2, 2, bias=False)
    if function == "load":
        options = {"device_map": "auto"} | options if "max_memory" in options else options
        return loadstone.load(model, file, **options)
    if function == "plan":
        return loadstone.plan(model, file, device_map={"": "disk"}, **options)
    if function == "Plan.load":
        planned(file).save(file.parent / "plan.json")
        try:
            return loadstone.Plan.load(**{"path": file.parent / "plan.json"} | options)
        finally:
            (file.parent / "plan.json").unlink()
    if function == "Plan.execute":
        return planned(file).execute(model=model, **options)
    if function == "Plan.save":
        return planned(file).save(**options)
    if function == "save_skeleton":
        return loadstone.save_skeleton(model, **options)
    if function == "quantize":
        return loadstone.quantize(**{"tensor": torch.ones(64), "encoding": "nf4"} | options)
    if function == "convert in a cluster":
        return loadstone.convert(**{"source": file, "target": output, "cluster": 2} | options)
    first = "models" if function == "merge" else "source"
    return getattr(loadstone, function)(**{first: file, "target": output} | options)


def planned(file: Path) -> loadstone.Plan:
    return loadstone.plan(torch.nn.Linear(2, 2, bias=False), file)


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_kind_is_named(tmp_path: Path, name: str) -> None:
    call, expected = CALLS[name]
    file = tmp_path / "in.safetensors"
    save_file({"weight": torch.ones(2, 2)}, file)
    field = "model" if expected == MODULE else "checkpoint"
    with pytest.raises(loadstone.OptionError) as caught:
        call(3, file)
    assert caught.value.code == "plan.options"
    assert str(caught.value) == (
        f"{field}: the argument is of the wrong kind; found int; expected {expected} [plan.options]"
    )


@pytest.mark.parametrize(
    ("function", "field"), [(name, field) for name, fields in OPTIONS.items() for field in fields]
)
def test_an_option_of_a_wrong_kind_is_named(tmp_path: Path, function: str, field: str) -> None:
    file = tmp_path / "in.safetensors"
    save_file({"weight": torch.ones(2, 2)}, file)
    with pytest.raises(loadstone.OptionError) as caught:
        call_with(function, file, {field: 3})
    error = caught.value
    assert (error.code, error.field, error.found) == ("plan.options", field, "int")
    assert error.expected == OPTIONS[function][field]
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


def test_a_model_may_be_a_skeleton_and_a_checkpoint_any_iterable(tmp_path: Path) -> None:
    file = tmp_path / "in.safetensors"
    save_file({"weight": torch.ones(2, 2)}, file)
    model = torch.nn.Linear(2, 2, bias=False)
    loadstone.save_skeleton(model, tmp_path / "skeleton.json")
    assert loadstone.plan(tmp_path / "skeleton.json", file).ok
    assert loadstone.load(model, (path for path in [file])).provenance.keys() == {"weight"}
    assert loadstone.audit(model).ok


def test_a_pipeline_names_its_models(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1, 1)}, tmp_path / "in.safetensors")
    unet = torch.nn.Linear(1, 1, bias=False)
    pipeline = SimpleNamespace(components={"scheduler": object(), "unet": unet})
    for function, arguments in (
        (loadstone.load, [tmp_path / "in.safetensors"]),
        (loadstone.plan, [tmp_path / "in.safetensors"]),
        (loadstone.audit, [loadstone.load(unet, tmp_path / "in.safetensors")]),
    ):
        with pytest.raises(loadstone.OptionError, match="one model of the pipeline: unet"):
            function(pipeline, *arguments)


def test_an_audit_of_a_pipeline_is_one_of_all_its_models(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1, 1)}, tmp_path / "in.safetensors")
    models = {name: torch.nn.Linear(1, 1, bias=False) for name in ("unet", "vae")}
    pipeline = SimpleNamespace(components={"scheduler": object(), **models})
    loadstone.load(models["unet"], tmp_path / "in.safetensors", receipt="xxh3-128")
    result = loadstone.audit(pipeline)
    assert result.unaccounted == ["vae.weight"] and result.provenance.keys() == {"unet.weight"}
    with pytest.raises(loadstone.AuditError, match=r"without a known origin: vae\.weight"):
        result.require_real()
    loadstone.load(models["vae"], tmp_path / "in.safetensors", receipt="xxh3-128")
    assert loadstone.audit(pipeline, receipt=True).proved == ["unet.weight", "vae.weight"]
    with torch.no_grad():
        models["vae"].weight.add_(1)
    assert loadstone.audit(pipeline).changed == ["vae.weight"]
