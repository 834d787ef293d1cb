"""Tests which reader opens quantized folders in ``from_pretrained``, and with which messages.

``test_readback.py`` tests the values of every encoding.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import packed_gptq
import pytest
import torch
from codec_checkpoint import Checkpoint
from codec_models import assert_equal
from readback_cells import Source, model_state, tensors_of, write_source
from safetensors.torch import load_file, save_file
from transformers_models import by_name, write_checkpoint

import loadstone

transformers = pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.quantizers import auto  # noqa: E402

ours = loadstone.transformers.from_pretrained
BF16 = torch.bfloat16
MOE = Source("qwen3_moe")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Source], Path]:
    folders: dict[Source, Path] = {}

    def of(source: Source) -> Path:
        if source not in folders:
            folders[source] = write_source(source, tmp_path_factory.mktemp("source") / "model")
        return folders[source]

    return of


@pytest.fixture
def folder(sources: Callable[[Source], Path], tmp_path: Path) -> Path:
    """Write a folder like ModelOpt's export, with experts in nvfp4 and other layers in fp8."""
    patterns = {"experts": "nvfp4", "": "fp8"}
    loadstone.convert(sources(MOE), tmp_path / "modelopt", quantize=patterns)
    return tmp_path / "modelopt"


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def numbers_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the values that a conversion decodes, which ``test_readback.py`` tests."""
    back = folder.with_name(f"{folder.name}-back")
    loadstone.convert(folder, back, dequantize=True)
    return tensors_of(back)


def change(folder: Path, changed: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def change_config(folder: Path, **members: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | members
    file.write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """Capture transformers' log, which does not propagate to the root logger."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield lambda: caplog.text
    logger.removeHandler(caplog.handler)


# ---- formats for which transformers has no quantizer


def test_modelopt_is_opened_without_a_word(folder: Path, said: Callable[[], str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = ours(AutoModelForCausalLM, folder)
    assert "Unknown quantization" not in said()
    assert_equal(state_of(model), model_state(numbers_of(folder), MOE))


def test_the_library_alone_makes_wrong_numbers(folder: Path, said: Callable[[], str]) -> None:
    """Control: transformers cannot open this folder, because it has no quantizer for ModelOpt."""
    with pytest.raises(RuntimeError):
        AutoModelForCausalLM.from_pretrained(folder)
    assert "Unknown quantization" in said()


def test_the_model_is_an_ordinary_one(folder: Path, tmp_path: Path) -> None:
    model = ours(AutoModelForCausalLM, folder)
    assert not getattr(model, "is_quantized", False)
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_equal(state_of(again), state_of(model))


def test_a_config_beside_the_model_alone(folder: Path) -> None:
    """Older releases of ModelOpt wrote only ``hf_quant_config.json``."""
    expected = model_state(numbers_of(folder), MOE)
    change_config(folder, quantization_config=None)
    assert_equal(state_of(ours(AutoModelForCausalLM, folder)), expected)


def test_a_section_without_a_method(folder: Path) -> None:
    expected = model_state(numbers_of(folder), MOE)
    change_config(folder, quantization_config={"quant_algo": "MIXED_PRECISION"})
    assert_equal(state_of(ours(AutoModelForCausalLM, folder)), expected)


@pytest.mark.parametrize("stored", [None, "bfloat16"])
def test_a_config_without_a_dtype(folder: Path, stored: str | None) -> None:
    """loadstone takes the dtype of the plain tensors, not of the codes, which come first."""
    change_config(folder, dtype=stored, torch_dtype=None)
    model = ours(AutoModelForCausalLM, folder)
    assert {tensor.dtype for tensor in state_of(model).values()} == {BF16}


def test_layers_on_disk(folder: Path, tmp_path: Path) -> None:
    expected = model_state(numbers_of(folder), MOE)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.rotary_emb": "cpu", "model.layers": "disk"}
    model = ours(
        AutoModelForCausalLM, folder, device_map=places, offload_folder=tmp_path / "offload"
    )
    from accelerate.utils import OffloadedWeightsLoader

    reader = OffloadedWeightsLoader(save_folder=str(tmp_path / "offload"))
    state = state_of(model) | {name: reader[name] for name in reader}
    assert_equal(state, expected)


def test_scales_of_activations_and_caches_go_with_a_finding(folder: Path) -> None:
    expected = model_state(numbers_of(folder), MOE)
    layer = "model.layers.0.self_attn"
    names = [f"{layer}.k_proj.k_scale", f"{layer}.v_proj.v_scale", f"{layer}.q_proj.input_scale"]
    change(folder, lambda tensors: tensors.update({n: torch.tensor(0.5) for n in names}))
    model, info = ours(AutoModelForCausalLM, folder, output_loading_info=True)
    assert not any(info.values()), info
    assert_equal(state_of(model), expected)
    config = AutoConfig.from_pretrained(folder)
    with loadstone.skeleton():
        skeleton = AutoModelForCausalLM.from_config(config, dtype=BF16)
    plan = loadstone.plan(skeleton, folder, rules="transformers", unexpected="error")
    plan.require_ok()
    told = [finding for finding in plan.findings if set(finding.sources) == set(names)]
    assert [finding.severity for finding in told] == ["info"]
    assert "3 tensors" in told[0].message


def test_other_tensors_that_nobody_wants_are_unexpected(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.other_scale": torch.tensor(0.5)}))
    _, info = ours(AutoModelForCausalLM, folder, output_loading_info=True)
    assert info["unexpected_keys"] == {"model.other_scale"}


def test_experts_of_a_model_that_is_published_in_stacks(tmp_path: Path) -> None:
    """Encodings store experts separately, but transformers reads these experts only in stacks."""
    case = by_name("qwen3_vl_moe")
    source = write_checkpoint(case, tmp_path / "source", "public")
    loadstone.convert(source, tmp_path / "out", quantize="mxfp4")
    numbers = numbers_of(tmp_path / "out")
    model, info = ours(case.cls, tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    stem = "model.language_model.layers.0.mlp.experts"
    state = state_of(model)
    for expert in range(4):
        gate, up, down = (
            numbers[f"{stem}.{expert}.{leaf}_proj.weight"] for leaf in ("gate", "up", "down")
        )
        values = {"gate_up": state[f"{stem}.gate_up_proj"][expert]}
        values["down"] = state[f"{stem}.down_proj"][expert]
        assert_equal(values, {"gate_up": torch.cat([gate, up]), "down": down})
    _, info = case.cls.from_pretrained(tmp_path / "out-back", output_loading_info=True)
    assert f"{stem}.gate_up_proj" in info["missing_keys"], "the control"


# --- errors before anything is read ---------------------------------------------------------------

EXPERT = "model.layers.0.mlp.experts.1.up_proj.weight"


@pytest.mark.parametrize("suffix", ["_scale", "_scale_2"])
def test_a_lost_scale_is_named(folder: Path, suffix: str) -> None:
    change(folder, lambda tensors: tensors.__delitem__(EXPERT + suffix))
    for load in (ours, patched):
        with pytest.raises(loadstone.Error) as caught:
            load(AutoModelForCausalLM, folder)
        assert caught.value.code == "q.scale_missing"
        assert EXPERT in str(caught.value)


def test_a_lost_expert_is_named(folder: Path) -> None:
    def lose(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(EXPERT)]:
            del tensors[name]

    change(folder, lose)
    with pytest.raises(loadstone.PlanError) as caught:
        ours(AutoModelForCausalLM, folder)
    assert caught.value.code == "plan.missing"
    assert EXPERT in str(caught.value)


def test_a_claim_that_no_tensor_bears_out_is_a_warning(
    sources: Callable[[Source], Path], tmp_path: Path
) -> None:
    model = ours(AutoModelForCausalLM, sources(MOE))
    model.save_pretrained(tmp_path / "plain")
    change_config(tmp_path / "plain", quantization_config={"quant_method": "modelopt"})
    with pytest.warns(UserWarning, match="no tensor has a known encoding"):
        again = ours(AutoModelForCausalLM, tmp_path / "plain")
    assert_equal(state_of(again), state_of(model))


# ---- formats for which transformers has a quantizer


def patched(cls: Any, folder: Path, **options: Any) -> Any:
    with loadstone.patch("transformers"):
        return cls.from_pretrained(folder, **options)


GPTQ = packed_gptq.Gptq(is_symmetric=False, is_ordered=True)
IN_WORDS: dict[str, tuple[Callable[..., None], Any, dict[str, Any]]] = {
    "gptq": (packed_gptq.add_gptq, GPTQ, GPTQ.config),
    "awq": (packed_gptq.add_awq, 64, packed_gptq.awq_config(64)),
}


@pytest.fixture(params=IN_WORDS)
def in_words(
    request: pytest.FixtureRequest, sources: Callable[[Source], Path], tmp_path: Path
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a llama in GPTQ or AWQ, whose quantizers need packages that are not installed."""
    add, how, section = IN_WORDS[request.param]
    source = sources(Source("llama"))
    checkpoint = Checkpoint(8)
    for name, tensor in tensors_of(source).items():
        if ".layers." in name and tensor.dim() == 2:
            rows, columns = tensor.shape
            add(checkpoint, name.removesuffix(".weight"), how, columns, rows)
        else:
            checkpoint.add_plain(name, tensor)
    for name in [name for name in checkpoint.stored if name.endswith(".bias")]:
        del checkpoint.stored[name], checkpoint.numbers[name]
    config = json.loads((source / "config.json").read_text())
    checkpoint.config = config | {"quantization_config": section}
    file = checkpoint.save(tmp_path / "words")
    return file.path, {name: tensor.to(BF16) for name, tensor in file.numbers.items()}


def test_a_quantizer_without_its_package_is_replaced(
    in_words: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, expected = in_words
    with pytest.raises(ImportError):
        AutoModelForCausalLM.from_pretrained(folder)
    for load in (ours, patched):
        with pytest.warns(UserWarning, match="the library's quantizer for .* cannot work") as told:
            model = load(AutoModelForCausalLM, folder)
        assert len([warning for warning in told if "cannot work" in str(warning.message)]) == 1
        assert_equal(state_of(model), expected)


def test_the_library_may_be_asked_for(in_words: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = in_words
    with pytest.raises(ImportError):
        ours(AutoModelForCausalLM, folder, dequantize=False)


def test_what_no_codec_decodes_is_the_librarys_error(
    in_words: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, expected = in_words
    save_file(expected, folder / "model.safetensors", metadata={"format": "pt"})
    for load in (ours, patched):
        with pytest.raises(ImportError):
            load(AutoModelForCausalLM, folder)


def test_a_registered_quantizer_is_the_librarys(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load uses a registered third-party quantizer first, except with dequantize=True."""

    class Config:
        @classmethod
        def from_dict(cls, section: dict[str, Any]) -> Any:
            raise RuntimeError("asked")

    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "modelopt", Config)
    with pytest.raises(RuntimeError, match="asked"):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.warns(UserWarning, match="cannot work here .asked."):
        ours(AutoModelForCausalLM, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(AutoModelForCausalLM, folder, dequantize=True)


# ---- compressed-tensors


def test_a_config_of_its_own_asks_for_the_library(
    sources: Callable[[Source], Path], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    options = {"quantize": "fp8-channel", "style": "compressed-tensors"}
    loadstone.convert(sources(Source("llama")), tmp_path / "out", **options)
    asked = transformers.CompressedTensorsConfig()
    model = patched(AutoModelForCausalLM, tmp_path / "out", quantization_config=asked)
    assert type(model.hf_quantizer).__name__ == "CompressedTensorsHfQuantizer"
    with pytest.raises(loadstone.Error, match="or dequantize=True"):
        ours(AutoModelForCausalLM, tmp_path / "out", dequantize=False)
    wish = transformers.CompressedTensorsConfig(dequantize=True)
    model = patched(AutoModelForCausalLM, tmp_path / "out", quantization_config=wish)
    assert getattr(model, "hf_quantizer", None) is None
    assert_equal(state_of(model), numbers_of(tmp_path / "out"))


def test_without_its_package(
    sources: Callable[[Source], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load does not warn, because it does not need the package."""
    import sys

    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    options = {"quantize": "nvfp4", "style": "compressed-tensors"}
    loadstone.convert(sources(MOE), tmp_path / "out", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = ours(AutoModelForCausalLM, tmp_path / "out")
    assert_equal(state_of(model), model_state(numbers_of(tmp_path / "out"), MOE))


# ---- bitsandbytes


def test_experts_of_a_bitsandbytes_folder_are_dequantized(
    sources: Callable[[Source], Path], tmp_path: Path
) -> None:
    """The conversion stores experts as linear layers, but transformers fuses them."""
    pytest.importorskip("bitsandbytes")
    loadstone.convert(sources(MOE), tmp_path / "out", quantize="int8")
    with pytest.warns(UserWarning, match="cannot store codes"):
        model = ours(AutoModelForCausalLM, tmp_path / "out")
    layer = model.model.layers[0]
    assert type(layer.self_attn.q_proj).__name__ == "Linear8bitLt"
    expected = model_state(numbers_of(tmp_path / "out"), MOE)
    for name in ("gate_up_proj", "down_proj"):
        experts = {name: getattr(layer.mlp.experts, name).detach()}
        assert_equal(experts, {name: expected[f"model.layers.0.mlp.experts.{name}"]})


def test_quantized_anew_on_the_way(folder: Path, tmp_path: Path) -> None:
    """One load dequantizes ModelOpt's layouts and quantizes to bitsandbytes'."""
    pytest.importorskip("bitsandbytes")
    chosen = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": BF16,
    }
    numbers_of(folder)
    config = transformers.BitsAndBytesConfig(**chosen)
    expected = ours(AutoModelForCausalLM, tmp_path / "modelopt-back", quantization_config=config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        config = transformers.BitsAndBytesConfig(**chosen)
        model = ours(AutoModelForCausalLM, folder, quantization_config=config)
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit"
    assert_equal(state_of(model), state_of(expected))


# --- cached recipes -------------------------------------------------------------------------------


def test_kept_recipes_are_those_of_the_very_decoding(
    sources: Callable[[Source], Path], tmp_path: Path
) -> None:
    """Only the config has the FP8 block size; names and shapes do not reveal it."""
    loadstone.convert(sources(Source("llama")), tmp_path / "out", quantize="fp8-block")
    state = {}
    for _ in range(2):  # the second time with recipes from the cache
        state = state_of(ours(AutoModelForCausalLM, tmp_path / "out"))
        assert_equal(state, numbers_of(tmp_path / "out"))
    kept = list((tmp_path / "cache").rglob("*.json"))
    assert len(kept) == 1

    def halve(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("_scale"):
                tensors[name] = tensors[name].squeeze(3).squeeze(1).contiguous()

    change(tmp_path / "out", halve)
    again = state_of(ours(AutoModelForCausalLM, tmp_path / "out"))
    assert_equal(again, state)
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 2
