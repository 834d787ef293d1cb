"""Tests overlay shards that replace a base's tensors: the index decides at every entry point."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import run
from safetensors.torch import load_file, save_file
from torch import nn

import loadstone

BASE = "model-00001-of-00001.safetensors"
NAMES = ["a.weight", "b.weight", "c.weight"]
# Names that sort before and after the base's shard, because shards are read in sorted order.
OVERLAYS = ["an-overlay.safetensors", "overlay.safetensors"]


def written(folder: Path, overlay: str, taken: str) -> dict[str, torch.Tensor]:
    """Write a base, an overlay, and an index that takes ``b.weight`` from the shard `taken`."""
    old = {name: torch.full((4, 6), float(i)) for i, name in enumerate(NAMES)}
    new = {name: each + 10 for name, each in old.items() if name != "a.weight"}
    save_file(old, folder / BASE, {"format": "pt"})
    save_file(new, folder / overlay, {"format": "pt"})
    shard = {"overlay": overlay, "base": BASE}[taken]
    places = {"a.weight": BASE, "b.weight": shard, "c.weight": overlay}
    index = {"metadata": {"total_size": 3 * 96}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {name: (old if places[name] == BASE else new)[name] for name in NAMES}


def _converted(folder: Path) -> dict[str, torch.Tensor]:
    out = folder.with_name(folder.name + "-out")
    loadstone.convert(folder, out)
    return load_file(out / "model.safetensors")


def _by_command(folder: Path) -> dict[str, torch.Tensor]:
    out = folder.with_name(folder.name + "-out")
    done = run("convert", folder, out)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("[ix.replaced]") == 1
    return load_file(out / "model.safetensors")


def _loaded(folder: Path) -> dict[str, torch.Tensor]:
    net = nn.ModuleDict({name[0]: nn.Linear(6, 4, False) for name in NAMES})
    loadstone.load(net, folder)
    return dict(net.state_dict())


def _opened(folder: Path) -> dict[str, torch.Tensor]:
    return dict(loadstone.load_file(folder))


def _by_plan(folder: Path) -> dict[str, torch.Tensor]:
    net = nn.ModuleDict({name[0]: nn.Linear(6, 4, False) for name in NAMES})
    plan = loadstone.plan(net, folder)
    plan.require_ok()
    replaced = [finding for finding in plan.findings if finding.code == "ix.replaced"]
    assert len(replaced) == 1 and set(replaced[0].sources) == {"b.weight", "c.weight"}
    plan.execute()
    return dict(net.state_dict())


DOORS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "convert": _converted,
    "command": _by_command,
    "load": _loaded,
    "open": _opened,
    "plan": _by_plan,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("taken", ["overlay", "base"])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_index_decides(overlay: str, taken: str, door: str, tmp_path: Path) -> None:
    expected = written(tmp_path, overlay, taken)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = DOORS[door](tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in NAMES)


def test_the_warning_names_tensors_and_files(tmp_path: Path) -> None:
    written(tmp_path, OVERLAYS[1], "overlay")
    done = run("inspect", tmp_path)
    assert done.returncode == 0
    text = done.stdout + done.stderr
    assert f"'b.weight' of '{OVERLAYS[1]}', not of '{BASE}'" in text
    assert text.count("[ix.replaced]") == 1
    # Control: no warning if each tensor is stored once.
    base = load_file(tmp_path / BASE)
    save_file({"a.weight": base["a.weight"]}, tmp_path / BASE)
    done = run("inspect", tmp_path)
    assert done.returncode == 0 and "ix.replaced" not in done.stdout + done.stderr


def test_a_dict_of_tensors_comes_with_the_warnings(tmp_path: Path) -> None:
    written(tmp_path, OVERLAYS[1], "overlay")
    with pytest.warns(UserWarning, match="'b.weight' of") as caught:
        loadstone.load_file(tmp_path)
    assert [each.filename for each in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loadstone.load_file(tmp_path / BASE)  # control


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_list_of_files_has_the_index_next_to_it(overlay: str, tmp_path: Path) -> None:
    """transformers passes such lists of files."""
    expected = written(tmp_path, overlay, "overlay")
    files = [tmp_path / overlay, tmp_path / BASE]
    with loadstone.open(files) as opened:
        assert all(torch.equal(opened[name], expected[name]) for name in NAMES)
    # Controls: an index that names other files, and no index.
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(NAMES, BASE)}))
    for _ in range(2):
        with pytest.raises(loadstone.Error) as caught:
            loadstone.inspect(files)
        assert caught.value.code == "ix.duplicate"
        index.unlink(missing_ok=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_transformers_takes_the_last_file(overlay: str, tmp_path: Path) -> None:
    """transformers ignores the index; see docs/found-elsewhere.md."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, vocab_size=8,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / BASE)
    name = "model.norm.weight"
    newer = tensors[name] + 1
    save_file({name: newer}, tmp_path / overlay, {"format": "pt"})
    places = dict.fromkeys(tensors, BASE) | {name: overlay}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()[name]
    is_last = overlay > BASE
    assert torch.equal(found, newer if is_last else tensors[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = loadstone.transformers.from_pretrained(transformers.LlamaForCausalLM, tmp_path)
    assert torch.equal(loaded.state_dict()[name], newer)
