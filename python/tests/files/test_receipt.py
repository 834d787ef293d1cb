"""Tests receipts of loads, and audits that compare the loaded bytes with a receipt."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import loadstone


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(1500, 1100)
        self.b = torch.nn.Linear(300, 200, bias=False)
        self.c = torch.nn.Linear(30, 20)
        self.tied = self.c


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("receipt") / "model.safetensors"
    state = {
        name: value.clone()
        for name, value in Model().state_dict().items()
        if not name.startswith("tied.")
    }
    state["b.weight"] = state["b.weight"].half()  # a load casts this tensor
    save_file(state, path)
    return path


def loaded(checkpoint: Path, **arguments: object) -> tuple[torch.nn.Module, loadstone.Report]:
    with loadstone.skeleton():
        model = Model()
    return model, loadstone.load(model, checkpoint, **arguments)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("kind", ["xxh3-128", "sha256-tree"])
def test_a_changed_bit_of_any_tensor_is_named(checkpoint: Path, kind: str, mmap: bool) -> None:
    model, report = loaded(checkpoint, receipt=kind, mmap=mmap)
    receipt = report.receipt
    assert receipt is not None
    audit = loadstone.audit(model, receipt=receipt)
    names = [*dict(model.named_parameters()), "tied.weight", "tied.bias"]
    assert sorted(audit.proved) == sorted(names)
    assert audit.changed == []
    generator = random.Random(3)
    for name, parameter in model.named_parameters():
        # torch's version counter does not count writes through numpy.
        memory = parameter.detach().view(-1).view(torch.uint8).numpy()
        for _ in range(4):
            index, bit = generator.randrange(memory.size), 1 << generator.randrange(8)
            memory[index] ^= bit
            changed = loadstone.audit(model, receipt=receipt).changed
            memory[index] ^= bit
            assert name in changed
            assert set(changed) <= {name, name.replace("c.", "tied.")}
    assert loadstone.audit(model, receipt=receipt).changed == []


def test_it_is_the_same_for_all_threads_and_can_be_saved(checkpoint: Path, tmp_path: Path) -> None:
    texts = set()
    for threads in (1, 4):
        model, report = loaded(checkpoint, receipt="xxh3-128", threads=threads)
        assert report.receipt is not None
        texts.add(report.receipt.to_json())
    assert len(texts) == 1
    report.receipt.save(tmp_path / "receipt.json")
    assert loadstone.audit(model, receipt=tmp_path / "receipt.json").changed == []


def test_a_tensor_that_a_receipt_does_not_list_is_named(checkpoint: Path, tmp_path: Path) -> None:
    model, report = loaded(checkpoint, receipt="xxh3-128")
    assert report.receipt is not None
    whole = json.loads(report.receipt.to_json())
    names = [target["name"] for target in whole["targets"]]
    assert loadstone.audit(model, receipt=report.receipt).unlisted == []
    for left_out in ({names[0]}, {"c.weight"}, set(names)):
        targets = [target for target in whole["targets"] if target["name"] not in left_out]
        (tmp_path / "less.json").write_text(json.dumps(whole | {"targets": targets}))
        audit = loadstone.audit(model, receipt=tmp_path / "less.json")
        tied = {name.replace("c.", "tied.") for name in left_out if name.startswith("c.")}
        assert set(audit.unlisted) == left_out | tied
        assert f"{len(audit.unlisted)} not in the receipt" in str(audit)
        assert not set(audit.unlisted) & set(audit.proved)


def test_without_one_there_is_none(checkpoint: Path) -> None:
    _, report = loaded(checkpoint)
    assert report.receipt is None


def test_wrong_words_are_refused(checkpoint: Path) -> None:
    with pytest.raises(loadstone.Error) as caught:
        loaded(checkpoint, receipt="md5")
    assert caught.value.code == "plan.options"
    with pytest.raises(loadstone.Error) as caught:
        loadstone.Receipt("{}")
    assert caught.value.code == "receipt.json"


def test_conversions(checkpoint: Path, tmp_path: Path) -> None:
    report = loadstone.convert(checkpoint, tmp_path / "out", receipt="sha256-tree")
    assert report.outputs[-1] == tmp_path / "out/receipt.json"
    receipt = loadstone.Receipt.load(report.outputs[-1])
    assert receipt.digest == "sha256-tree"
    assert [file["path"] for file in receipt.outputs] == ["model.safetensors"]
