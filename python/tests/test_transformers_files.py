"""transformers' checkpoints in torch's own files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import accelerate
import pytest
import torch
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
    monkeypatch.setattr(torch, "load", None)  # the library's reader
    with loadstone.patch("transformers"):
        models = [ours(cls, folder), cls.from_pretrained(folder)]
    for model in models:
        assert loadstone.audit(model).ok
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("library", ["transformers", "accelerate"])
@pytest.mark.parametrize("is_twice", [True, False])
def test_a_tensor_in_two_shards_is_told(is_twice: bool, library: str, tmp_path: Path):
    """transformers takes the last shard's, loadstone that of the index."""
    folder, cls = write_checkpoint(by_name("mixtral"), tmp_path, "public"), by_name("mixtral").cls
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    first, last = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    norm = state.pop("model.norm.weight")
    save_file({"model.norm.weight": norm}, folder / first, metadata={"format": "pt"})
    again = {"model.norm.weight": norm + 1} if is_twice else {}
    save_file(state | again, folder / last, metadata={"format": "pt"})
    size = sum(each.nbytes for each in [norm, *state.values()])
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
    warned = [each for each in caught if "several shards" in str(each.message)]
    assert [each.filename for each in warned] == ([__file__] if is_twice else [])
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
