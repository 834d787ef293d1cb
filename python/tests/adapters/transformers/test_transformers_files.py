"""Tests loads of transformers' checkpoints in torch's own file format, and the choice of files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import accelerate
import pytest
import torch
from command import run
from safetensors.torch import load_file, save_file
from transformers_models import by_name, write_checkpoint

import loadstone

pytest.importorskip("transformers")
ours = loadstone.transformers.from_pretrained


@pytest.mark.parametrize("shards", [1, 2])
def test_torchs_own_files_are_read(shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, cls = write_checkpoint(by_name("mixtral"), tmp_path, "public"), by_name("mixtral").cls
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        places = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(state)}
        for file in set(places.values()):
            part = {name: state[name] for name in state if places[name] == file}
            torch.save(part, folder / file)
        index = {"metadata": {}, "weight_map": places}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    theirs = cls.from_pretrained(folder)
    monkeypatch.setattr(torch, "load", None)  # fails if transformers' own reader runs
    with loadstone.patch("transformers"):
        models = [ours(cls, folder), cls.from_pretrained(folder)]
    for model in models:
        assert loadstone.audit(model).ok
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("library", ["transformers", "accelerate"])
@pytest.mark.parametrize("is_twice", [True, False])
def test_a_tensor_in_two_shards_is_told(is_twice: bool, library: str, tmp_path: Path):
    """transformers would take the last shard's value; loadstone takes the index's shard."""
    folder, cls = write_checkpoint(by_name("mixtral"), tmp_path, "public"), by_name("mixtral").cls
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    first, last = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    norm = state.pop("model.norm.weight")
    save_file({"model.norm.weight": norm}, folder / first, metadata={"format": "pt"})
    again = {"model.norm.weight": norm + 1} if is_twice else {}
    save_file(state | again, folder / last, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in [norm, *state.values()])
    places = {"model.norm.weight": first} | dict.fromkeys(state, last)
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with warnings.catch_warnings(record=True) as caught, loadstone.patch(library):
        warnings.simplefilter("always")
        if library == "transformers":
            model = cls.from_pretrained(folder)
        else:
            with loadstone.skeleton():
                model = cls(cls.config_class.from_pretrained(folder))
            accelerate.load_checkpoint_and_dispatch(model, folder)
    assert torch.equal(model.model.norm.weight, norm)
    warned = [warning for warning in caught if "several shards" in str(warning.message)]
    assert [warning.filename for warning in warned] == ([__file__] if is_twice else [])
    assert not is_twice or f"'model.norm.weight' of '{first}', not of '{last}'" in str(
        warned[0].message
    )


def test_files_that_are_not_read_are_refused_by_name(tmp_path: Path):
    folder = write_checkpoint(by_name("mixtral"), tmp_path, "public")
    state = load_file(folder / "model.safetensors")
    torch.save(state | {"sparse": torch.eye(2).to_sparse()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(loadstone.Error, match=r"pytorch_model\.bin"):
        ours(by_name("mixtral").cls, folder)


NORM = "model.norm.weight"
# Files that loadstone reads if the folder has no others, and transformers' option to read them.
CHOSEN = {
    "model.fp16.safetensors": {"variant": "fp16"},
    "model.safetensors.index.fp16.json": {"variant": "fp16"},
    "weights.safetensors": None,
    "weights.gguf": None,
}
# Files that transformers prefers to those in CHOSEN.
INSTEAD = ["pytorch_model.bin", "pytorch_model.bin.index.json"]


def add(folder: Path, name: str, state: dict[str, torch.Tensor]) -> None:
    """Write ``state`` to the file ``name``; if ``name`` is an index, to one shard of it."""
    file = folder / name
    if "index" in name:
        ending = "bin" if ".bin." in name else "safetensors"
        file = folder / f"{name.replace('.', '-')}.{ending}"
        places = {"metadata": {}, "weight_map": dict.fromkeys(state, file.name)}
        (folder / name).write_text(json.dumps(places))
    if file.suffix == ".bin":
        torch.save(state, file)
    elif file.suffix == ".gguf":
        gguf = pytest.importorskip("gguf")
        writer = gguf.GGUFWriter(file, "llama")
        for key, tensor in state.items():
            writer.add_tensor(key, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        save_file(state, file, metadata={"format": "pt"})


def told(folder: Path, out: Path) -> list[str]:
    """Return what each entry point reports about its choice of a checkpoint in ``folder``."""
    commands = {
        "convert": ["convert", folder, out / "converted"],
        "merge": ["merge", f"{folder}:0.5", f"{folder}:0.5", "-o", out / "merged"],
        "verify": ["verify", folder],
    }
    messages = []
    out.mkdir()
    for name, command in commands.items():
        done = run(*command, "--strict")
        warned = "[format.ignored]" in done.stderr
        assert done.returncode == (3 if warned else 0), (name, done.stderr)
        messages += [done.stderr] if warned else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loadstone.load(by_name("llama").build(), folder)
    messages += [
        str(warning.message) for warning in caught if "loadstone reads" in str(warning.message)
    ]
    messages += [
        finding.message
        for finding in loadstone.inspect(folder).findings
        if finding.severity == "warning"
    ]
    return messages


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("instead", INSTEAD)
def test_a_checkpoint_that_transformers_reads_instead_is_a_warning(
    instead: str, chosen: str, tmp_path: Path
):
    cls = by_name("llama").cls
    folder = write_checkpoint(by_name("llama"), tmp_path / "model", "public", torch.float32)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    add(folder, chosen, state)
    assert told(folder, tmp_path / "control") == []
    variant = CHOSEN[chosen]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if variant is not None:
            assert torch.equal(ours(cls, folder, **variant).state_dict()[NORM], state[NORM])
        add(folder, instead, state | {NORM: state[NORM] + 1})
        for read in (cls.from_pretrained, lambda path: ours(cls, path)):
            assert torch.equal(read(folder).state_dict()[NORM], state[NORM] + 1)
        if variant is not None:
            assert torch.equal(ours(cls, folder, **variant).state_dict()[NORM], state[NORM])
    messages = told(folder, tmp_path / "out")
    assert len(messages) == 5
    for message in messages:
        assert f"transformers reads '{instead}', but loadstone reads '{chosen}'" in message
    assert told(folder / chosen, tmp_path / "named") == []
