"""Tests which modules a conversion to bitsandbytes' encodings quantizes, and the codes' layout.

The expected values are those of transformers' own quantized files and dequantized weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from pairs import pairs
from safetensors.torch import load_file, save_file

pytest.importorskip("bitsandbytes")
import bitsandbytes as bnb
import peft
from bitsandbytes_checkpoints import KINDS, config
from transformers import EncoderDecoderModel
from transformers.integrations.bitsandbytes import dequantize_bnb_weight
from transformers.pytorch_utils import Conv1D
from transformers_models import CASES, ModelCase, by_name, randomise_all

import loadstone

QUANTIZED = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
ENCODINGS = ("nf4", "fp4", "int8")
SMALL = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 64}

CONV1D = {
    "gpt2": ModelCase("gpt2", "GPT2LMHeadModel", SMALL),
    "gpt2 base": ModelCase("gpt2", "GPT2Model", SMALL),
    "openai-gpt": ModelCase("openai-gpt", "OpenAIGPTLMHeadModel", SMALL),
    "imagegpt": ModelCase("imagegpt", "ImageGPTModel", SMALL),
    "decision_transformer": ModelCase(
        "decision_transformer", "DecisionTransformerModel", SMALL | {"hidden_size": 64}
    ),
    "clvp": ModelCase("clvp", "ClvpForCausalLM", SMALL),
}
# Models whose modules have the same names as Conv1D modules, but are nn.Linear.
LINEAR = {
    "gpt_bigcode": ModelCase("gpt_bigcode", "GPTBigCodeForCausalLM", SMALL),
    "starcoder2": ModelCase(
        "starcoder2",
        "Starcoder2ForCausalLM",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 64,
        },
    ),
}


def build(name: str) -> Any:
    if name != "encoder-decoder":
        return (CONV1D | LINEAR)[name].build(dtype=torch.bfloat16)
    decoder = CONV1D["gpt2"].config()
    decoder.is_decoder = decoder.add_cross_attention = True
    encoder = by_name("bert").config()
    encoder.intermediate_size = 128  # bitsandbytes misreads rows that end within a block
    made = EncoderDecoderModel.config_class.from_encoder_decoder_configs(encoder, decoder)
    return randomise_all(EncoderDecoderModel(made).eval().bfloat16(), 0)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def library_values(model: Any) -> dict[str, torch.Tensor]:
    """Return the dequantized weights of transformers' quantized layers, in the plain layout."""
    values = {}
    for name, module in model.named_modules():
        if not isinstance(module, QUANTIZED):
            continue
        weight = dequantize_bnb_weight(module.weight, getattr(module, "state", None))
        is_turned = issubclass(module.source_cls, Conv1D)
        values[f"{name}.weight"] = (weight.T if is_turned else weight).to(torch.bfloat16)
    return values


def by_python(folder: Path, target: Path, cls: Any) -> dict[str, torch.Tensor]:
    loadstone.convert(folder, target, dequantize=True)
    return cls.from_pretrained(target, dtype=torch.bfloat16).state_dict()


def by_command(folder: Path, target: Path, cls: Any) -> dict[str, torch.Tensor]:
    done = run("convert", folder, target, "--dequantize")
    assert done.returncode == 0, done.stderr
    return cls.from_pretrained(target, dtype=torch.bfloat16).state_dict()


def by_merge(folder: Path, target: Path, cls: Any) -> dict[str, torch.Tensor]:
    loadstone.merge([(str(folder), 0.5), (str(folder), 0.5)], target)
    return cls.from_pretrained(target, dtype=torch.bfloat16).state_dict()


def by_adapter(folder: Path, target: Path, cls: Any) -> dict[str, torch.Tensor]:
    model = loadstone.transformers.from_pretrained(
        cls, folder, dequantize=True, dtype=torch.bfloat16
    )
    return model.state_dict()


def by_patch(folder: Path, target: Path, cls: Any) -> dict[str, torch.Tensor]:
    """Load the model without dequantizing, then dequantize its layers."""
    with loadstone.patch("transformers"):
        return library_values(cls.from_pretrained(folder, dtype=torch.bfloat16))


DOORS: dict[str, Callable[..., dict[str, torch.Tensor]]] = {
    "convert": by_python,
    "command": by_command,
    "merge": by_merge,
    "adapter": by_adapter,
    "patch": by_patch,
}


def library_folder(name: str, kind: str, folder: Path) -> tuple[Any, Path, Path]:
    """Return the class, a plain checkpoint, and the one that transformers quantized from it."""
    model = build(name)
    model.save_pretrained(folder / "plain")
    cls = type(model)
    library = cls.from_pretrained(
        folder / "plain", quantization_config=config(kind), dtype=torch.bfloat16
    )
    library.save_pretrained(folder / "library")
    return cls, folder / "plain", folder / "library"


@pytest.mark.parametrize(
    ("name", "kind", "door"), pairs([*CONV1D, *LINEAR, "encoder-decoder"], list(KINDS), list(DOORS))
)
def test_values_lie_as_the_model_has_them(name: str, kind: str, door: str, tmp_path: Path) -> None:
    """LINEAR is the control: a rule on module names alone would transpose its weights."""
    cls, plain, library = library_folder(name, kind, tmp_path)
    expected = library_values(cls.from_pretrained(library, dtype=torch.bfloat16))
    original = build(name).state_dict()
    assert expected
    found = DOORS[door](library, tmp_path / "out", cls)
    for weight, value in expected.items():
        assert found[weight].shape == original[weight].shape, weight
        assert torch.equal(found[weight], value), weight
    assert run("verify", plain, library).returncode == 0
    if door == "convert":
        assert run("verify", library, tmp_path / "out").returncode == 0


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_config_decides_which_way_values_lie(kind: str, tmp_path: Path) -> None:
    """Control: if the config's model type uses nn.Linear, loadstone does not transpose values."""
    _, plain, library = library_folder("gpt2", kind, tmp_path)
    name = "transformer.h.0.attn.c_proj.weight"
    loadstone.convert(library, tmp_path / "right", dequantize=True)
    file = library / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "gpt_bigcode"}))
    loadstone.convert(library, tmp_path / "wrong", dequantize=True)
    right, wrong = tensors_in(tmp_path / "right")[name], tensors_in(tmp_path / "wrong")[name]
    assert torch.equal(right, wrong.T)
    assert not torch.equal(right, wrong)
    assert run("verify", plain, library).returncode == 1


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", [*CONV1D, *LINEAR, "encoder-decoder"])
def test_files_are_those_that_the_library_saves(name: str, encoding: str, tmp_path: Path) -> None:
    model = build(name)
    cls, plain, ours = type(model), tmp_path / "plain", tmp_path / "ours"
    model.save_pretrained(plain)
    loadstone.convert(plain, ours, quantize=encoding)
    skipped = json.loads((ours / "config.json").read_text())["quantization_config"]
    chosen = config(encoding, llm_int8_skip_modules=skipped["llm_int8_skip_modules"])
    library = cls.from_pretrained(plain, quantization_config=chosen, dtype=torch.bfloat16)
    library.save_pretrained(tmp_path / "library")
    found, expected = tensors_in(ours), tensors_in(tmp_path / "library")
    assert found.keys() == expected.keys()
    codes = 0
    for tensor, value in expected.items():
        if "quant_state" in tensor:
            continue  # its JSON text may differ in whitespace; transformers parses it below
        assert found[tensor].dtype == value.dtype, tensor
        assert torch.equal(found[tensor].squeeze(), value.squeeze()), tensor
        codes += value.dtype in (torch.uint8, torch.int8)
    assert codes
    opened = library_values(cls.from_pretrained(ours, dtype=torch.bfloat16))
    assert opened.keys() == library_values(library).keys()
    for weight, value in library_values(library).items():
        assert torch.equal(opened[weight], value), weight
    # Control: quantizing the plain weight without transposing it gives different codes.
    if name in CONV1D:
        weight = next(each for each in opened if each.endswith("c_fc.weight"))
        plain_codes = loadstone.quantize(tensors_in(plain)[weight], encoding).parts["data"]
        assert not torch.equal(plain_codes.flatten(), expected[weight].flatten())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("module", ["attn.c_proj", "attn.c_attn"])
def test_an_adapter_is_merged_into_conv1d(module: str, kind: str, tmp_path: Path) -> None:
    """The matrix of ``attn.c_proj`` is square, so its shape does not reveal a wrong transpose."""
    cls, plain, library = library_folder("gpt2", kind, tmp_path)
    wish = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[module], fan_in_fan_out=True)
    model = peft.get_peft_model(cls.from_pretrained(plain, dtype=torch.bfloat16), wish)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                values = torch.randint(-4, 5, parameter.shape, generator=generator)
                parameter.copy_(values / 8)  # sums are exact, whatever the order of additions
    model.save_pretrained(tmp_path / "adapter")
    loadstone.convert(library, tmp_path / "values", dequantize=True, dtype="float32")
    base = cls.from_pretrained(tmp_path / "values", dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    expected = {name: value.bfloat16() for name, value in merged.state_dict().items()}
    done = run("merge", library, "--lora", tmp_path / "adapter", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    found = tensors_in(tmp_path / "out")
    for layer in range(2):
        weight = f"transformer.h.{layer}.{module}.weight"
        assert torch.equal(found[weight], expected[weight]), weight
        assert not torch.equal(found[weight], tensors_in(tmp_path / "values")[weight])
    # The flag of a quantized model's adapter must have no effect, as in peft.
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"fan_in_fan_out": False}))
    again = loadstone.merge([str(library)], tmp_path / "again", lora=[str(tmp_path / "adapter")])
    assert again
    for name, value in tensors_in(tmp_path / "again").items():
        assert torch.equal(value, found[name]), name
    # A merge rejects quantized output here, because the codes would be those of the transpose.
    command = ("merge", plain, "--lora", tmp_path / "adapter", "-o", tmp_path / "codes")
    done = run(*command, "--quantize", kind)
    assert done.returncode == 1
    assert f"transformer.h.0.{module}.weight' " in done.stderr
    assert "belongs to a Conv1D layer" in done.stderr


# --- quantized modules ----------------------------------------------------------------------------

# Models with embeddings or float32 modules inside the layers, with tied heads not named "lm_head",
# with a module name that is a suffix of others, or with a subclass of nn.Linear.
SAMPLE = ("llama", "gpt2", "t5", "umt5", "whisper", "modernbert", "bart", "opt", "mamba", "biogpt",
          "jev", "oneformer")  # fmt: skip
PARAMETERS_MAX = 20_000_000
# Models whose quantized folder transformers saves but misreads.
ITS_OWN = ("llama4", "minimax_m3_vl", "qwen4_exp_text")


def marked(names: Any) -> list[Any]:
    always = (*SAMPLE, *ITS_OWN)
    return [pytest.param(name, marks=() if name in always else pytest.mark.sweep) for name in names]


def disagreements(cls: Any, folder: Path) -> list[str]:
    """Return differences between the layers that transformers replaces and a folder's codes."""
    coded = {
        name.removesuffix(suffix)
        for name in tensors_in(folder)
        for suffix in (".weight.absmax", ".SCB")
        if name.endswith(suffix)
    }
    assert coded
    model, info = cls.from_pretrained(folder, output_loading_info=True)
    found = [f"{key}: {sorted(value)[:3]}" for key, value in info.items() if value]
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QUANTIZED)}
    if len(layers) != len(coded):  # only counts are compared, because names may differ
        found.append(f"one side alone: {sorted(layers.keys() ^ coded)[:3]}")
    for name, layer in layers.items():
        state = getattr(layer.weight, "quant_state", getattr(layer.weight, "SCB", None))
        if state is None or layer.weight.dtype not in (torch.uint8, torch.int8):
            found.append(f"{name} has no codes")
    head = model.get_output_embeddings()
    return found + ["the head is quantized"] * isinstance(head, QUANTIZED)


def is_read_otherwise(cls: Any, folder: Path) -> bool:
    """Return true if transformers does not read the folder's codes as loadstone wrote them."""
    try:
        return bool(disagreements(cls, folder))
    except RuntimeError:
        return True


@pytest.mark.parametrize("encoding", ["nf4", "int8"])
@pytest.mark.parametrize("name", marked(case.name for case in CASES))
def test_the_library_finds_the_same_modules(name: str, encoding: str, tmp_path: Path) -> None:
    case = by_name(name)
    with torch.device("meta"):
        if sum(each.numel() for each in case.cls(case.config()).parameters()) > PARAMETERS_MAX:
            pytest.skip("a large model")
    case.build(dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    try:
        report = loadstone.convert(tmp_path / "plain", tmp_path / "out", quantize=encoding)
    except loadstone.Error as error:
        # The model has no list of layers, or its experts are not numbered from 0.
        assert error.code in ("convert.left_alone", "plan.missing")
        assert name not in SAMPLE
        return
    folder = tmp_path / "out"
    unread = [each for each in report.findings if each.code == "convert.unread"]
    if unread:  # loadstone warned that transformers cannot read the codes
        assert name not in SAMPLE and is_read_otherwise(case.cls, folder)
        if not all(".experts." in source for each in unread for source in each.sources):
            return  # no option helps; such a folder must be dequantized
        folder = tmp_path / "advised"
        is_stacked = "--experts separate" in unread[0].suggestion
        options = {"experts": "separate"} if is_stacked else {"exclude": [r"\.experts\."]}
        advised = loadstone.convert(tmp_path / "plain", folder, quantize=encoding, **options)
        assert not any(each.code == "convert.unread" for each in advised.findings)
    assert disagreements(case.cls, folder) == []


@pytest.mark.parametrize("encoding", ["nf4", "int8"])
@pytest.mark.parametrize("name", ITS_OWN)
def test_the_library_reads_its_own_folder_otherwise(
    name: str, encoding: str, tmp_path: Path
) -> None:
    case = by_name(name)
    case.build(dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    chosen = config(encoding)
    own = case.cls.from_pretrained(tmp_path / "plain", quantization_config=chosen)
    own.save_pretrained(tmp_path / "own")
    assert is_read_otherwise(case.cls, tmp_path / "own")


@pytest.mark.parametrize("encoding", ["nf4", "int8"])
def test_modules_whose_names_end_in_weight_stay_plain(encoding: str, tmp_path: Path) -> None:
    """Control: on request loadstone quantizes these modules, but transformers finds no codes."""
    case = by_name("qwen4_exp_text")
    case.build(dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    for folder, include in (("usual", []), ("asked", ["block_inject_weight"])):
        report = loadstone.convert(
            tmp_path / "plain",
            tmp_path / folder,
            quantize=encoding,
            include=include,
            exclude=[r"\.experts\."],
        )
        warned = [each for each in report.findings if each.code == "convert.unread"]
        assert bool(warned) == bool(include)
        assert is_read_otherwise(case.cls, tmp_path / folder) == bool(include)


@pytest.mark.parametrize("name", ["whisper", "t5"])
def test_a_skip_list_without_a_name_is_seen(name: str, tmp_path: Path) -> None:
    """Control: ``disagreements`` detects a head that is missing in the skip list."""
    case = by_name(name)
    case.build(dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    loadstone.convert(tmp_path / "plain", tmp_path / "out", quantize="nf4")
    file = tmp_path / "out" / "config.json"
    text = json.loads(file.read_text())
    head = {"whisper": "proj_out", "t5": "lm_head"}[name]
    modules = text["quantization_config"]["llm_int8_skip_modules"]
    text["quantization_config"]["llm_int8_skip_modules"] = [
        each for each in modules if not re.match(each, head)
    ]
    file.write_text(json.dumps(text))
    assert "the head is quantized" in disagreements(case.cls, tmp_path / "out")


def test_a_subclass_of_linear_stays_plain(tmp_path: Path) -> None:
    """transformers does not replace FalconLinear, but the caller can still request codes."""
    by_name("falcon").build(dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    with pytest.raises(loadstone.Error, match="no tensor would be quantized to nf4"):
        loadstone.convert(tmp_path / "plain", tmp_path / "out", quantize="nf4")
    loadstone.convert(tmp_path / "plain", tmp_path / "out", quantize="nf4", include=[r"\.mlp\."])
    loadstone.convert(tmp_path / "plain", tmp_path / "fp8", quantize="fp8")
    for folder in ("out", "fp8"):  # control
        dtypes = {value.dtype for value in tensors_in(tmp_path / folder).values()}
        assert dtypes & {torch.uint8, torch.float8_e4m3fn}


def test_weights_that_two_modules_share_stay_plain(tmp_path: Path) -> None:
    def make() -> Any:
        model = torch.nn.Sequential(
            torch.nn.Embedding(10, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 10)
        )
        model[2].weight = model[0].weight
        return model.to(torch.bfloat16)

    stored = {name: each.clone() for name, each in make().state_dict().items()}
    save_file(stored | {"2.weight": stored["0.weight"].clone()}, tmp_path / "m.safetensors")
    with loadstone.skeleton():
        model = make()
    loadstone.load(model, tmp_path / "m.safetensors", quantize="nf4")
    assert isinstance(model[1], bnb.nn.Linear4bit)
    assert type(model[2]) is torch.nn.Linear and model[2].weight is model[0].weight
    assert torch.equal(model[2].weight, stored["0.weight"])


@pytest.mark.parametrize("encoding", ["nf4", "int8"])
def test_codes_without_a_place_are_dequantized(encoding: str, tmp_path: Path) -> None:
    """transformers keeps T5's ``wo`` in float32, and does not replace embeddings."""
    chosen = [r"DenseReluDense\.wo", r"relative_attention_bias"]
    case = by_name("t5")
    case.build(dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    loadstone.convert(tmp_path / "plain", tmp_path / "out", quantize=encoding, include=chosen)
    loadstone.convert(tmp_path / "out", tmp_path / "values", dequantize=True)
    with pytest.warns(UserWarning, match="cannot store codes"):
        model = loadstone.transformers.from_pretrained(case.cls, tmp_path / "out")
    assert any(isinstance(module, QUANTIZED) for module in model.modules())  # control
    decoded = [name for name in model.state_dict() if any(re.search(each, name) for each in chosen)]
    assert len([name for name in decoded if name.endswith(".weight")]) == len(decoded) == 6
    values = tensors_in(tmp_path / "values")
    for name in decoded:
        assert torch.equal(model.state_dict()[name].bfloat16(), values[name]), name
