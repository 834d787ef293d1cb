"""Codes of quantized tensors decode to the right values at every entry point that loads, for all
encodings that loadstone writes and both styles. Other layouts decode or are rejected."""

import json
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

import loadstone

transformers = pytest.importorskip("transformers")

MODELOPT = ("fp8", "fp8-channel", "fp8-block", "int8-channel", "nvfp4", "mxfp4", "mxfp8")
CELLS = [
    *((encoding, "modelopt") for encoding in (*MODELOPT, "int4", "int4-awq")),
    *((encoding, "compressed-tensors") for encoding in MODELOPT),
    *((encoding, "bitsandbytes") for encoding in ("nf4", "fp4", "int8")),
]
UP = "model.layers.0.mlp.up_proj.weight"


def config():
    return transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def skeleton():
    with loadstone.skeleton():
        return transformers.LlamaForCausalLM(config()).to(torch.bfloat16)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Write a plain tiny Llama, and the skeleton with which the command loads it."""
    folder = tmp_path_factory.mktemp("codes")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config()).to(torch.bfloat16).save_pretrained(folder / "plain")
    loadstone.save_skeleton(skeleton(), folder / "skeleton.json")
    return folder


@pytest.fixture(scope="module")
def cell(original):
    """Return a function that quantizes the model to a folder, once for each encoding and style."""

    def made(encoding, style):
        folder = original / f"{encoding}-{style}"
        if not folder.exists():
            options = {} if style == "bitsandbytes" else {"style": style}
            loadstone.convert(original / "plain", folder, quantize=encoding, **options)
        return folder

    return made


@pytest.fixture(scope="module")
def numbers(cell, original):
    """Return a function that dequantizes a folder's tensors, once for each dtype."""
    made = {}

    def of(encoding, style, dtype):
        folder = original / f"numbers-{encoding}-{style}-{dtype}"
        if not folder.exists():
            loadstone.convert(cell(encoding, style), folder, dequantize=True, dtype=dtype)
            made[folder] = load_file(folder / "model.safetensors")
        return made[folder]

    return of


def loaded(model, folder, **options):
    loadstone.load(model, folder, **options)
    return model


def by_load(folder, _):
    return loaded(skeleton(), folder)


def by_load_into_memory(folder, _):
    return loaded(transformers.LlamaForCausalLM(config()).to(torch.bfloat16), folder)


def by_auto_dtype(folder, _):
    return loaded(skeleton(), folder, dtype="auto")


def by_float32(folder, _):
    return loaded(skeleton(), folder, dtype=torch.float32, unexpected="error")


def by_saved_plan(folder, root):
    plan = loadstone.plan(skeleton(), folder)
    plan.save(root / "plan.json")
    model = skeleton()
    loadstone.Plan.load(root / "plan.json").execute(model=model)
    return model


def by_rules(folder, _):
    rules = [{"op": "rename", "sources": ["model\\.(.*)"], "targets": ["model.$1"]}]
    return loaded(skeleton(), folder, rules=rules)


def by_transformers_rules(folder, _):
    return loaded(skeleton(), folder, rules="transformers")


DOORS = [by_load, by_load_into_memory, by_auto_dtype, by_float32, by_saved_plan, by_rules]


def assert_numbers(model, expected):
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def refusal(door, folder, root):
    with pytest.raises(loadstone.PlanError) as caught:
        door(folder, root)
    return caught.value


@pytest.mark.parametrize("encoding, style", CELLS)
def test_every_door_of_ours_makes_numbers_of_codes(cell, numbers, original, encoding, style):
    for door in DOORS:
        model = door(cell(encoding, style), original)
        dtype = "F32" if door is by_float32 else "BF16"
        assert_numbers(model, numbers(encoding, style, dtype))


@pytest.mark.parametrize("encoding", [*MODELOPT, "int4", "int4-awq"])
def test_rules_of_transformers_move_numbers(cell, numbers, original, encoding):
    """The operations of transformers' conversion rules apply to decoded values."""
    model = by_transformers_rules(cell(encoding, "modelopt"), original)
    assert_numbers(model, numbers(encoding, "modelopt", "BF16"))


@pytest.mark.parametrize("encoding, style", [("fp8", "modelopt"), ("mxfp8", "compressed-tensors")])
def test_numbers_are_quantized_anew_on_load(cell, numbers, original, encoding, style):
    pytest.importorskip("bitsandbytes")
    first = loaded(skeleton(), cell(encoding, style), quantize="nf4")
    numbers(encoding, style, "BF16")
    second = loaded(skeleton(), original / f"numbers-{encoding}-{style}-BF16", quantize="nf4")
    for (name, one), (_, other) in zip(
        first.named_parameters(), second.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("encoding, style", CELLS)
def test_the_command_makes_numbers_of_codes(cell, original, encoding, style):
    folder = cell(encoding, style)
    for verb in ("plan", "load"):
        command = ["loadstone", verb, folder, "--skeleton", original / "skeleton.json", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def as_others(tensors, style):
    """Return the tensors with one weight quantized under the names of a different writer."""
    weight = tensors.pop(UP)
    codes = weight.to(torch.float8_e4m3fn)
    scale = torch.ones(weight.shape[0] // 128, weight.shape[1] // 128)
    stem = UP.removesuffix("weight")
    if style == "int8 of bitsandbytes":
        return tensors | {UP: weight.to(torch.int8), f"{stem}SCB": torch.ones(weight.shape[0])}
    leaf = {
        "DeepSeek": "weight_scale_inv",
        "inference code of DeepSeek": "scale",
        "Comfy": "scale_weight",
        "Mistral": "qscale_weight",
    }[style]
    return tensors | {UP: codes, stem + leaf: torch.ones(()) if style == "Comfy" else scale}


@pytest.mark.parametrize("style", ["inference code of DeepSeek", "Mistral"])
def test_layouts_that_no_codec_reads_are_refused(original, tmp_path, style):
    tensors = as_others(load_file(original / "plain/model.safetensors"), style)
    save_file(tensors, tmp_path / "m.safetensors")
    for door in DOORS:
        error = refusal(door, tmp_path, tmp_path)
        assert error.code == "plan.encoding", door.__name__
        errors = [f for f in error.findings if f.severity == "error"]
        assert [f.target for f in errors] == [UP]
        assert len(errors[0].sources) > 1, "its scales are named"


@pytest.mark.parametrize("style", ["DeepSeek", "Comfy", "int8 of bitsandbytes"])
def test_layouts_of_others_are_read(original, tmp_path, style):
    tensors = as_others(load_file(original / "plain/model.safetensors"), style)
    save_file(tensors, tmp_path / "m.safetensors")
    factor = 1 / 127 if style.startswith("int8") else 1
    expected = (tensors[UP].float() * factor).to(torch.bfloat16)
    assert torch.equal(by_load(tmp_path, tmp_path).get_parameter(UP), expected)


def test_blocks_of_mxfp4_are_renamed_as_the_numbers_that_they_are(tmp_path):
    tensors = {
        "experts_blocks": torch.randint(0, 256, (4, 2, 16), dtype=torch.uint8),
        "experts_scales": torch.full((4, 2), 127, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    made = []
    for source in ("experts_blocks", "experts"):
        model = torch.nn.Module()
        model.register_parameter("stack", torch.nn.Parameter(torch.zeros(4, 64)))
        rules = [{"op": "rename", "sources": [source], "targets": ["stack"]}]
        loadstone.load(model, tmp_path, rules=rules)
        made.append(model.get_parameter("stack"))
    assert torch.equal(made[0], made[1])
    assert set(made[0].abs().flatten().tolist()) <= {0, 0.5, 1, 1.5, 2, 3, 4, 6}


def test_fp8_without_scales_are_numbers_where_no_config_claims_more(original, tmp_path):
    tensors = load_file(original / "plain/model.safetensors")
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "m.safetensors")
    model = skeleton()
    loadstone.load(model, tmp_path)
    assert torch.equal(model.get_parameter(UP), tensors[UP].to(torch.bfloat16))
    loadstone.convert(tmp_path, tmp_path / "numbers", dequantize=True)

    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(loadstone.Error) as caught:
        loadstone.load(skeleton(), tmp_path)
    assert caught.value.code == "q.scale_missing"
    with pytest.raises(loadstone.Error) as refused:
        loadstone.convert(tmp_path, tmp_path / "none", dequantize=True)
    assert refused.value.code == "q.scale_missing"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "auto"])
def test_a_dtype_that_is_asked_for_is_that_of_numbers(tmp_path, dtype):
    tensors = {
        "linear.weight": torch.randn(128, 128).to(torch.float8_e4m3fn),
        "linear.weight_scale_inv": torch.rand(1, 1) + 1 / 3,
        "linear.bias": torch.randn(128),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    linear = torch.nn.Module()
    for name, tensor in tensors.items():
        parameter = torch.nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
        linear.register_parameter(name.removeprefix("linear."), parameter)
    model = torch.nn.Module()
    model.linear = linear
    loadstone.load(model, tmp_path, dtype=dtype)
    for name in ("linear.weight", "linear.weight_scale_inv"):
        found = model.get_parameter(name)
        assert found.dtype == tensors[name].dtype, name
        assert torch.equal(found.float(), tensors[name].float()), name
    wanted = torch.float32 if dtype == "auto" else dtype
    assert torch.equal(model.get_parameter("linear.bias"), tensors["linear.bias"].to(wanted))
