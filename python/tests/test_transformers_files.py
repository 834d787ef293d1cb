"""transformers' checkpoints in torch's own files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
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
    monkeypatch.setattr(torch, "load", None)  # the library's reader
    with loadstone.patch("transformers"):
        models = [ours(cls, folder), cls.from_pretrained(folder)]
    for model in models:
        assert loadstone.audit(model).ok
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name


def test_files_that_are_not_read_are_refused_by_name(tmp_path: Path):
    folder = write_checkpoint(by_name("mixtral"), tmp_path, "public")
    state = load_file(folder / "model.safetensors")
    torch.save(state | {"sparse": torch.eye(2).to_sparse()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(loadstone.Error, match=r"pytorch_model\.bin"):
        ours(by_name("mixtral").cls, folder)
