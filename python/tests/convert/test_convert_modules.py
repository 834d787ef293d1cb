"""Folders below the model's folder: a conversion copies modules of sentence-transformers and
reports the names of other folders."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from command import run
from remote_fixtures import no_environment, served, server
from remote_hosts import Hub, Store
from remote_server import Server

import loadstone

__all__ = ["no_environment", "served", "server"]

MODULES = ["", "1_Pooling", "2_Dense", "3_Normalize"]
BELOW = [
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "2_Dense/deep/notes.txt",
]


def write_modules(folder: Path, paths: list[str]) -> None:
    rows = [
        {"idx": number, "name": str(number), "path": path, "type": "sentence_transformers.models.X"}
        for number, path in enumerate(paths)
    ]
    (folder / "modules.json").write_text(json.dumps(rows))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a model as sentence-transformers does; ``3_Normalize`` has no files and no folder."""
    folder = tmp_path / "st"
    (folder / "2_Dense" / "deep").mkdir(parents=True)
    (folder / "1_Pooling").mkdir()
    safetensors.torch.save_file(
        {"embeddings.word_embeddings.weight": torch.randn(64, 32)}, folder / "model.safetensors"
    )
    safetensors.torch.save_file(
        {"linear.weight": torch.randn(4, 32), "linear.bias": torch.randn(4)},
        folder / "2_Dense" / "model.safetensors",
    )
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 32}')
    (folder / "2_Dense" / "config.json").write_text('{"in_features": 32, "out_features": 4}')
    (folder / "2_Dense" / "deep" / "notes.txt").write_text("text")
    (folder / "2_Dense" / "model.py").write_text("raise SystemExit")
    (folder / "2_Dense" / ".hidden").write_text("x")
    write_modules(folder, MODULES)
    return folder


def files_in(folder: Path) -> list[str]:
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())


def warnings_of(report: Any) -> list[str]:
    found = [each for each in report.findings if each.code == "convert.not_copied"]
    return [each.message for each in found if str(each.severity) == "warning"]


def by_python(source: object, target: Path, **options: Any) -> list[str]:
    report = loadstone.convert(source, target, **options)  # type: ignore[arg-type]
    return warnings_of(report)


def by_command(source: object, target: Path, *options: object) -> list[str]:
    done = run("convert", source, target, *options)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "[convert.not_copied]" in line]


def by_merge(source: object, target: Path) -> list[str]:
    report = loadstone.merge([(f"{source}", 0.5), (f"{source}", 0.5)], target)
    return warnings_of(report)


DOORS: dict[str, Callable[..., list[str]]] = {
    "convert": by_python,
    "command": by_command,
    "merge": by_merge,
}


@pytest.mark.parametrize("door", DOORS)
def test_modules_come_along(model: Path, tmp_path: Path, door: str) -> None:
    target = tmp_path / "out"
    for _ in range(2):  # the second conversion replaces the first
        assert DOORS[door](model, target) == []
        expected = ["config.json", "model.safetensors", "modules.json", *BELOW]
        assert files_in(target) == sorted(expected)
        for name in BELOW:
            assert (target / name).read_bytes() == (model / name).read_bytes()
    assert [each.name for each in tmp_path.glob(".*")] == [".loadstone-out.done"]
    with loadstone.open(target / "2_Dense") as dense:
        assert dense["linear.weight"].shape == (4, 32)


def test_options_of_a_conversion(model: Path, tmp_path: Path) -> None:
    report = tmp_path / "out"
    assert by_python(model, report, dtype="bfloat16", copy_code=True, receipt="sha256-tree") == []
    assert {*BELOW, "2_Dense/model.py", "receipt.json"} <= set(files_in(report))
    assert run("verify", report, "--receipt").returncode == 0
    (report / "2_Dense" / "config.json").write_text("{}")
    assert run("verify", report, "--receipt").returncode == 1  # control: the receipt covers modules
    # The conversion may run in parts.
    for number in (1, 2):
        loadstone.convert(model, tmp_path / "parts", part=(number, 2))
    loadstone.convert(model, tmp_path / "parts", finish=True)
    assert set(BELOW) <= set(files_in(tmp_path / "parts"))
    dry = loadstone.convert(model, tmp_path / "dry", dry_run=True)
    assert "2_Dense/model.safetensors" in dry.table
    assert not (tmp_path / "dry").exists()


@pytest.mark.parametrize("door", ["convert", "command"])
def test_one_file_names_what_it_leaves(model: Path, tmp_path: Path, door: str) -> None:
    keys = {"general.architecture": "x"}
    for name in ("out.safetensors", "out.gguf") if door == "convert" else ("out.safetensors",):
        options: Any = {"metadata": keys, "rules": []} if name.endswith("gguf") else {}
        said = DOORS[door](model, tmp_path / name, **options)
        assert len(said) == 1
        assert "'1_Pooling', '2_Dense'" in said[0]
        (tmp_path / name).unlink()
    done = run("convert", model, tmp_path / "out.safetensors", "--strict")
    assert done.returncode == 3
    write_modules(model, [""])  # control: modules.json names only the model's own folder
    assert DOORS[door](model, tmp_path / "out.safetensors") == []


@pytest.mark.parametrize("door", DOORS)
def test_components_of_a_pipeline_are_named(model: Path, tmp_path: Path, door: str) -> None:
    index = {
        "_class_name": "StableDiffusionPipeline",
        "vae": ["diffusers", "AutoencoderKL"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "safety_checker": [None, None],
        "absent": ["diffusers", "X"],
    }
    (model / "model_index.json").write_text(json.dumps(index))
    for name in ("vae", "unet", "safety_checker"):
        shutil.copytree(model / "2_Dense", model / name)
    said = DOORS[door](model, tmp_path / "out")
    assert len(said) == 1
    assert "'unet', 'vae'" in said[0]
    assert "safety_checker" not in said[0]
    assert "absent" not in said[0]
    assert not (tmp_path / "out" / "vae").exists()
    assert set(BELOW) <= set(files_in(tmp_path / "out"))


@pytest.mark.parametrize("kind", ["web", "hub", "store"])
def test_modules_of_other_machines(
    server: Server, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    expected = {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    for name in files_in(model):
        place = f"/bucket/st/{name}" if kind == "store" else f"/org/st/{name}"
        server.files[place] = (model / name).read_bytes()
    url = server.url("/org/st/")
    if kind == "hub":
        monkeypatch.setenv("HF_ENDPOINT", server.url())
        Hub(server, model.parent)
        url = "hf://org/st"
    if kind == "store":
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url())
        monkeypatch.setenv("AWS_REGION", "eu-west-1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, {"A": "AKID", "S": "SECRET/KEY"}[name[4]])
        Store(server)
        url = "s3://bucket/st/"
    for door in ("convert", "command"):
        target = tmp_path / f"out-{door}"
        assert DOORS[door](url, target) == []
        assert {"modules.json", *expected} <= set(files_in(target))
        for name in expected:
            assert (target / name).read_bytes() == (model / name).read_bytes()


def test_names_that_leave_the_folder_are_not_followed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text("secret")
    (model / "4_Link").symlink_to(tmp_path / "secret")
    (model / "2_Dense" / "link.json").symlink_to(tmp_path / "secret" / "config.json")
    os.mkfifo(model / "2_Dense" / "pipe")
    outside = ["../secret", str(tmp_path / "secret"), "2_Dense/../../secret", "a//b"]
    write_modules(model, [*MODULES, *outside, "4_Link", "model.safetensors"])
    said = by_python(model, tmp_path / "out")
    assert len(said) == 2
    assert "'../secret'" in "".join(said)
    assert "links" in "".join(said)
    assert "secret" not in "".join(
        path.read_text("latin-1")
        for path in (tmp_path / "out").rglob("*.json")
        if path.name != "modules.json"
    )
    assert set(BELOW) <= set(files_in(tmp_path / "out"))
    for text in ("", "[", "{}", "null"):
        (model / "modules.json").write_text(text)
        with pytest.raises(loadstone.Error, match=r"modules\.json.*format\.config"):
            by_python(model, tmp_path / "other")
    (model / "modules.json").write_text('[1, {}, {"path": 1}]')  # no entry is valid
    assert len(by_python(model, tmp_path / "other")) == 1  # the link
    assert "2_Dense/config.json" not in files_in(tmp_path / "other")


@pytest.mark.parametrize("path", ["x", "x/inner", "x/inner/deep", "real/x/inner"])
def test_no_part_of_a_path_may_be_a_link(path: str, tmp_path: Path) -> None:
    outside, model = tmp_path / "outside", tmp_path / "linked"
    (outside / "inner" / "deep").mkdir(parents=True)
    (model / "real" / "own").mkdir(parents=True)
    for folder in (outside, outside / "inner", outside / "inner" / "deep", model / "real" / "own"):
        (folder / "config.json").write_text("{}")
    (model / "x").symlink_to(outside)
    (model / "real" / "x").symlink_to(outside)
    modules = [{"path": each} for each in ("", path, "real/own")]
    (model / "modules.json").write_text(json.dumps(modules))
    safetensors.torch.save_file({"a": torch.ones(2)}, model / "model.safetensors")
    loadstone.convert(model, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out" / path).exists()
    assert (tmp_path / "out" / "real" / "own" / "config.json").exists()  # control


def merge_of_two(models: list[Path], target: Path, door: str) -> list[str]:
    """Return the findings about modules from a merge of two models."""
    if door == "python":
        report = loadstone.merge([(each, 0.5) for each in models], target)
        return warnings_of(report)
    done = run("merge", *(f"{each}:0.5" for each in models), "-o", target)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "[convert.not_copied]" in line]


@pytest.mark.parametrize("door", ["python", "command"])
@pytest.mark.parametrize("file", ["2_Dense/model.safetensors", "1_Pooling/config.json", "more/x"])
def test_a_merge_names_the_modules_that_it_does_not_merge(
    model: Path, tmp_path: Path, file: str, door: str
) -> None:
    second = tmp_path / "second"
    shutil.copytree(model, second)
    assert merge_of_two([model, second], tmp_path / "out", door) == []  # control: identical modules
    if file == "more/x":
        (second / "more").mkdir()
        write_modules(second, [*MODULES, "more"])
        (second / file).write_bytes(b"x")
    else:
        raw = bytearray((second / file).read_bytes())
        raw[-1] ^= 1
        (second / file).write_bytes(raw)
    for target in ("out", "out.safetensors"):
        said = merge_of_two([model, second], tmp_path / target, door)
        named = [each for each in said if str(second) in each]
        assert len(named) == 1 and f"'{file}'" in named[0], said
        assert "2_Dense/deep" not in named[0]  # identical in both models
    assert (tmp_path / "out" / "2_Dense" / "model.safetensors").read_bytes() == (
        model / "2_Dense" / "model.safetensors"
    ).read_bytes()
    strict = ("merge", f"{model}:0.5", f"{second}:0.5", "-o", tmp_path / "strict", "--strict")
    done = run(*strict)
    assert done.returncode != 0 and "convert.not_copied" in done.stderr
    assert not (tmp_path / "strict").exists()


def test_a_merge_with_a_remote_model_names_its_modules(
    server: Server, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "st"
    shutil.copytree(model, repository)
    (repository / "2_Dense" / "config.json").write_text("{}")
    monkeypatch.setenv("HF_ENDPOINT", server.url())
    Hub(server, repository.parent, "")
    report = loadstone.merge([(model, 0.5), ("hf://org/st", 0.5)], tmp_path / "out")
    said = warnings_of(report)
    assert len(said) == 1 and said[0].endswith("the first model's: '2_Dense/config.json'")
