"""Tests SGLang's loader through its plugin hooks, on a stand-in for SGLang without a server."""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import sglang_stand_in as stand_in
import torch
from compare import same

import loadstone.sglang
from loadstone._adapters.sites.sglang import SITES
from loadstone._files.receipt import Receipt

SIDE = 8


class Attention(torch.nn.Module):
    """A layer with one parameter for three matrices of the checkpoint, as in served models."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.full((3 * SIDE, SIDE), torch.nan, dtype=torch.bfloat16))
        self.o = torch.nn.Parameter(torch.full((SIDE, SIDE), torch.nan, dtype=torch.bfloat16))
        self.embed_tokens = torch.nn.Linear(SIDE, SIDE, bias=False, dtype=torch.bfloat16)
        self.processed = False

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name.startswith("embed_tokens"):
                self.embed_tokens.weight.data.copy_(tensor)
            elif name == "o":
                self.o.data.copy_(tensor)
            else:
                begin = "qkv".index(name) * SIDE
                self.qkv.data[begin : begin + SIDE].copy_(tensor)


def state() -> dict[str, torch.Tensor]:
    names = ("q", "k", "v", "o", "embed_tokens.weight")
    return {name: torch.randn(SIDE, SIDE).bfloat16() for name in names}


def written(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    loadstone.torch.save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install the stand-in with the plugin's hook; return its module of loaders."""
    module = stand_in.install(monkeypatch)
    SITES.reset()
    loadstone.sglang.register()
    stand_in.HookRegistry.apply_hooks()
    yield module
    SITES.reset()


def loader(sglang: Any, options: Any, **config: Any) -> Any:
    return sglang.get_model_loader(stand_in.LoadConfig({"loadstone": options}, **config))


def load(sglang: Any, folder: Path, options: Any = None, **fields: Any) -> Any:
    config = stand_in.ModelConfig(str(folder), Attention, **fields)
    return loader(sglang, options or {}).load_model(model_config=config, device_config=None)


def test_sglang_finds_the_plugin() -> None:
    found = importlib.metadata.entry_points(group="sglang.srt.plugins", name="loadstone")
    assert [each.load() for each in found] == [loadstone.sglang.register]


def test_nothing_changes_where_it_is_not_asked_for(sglang: Any) -> None:
    for options in ({}, {"enable_multithread_load": True}):
        made = sglang.get_model_loader(stand_in.LoadConfig(options))
        assert type(made) is stand_in.DefaultModelLoader
    made = loader(sglang, {})
    assert type(made).__module__ == "loadstone._adapters.serving.sglang.loader"


def test_a_model_has_the_values_of_the_checkpoint(sglang: Any, tmp_path: Path) -> None:
    tensors = state()
    model = load(sglang, written(tmp_path, tensors))
    assert same(model.qkv, torch.cat([tensors["q"], tensors["k"], tensors["v"]]))
    assert same(model.o, tensors["o"]) and model.processed
    assert "load_weights" not in vars(model)


class Submitting(Attention):
    """A layer that copies in a pool, as SGLang's DeepSeek and Kimi code does for CPU tensors."""

    def load_weights(self, weights: Any) -> None:
        def copy(name: str, tensor: torch.Tensor) -> None:
            Attention.load_weights(self, [(name, tensor)])

        with concurrent.futures.ThreadPoolExecutor() as pool:
            tasks = [pool.submit(copy, *each) for each in weights if each[1].device.type == "cpu"]
            for task in concurrent.futures.as_completed(tasks):
                task.result()


@pytest.mark.parametrize("deferred", [True, False])
def test_a_model_that_copies_in_a_pool(deferred: bool, sglang: Any, tmp_path: Path) -> None:
    tensors = state()
    config = stand_in.ModelConfig(str(written(tmp_path, tensors)), Submitting)
    made = loader(sglang, {"deferred": deferred})
    model = made.load_model(model_config=config, device_config=None)
    assert same(model.qkv, torch.cat([tensors["q"], tensors["k"], tensors["v"]]))
    assert same(model.o, tensors["o"])
    del tensors["k"]
    written(tmp_path, tensors)
    with pytest.raises(loadstone.AuditError, match=r"'qkv' from row 8 on \(64 of 192"):
        made.load_model(model_config=config, device_config=None)


def test_what_is_missing_is_named_before_anything_is_packed(sglang: Any, tmp_path: Path) -> None:
    tensors = state()
    del tensors["k"]
    made: list[Attention] = []

    def build() -> Attention:
        made.append(Attention())
        return made[-1]

    config = stand_in.ModelConfig(str(written(tmp_path, tensors)), build)
    with pytest.raises(loadstone.AuditError, match=r"'qkv' from row 8 on \(64 of 192") as caught:
        loader(sglang, {}).load_model(model_config=config, device_config=None)
    assert caught.value.code == "audit.unaccounted"
    assert not made[0].processed and torch.isnan(made[0].o).all()  # the load read nothing


def test_a_wrong_shape_is_named(sglang: Any, tmp_path: Path) -> None:
    tensors = state() | {"o": torch.randn(SIDE, SIDE + 1).bfloat16()}
    with pytest.raises(loadstone.PlanError, match=r"'?o'?.*BF16 \[8, 9\]") as caught:
        load(sglang, written(tmp_path, tensors))
    assert caught.value.code == "plan.shape"


def test_a_drafter_gets_its_embeddings_from_the_other_model(sglang: Any, tmp_path: Path) -> None:
    tensors = state()
    del tensors["embed_tokens.weight"]
    folder = written(tmp_path, tensors)
    assert same(load(sglang, folder, is_draft_model=True).o, tensors["o"])
    with pytest.raises(loadstone.AuditError, match="embed_tokens"):
        load(sglang, folder)


def test_a_receipt_is_written(sglang: Any, tmp_path: Path) -> None:
    receipts = tmp_path / "receipts"
    folder = written(tmp_path / "folder", state())
    for is_drafter in (False, True):
        model = load(sglang, folder, {"receipt": str(receipts)}, is_draft_model=is_drafter)
    for name in ("receipt-0.json", "receipt-drafter-0.json"):
        receipt = Receipt.load(receipts / name)
        assert receipt.targets["qkv"][0]["sources"] == ["q", "k", "v"]
        # All models of the test are loaded from one file.
        assert all(receipt.matches(*each) for each in model.named_parameters())


def test_files_beside_the_checkpoint_are_found_by_patterns(
    sglang: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path, state())
    extra = {"extra": torch.randn(2, 3)}
    loadstone.torch.save_file(extra, folder / "extra.safetensors")
    found_files = str(folder), [str(folder / "extra.safetensors")], True

    def prepared(self: Any, model_name_or_path: str, revision: Any, *rest: Any) -> Any:
        return found_files

    monkeypatch.setattr(stand_in.DefaultModelLoader, "_prepare_weights", prepared)
    source = stand_in.Source(str(folder), None, "beside.", allow_patterns_overrides=["extra*"])
    source.model_config = stand_in.ModelConfig(str(folder), Attention)
    found = dict(loader(sglang, {})._get_weights_iterator(source))
    assert found.keys() == {"beside.extra"} and same(found["beside.extra"], extra["extra"])


def test_of_layers_that_draft_the_one_is_taken(sglang: Any, tmp_path: Path) -> None:
    tensors = state() | {f"mtp.{i}.q": torch.randn(SIDE, SIDE).bfloat16() for i in range(2)}
    made = loader(sglang, {}, draft_model_idx=1)
    source = stand_in.Source(str(written(tmp_path, tensors)), None)
    source.model_config = stand_in.ModelConfig(source.model_or_path, Attention)
    found = dict(made._get_weights_iterator(source))
    assert found.keys() == state().keys() | {"mtp.0.q"}
    assert same(found["mtp.0.q"], tensors["mtp.1.q"])


def test_who_takes_tensors_without_a_load_gets_their_values(sglang: Any, tmp_path: Path) -> None:
    """Servers call this function to update weights from disk, or to start while reading."""
    tensors = state()
    made = loader(sglang, {})
    config = stand_in.ModelConfig(str(written(tmp_path, tensors)), Attention)
    source = stand_in.Source(config.model_path, None, model_config=config)
    for name, tensor in made._get_weights_iterator(source, resolved_source=None):
        assert type(tensor) is torch.Tensor and same(tensor, tensors[name])
    model = Attention()
    made.load_weights_and_postprocess(model, tensors.items(), torch.device("cpu"))
    assert same(model.o, tensors["o"]) and model.processed


def test_options(sglang: Any, tmp_path: Path) -> None:
    tensors = state()
    elsewhere = written(tmp_path / "elsewhere", tensors)
    folder = written(tmp_path / "folder", state())
    assert same(load(sglang, folder, {"weights": str(elsewhere)}).o, tensors["o"])
    with pytest.raises(loadstone.PlanError, match="'thread'") as caught:
        load(sglang, folder, {"thread": 1})
    assert caught.value.code == "plan.options"
    with pytest.raises(loadstone.PlanError, match="json-model-override-args"):
        load(sglang, folder, {"dequantize": True}, quantization="fp8")
    with pytest.raises(ValueError, match="Unexpected extra config keys"):  # raised by SGLang
        sglang.get_model_loader(stand_in.LoadConfig({"loadstone": {}, "other": 1}))


class Codes(torch.nn.Module):
    """A layer as SGLang creates it for a quantized folder."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(SIDE, SIDE, dtype=torch.float8_e4m3fn), requires_grad=False
        )
        self.weight_scale = torch.nn.Parameter(torch.empty(()))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.get_parameter(name.removeprefix("layer.")).data.copy_(tensor)


def test_a_folder_that_is_converted_first_is_loaded_with_its_codes(
    sglang: Any, tmp_path: Path
) -> None:
    """Convert the folder first, as the error for ``quantize`` advises."""
    folder = written(tmp_path / "folder", {"layer.weight": torch.randn(SIDE, SIDE)})
    with pytest.raises(loadstone.PlanError, match="convert the folder first") as caught:
        load(sglang, folder, {"quantize": "fp8"})
    assert caught.value.code == "plan.options"
    loadstone.convert(folder, tmp_path / "converted", quantize="fp8", include="layer")
    config = stand_in.ModelConfig(str(tmp_path / "converted"), Codes, quantization="fp8")
    model = loader(sglang, {}).load_model(model_config=config, device_config=None)
    expected = loadstone.torch.load_file(tmp_path / "converted" / "model.safetensors")
    assert same(model.weight.data, expected["layer.weight"])
    assert same(model.weight_scale.data, expected["layer.weight_scale"])


def test_an_sglang_that_is_not_known_is_refused_where_it_is_asked_for(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(stand_in.DefaultModelLoader, "_filter_mtp_weights")
    with pytest.raises(RuntimeError, match="unsupported version of sglang"):
        loader(sglang, {})
    assert type(sglang.get_model_loader(stand_in.LoadConfig())) is stand_in.DefaultModelLoader
