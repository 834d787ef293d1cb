"""Conversions whose target is a finished output of different options or a different source."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from command import COMMAND, output
from safetensors.torch import save_file

import loadstone

SHARD = 1_100_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    state = {f"layers.{i}": torch.randn(512, 1024) for i in range(4)}
    save_file(state, tmp_path / "in/model.safetensors")
    return tmp_path / "in"


@pytest.fixture
def target(source: Path, tmp_path: Path) -> Path:
    """Write an output of four shards and an index."""
    loadstone.convert(source, tmp_path / "out", dtype="float16", shard_size=SHARD, resume=True)
    return tmp_path / "out"


def words(source: Path, target: Path, dtype: str, *more: str) -> list[str]:
    options = ["--dtype", dtype, "--shard-size", str(SHARD), *more]
    return ["convert", str(source), str(target), *options]


def test_a_replaced_output_is_reported(source: Path, target: Path, tmp_path: Path) -> None:
    text = "the conversion replaces 5 files of an earlier output, which was made with different"
    assert text in output(*words(source, target, "bf16"), "--dry-run")
    planned = loadstone.convert(source, target, dtype="bfloat16", dry_run=True)
    (finding,) = (each for each in planned.findings if each.code == "convert.replaced")
    assert finding.severity == "warning"
    assert text in finding.message and "the first is 'layers.0'" in finding.message
    assert len(finding.sources) == 5
    assert "replaced  5 files\n" in output(*words(source, target, "bf16"))
    assert "\nreplaced" not in output(*words(source, tmp_path / "new", "bf16"))


def test_a_folder_with_subfolders_is_replaced_file_by_file(source: Path, target: Path) -> None:
    (target / "sub").mkdir()
    assert "replaced  5 files\n" in output(*words(source, target, "bf16"))
    loadstone.convert(source, target)  # one shard instead of four, without an index
    assert sorted(path.name for path in target.iterdir()) == ["model.safetensors", "sub"]
    expected = loadstone.load_file(source / "model.safetensors")
    found = loadstone.load_file(target)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    (target.parent / ".loadstone-out.done").unlink()
    text = output(*words(source, target, "bf16"), status=2)
    assert "to replace the files, add --overwrite" in text
    with pytest.raises(loadstone.Error, match="no record shows"):
        loadstone.convert(source, target)
    loadstone.convert(source, target, overwrite=True)
    output(*words(source, target, "bf16", "--overwrite"))


def test_the_target_may_be_the_working_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    for _ in range(2):
        output("convert", source, ".")
        loadstone.convert(source, ".")
        assert sorted(path.name for path in Path().iterdir()) == ["model.safetensors"]
    assert (tmp_path / ".loadstone-out.done").is_file()


def test_the_command_that_creates_the_targets_folder_is_named(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "a b" / "c" / "out"
    with pytest.raises(loadstone.Error, match="the target's folder does not exist"):
        loadstone.convert(source, target)
    text = output("convert", source, target, status=4)
    assert not (tmp_path / "a b").exists()
    (command,) = re.findall(r"create it: (mkdir -p '.*') \[io.not_found\]", text)
    subprocess.run(command, shell=True, check=True)
    output("convert", source, target)


@pytest.mark.parametrize(
    ("more", "options"),
    [
        (["--resume"], {"resume": True}),
        (["--part", "1/2"], {"part": (1, 2)}),
        (["--finish"], {"finish": True}),
    ],
)
def test_a_resumed_run_does_not_replace_a_different_output(
    source: Path, target: Path, tmp_path: Path, more: list[str], options: dict[str, Any]
) -> None:
    before = {path: path.read_bytes() for path in target.iterdir()}
    difference = "dtype was F16, and is now BF16"
    command = words(source, target, "bf16", *more)
    assert difference in output(*command, "--dry-run", status=1)
    text = output(*command, status=1)
    assert difference in text and "[convert.state]" in text
    assert "to replace this one, add --overwrite" in text
    with pytest.raises(loadstone.Error, match=difference) as caught:
        loadstone.convert(source, target, dtype="bfloat16", shard_size=SHARD, **options)
    assert caught.value.code == "convert.state"
    assert {path: path.read_bytes() for path in target.iterdir()} == before
    assert not (tmp_path / ".loadstone-out.part").exists()
    if "resume" in options:
        output(*command, "--overwrite")
        assert {path: path.read_bytes() for path in target.iterdir()} != before


@pytest.mark.parametrize("name", ["original", "original/model.safetensors"])
@pytest.mark.parametrize("merge", [False, True])
def test_a_model_that_loadstone_did_not_write_is_not_replaced(
    source: Path, tmp_path: Path, name: str, merge: bool
) -> None:
    original = tmp_path / "original"
    original.mkdir()
    save_file({"layers.0": torch.randn(4, 4)}, original / "model.safetensors")
    before = (original / "model.safetensors").read_bytes()
    target = tmp_path / name
    models = [str(source), f"{source}:1", "-o", str(target)]
    command = ["merge", *models] if merge else ["convert", str(source), str(target)]
    arguments = ([source, (source, 1.0)], target) if merge else (source, target)
    run = loadstone.merge if merge else loadstone.convert
    text = f"'{target}' already exists, and no record shows that an earlier conversion wrote 1 file"
    advice = "check that SOURCE and TARGET are in the right order"
    for more in ((), ("--dry-run",)):
        shown = output(*command, *more, status=2)
        assert text in shown and advice in shown and "--overwrite" in shown
    with pytest.raises(loadstone.PlanError, match="already exists") as caught:
        run(*arguments)
    assert caught.value.code == "convert.target"
    (finding,) = run(*arguments, dry_run=True).findings
    assert (finding.severity, finding.sources) == ("error", ["model.safetensors"])
    assert (original / "model.safetensors").read_bytes() == before
    (finding,) = run(*arguments, overwrite=True).findings
    assert "the conversion replaces 1 file: 'model.safetensors'" in finding.message
    assert (original / "model.safetensors").read_bytes() != before


def test_an_output_is_replaced_until_somebody_changes_it(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    for dtype in ("float16", "bfloat16", "float16"):
        loadstone.convert(source, target, dtype=dtype)
    target.write_bytes(target.read_bytes())
    with pytest.raises(loadstone.PlanError, match=r"has changed since: 'out\.safetensors'"):
        loadstone.convert(source, target, dtype="float16")
    loadstone.convert(source, target, dtype="float16", overwrite=True)
    loadstone.convert(source, target, dtype="bfloat16")


def test_the_rest_of_an_output_is_replaced_if_a_shard_is_lost(source: Path, target: Path) -> None:
    lost = target / "model-00002-of-00004.safetensors"
    before = lost.read_bytes()
    lost.unlink()
    loadstone.convert(source, target, dtype="float16", shard_size=SHARD, resume=True)
    assert lost.read_bytes() == before


def test_a_conversion_does_not_replace_what_its_source_was_made_from(
    source: Path, target: Path, tmp_path: Path
) -> None:
    quantized = tmp_path / "quantized"
    loadstone.convert(target, quantized, dtype="bfloat16", shard_size=SHARD)
    before = {path: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(loadstone.PlanError, match="the source was made from") as caught:
        loadstone.convert(quantized, target, dtype="float32", shard_size=SHARD)
    assert caught.value.code == "convert.target"
    text = output(*words(quantized, target, "f32"), "--dry-run", status=2)
    assert f"the source was made from '{target}'" in text
    assert {path: path.read_bytes() for path in target.iterdir()} == before
    loadstone.convert(quantized, target, dtype="float32", shard_size=SHARD, overwrite=True)
    loadstone.convert(source, quantized, dtype="bfloat16", shard_size=SHARD)


def test_a_config_of_the_user_is_not_replaced_in_silence(source: Path, tmp_path: Path) -> None:
    config = {"model_type": "other"}
    (source / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config | {"mine": 1}))
    (finding,) = loadstone.convert(source, tmp_path / "mine", dry_run=True).findings
    assert (finding.severity, finding.sources) == ("warning", ["config.json"])
    assert "the conversion replaces 1 file: 'config.json'" in finding.message


def test_lost_companions_are_named(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text("{}")
    options: dict[str, Any] = {"receipt": "xxh3-128", "resume": True}
    loadstone.convert(source, tmp_path / "out", **options)
    (tmp_path / "out" / "receipt.json").unlink()
    (finding,) = loadstone.convert(source, tmp_path / "out", dry_run=True, **options).findings
    assert "in which 'receipt.json' is missing" in finding.message
    loadstone.convert(source, tmp_path / "out", **options)
    assert (tmp_path / "out" / "receipt.json").exists()


def test_a_run_that_discards_finished_shards_warns(source: Path, tmp_path: Path) -> None:
    loadstone.convert(source, tmp_path / "out", dtype="float16", shard_size=SHARD, part=(1, 2))
    command = words(source, tmp_path / "out", "f16")
    assert "unfinished conversion in 2 parts" in output(*command, "--dry-run", status=1)
    (tmp_path / ".loadstone-out.part/state.json").write_text(
        (tmp_path / ".loadstone-out.part/state.json")
        .read_text()
        .replace('"parts": 2', '"parts": 0')
    )
    text = output(*command, "--dry-run")
    assert "the conversion discards 2 of 4 files that a stopped run of it finished" in text
    assert "to keep them, add --resume" in text


def test_a_work_folder_proves_nothing_about_other_models(source: Path, tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.mkdir()
    save_file({"layers.0": torch.randn(4, 4)}, original / "model.safetensors")
    before = (original / "model.safetensors").read_bytes()
    (tmp_path / ".loadstone-original.part").mkdir()
    with pytest.raises(loadstone.PlanError, match="no record shows"):
        loadstone.convert(source, original)
    options: dict[str, Any] = {"dtype": "float16", "shard_size": SHARD}
    for part in (1, 2):
        loadstone.convert(source, tmp_path / "out", part=(part, 2), **options)
    shutil.copytree(original, tmp_path / "out")
    with pytest.raises(loadstone.PlanError, match="no record shows"):
        loadstone.convert(source, tmp_path / "out", finish=True, **options)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_a_model_that_appears_during_the_run_is_not_replaced(source: Path, tmp_path: Path) -> None:
    def appear(done: int, total: int) -> None:
        if not target.exists():
            save_file({"layers.0": torch.zeros(4, 4)}, target)

    target = tmp_path / "out.safetensors"
    with pytest.raises(loadstone.PlanError, match="no record shows"):
        loadstone.convert(source, target, progress=appear)
    assert target.stat().st_size < 1000


def test_a_touched_source_is_reported_before_it_is_read(source: Path, target: Path) -> None:
    os.utime(source / "model.safetensors", (1, 1))
    command = [str(COMMAND), *words(source, target, "f16", "--resume", "--progress", "plain")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    warning, *progress = done.stderr.splitlines()
    assert "source files that have been modified or replaced since" in warning
    assert "[convert.replaced]" in warning and progress[0].startswith("loadstone: ")
