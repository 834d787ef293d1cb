"""Codes of quantized tensors are taken for numbers by no door: every one that loads, all encodings
that we write, both styles, and the layouts of others."""

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
# The codes have a name of their own there, which no plain model has.
RENAMED = {("nvfp4", "compressed-tensors"), ("mxfp4", "compressed-tensors")}
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
    """A plain tiny Llama with what the command line needs to load it."""
    folder = tmp_path_factory.mktemp("codes")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config()).to(torch.bfloat16).save_pretrained(folder / "plain")
    loadstone.save_skeleton(skeleton(), folder / "skeleton.json")
    return folder


@pytest.fixture(scope="module")
def cell(original):
    """The folder of the same model in an encoding and a style, made once."""

    def made(encoding, style):
        folder = original / f"{encoding}-{style}"
        if not folder.exists():
            options = {} if style == "bitsandbytes" else {"style": style}
            loadstone.convert(original / "plain", folder, quantize=encoding, **options)
        return folder

    return made


def by_load(folder, _):
    loadstone.load(skeleton(), folder)


def by_load_into_memory(folder, _):
    model = transformers.LlamaForCausalLM(config()).to(torch.bfloat16)
    loadstone.load(model, folder)


def by_auto_dtype(folder, _):
    loadstone.load(skeleton(), folder, dtype="auto")


def by_float32(folder, _):
    loadstone.load(skeleton(), folder, dtype=torch.float32, unexpected="ignore")


def by_plan(folder, _):
    loadstone.plan(skeleton(), folder).require_ok()


def by_saved_plan(folder, root):
    plan = loadstone.plan(skeleton(), folder)
    plan.save(root / "plan.json")
    loadstone.Plan.load(root / "plan.json").require_ok()


def by_rules(folder, _):
    rules = [{"op": "rename", "sources": ["model\\.(.*)"], "targets": ["model.$1"]}]
    loadstone.load(skeleton(), folder, rules=rules)


def by_transformers_rules(folder, _):
    loadstone.load(skeleton(), folder, rules="transformers")


def by_quantize(folder, _):
    pytest.importorskip("bitsandbytes")
    loadstone.load(skeleton(), folder, quantize="nf4")


def by_from_pretrained(folder, _):
    model = transformers.AutoModelForCausalLM
    loadstone.transformers.from_pretrained(model, folder, dtype=torch.bfloat16)


DOORS = [
    by_load,
    by_load_into_memory,
    by_auto_dtype,
    by_float32,
    by_plan,
    by_saved_plan,
    by_rules,
]
# transformers' own conversion code runs here, and stops where bytes would be cast to BF16.
TRACING = [by_transformers_rules, by_from_pretrained]


def refusal(door, folder, root):
    with pytest.raises(loadstone.PlanError) as caught:
        door(folder, root)
    return caught.value


@pytest.mark.parametrize("encoding, style", CELLS)
def test_no_door_of_ours_takes_codes_for_numbers(cell, original, encoding, style):
    folder = cell(encoding, style)
    for door in DOORS:
        error = refusal(door, folder, original)
        if (encoding, style) in RENAMED:
            assert error.code == "plan.missing", door.__name__
            continue
        refused = [f for f in error.findings if f.code == "plan.encoding" and f.severity == "error"]
        assert UP in {finding.target for finding in refused}, door.__name__
        message = next(finding for finding in refused if finding.target == UP)
        assert "--dequantize" in message.suggestion
        assert len(message.sources) > 1, "its scales are named"


@pytest.mark.parametrize("encoding", [*MODELOPT, "int4", "int4-awq"])
def test_no_traced_door_takes_codes_of_modelopt_for_numbers(cell, original, encoding):
    for door in TRACING:
        error = refusal(door, cell(encoding, "modelopt"), original)
        is_float = encoding.startswith("fp8") or encoding == "mxfp8"
        assert error.code == ("plan.encoding" if is_float else "plan.untraceable"), door.__name__


@pytest.mark.parametrize("encoding, style", [("fp8", "modelopt"), ("mxfp8", "compressed-tensors")])
def test_quantizing_on_load_does_not_take_codes_for_numbers(cell, original, encoding, style):
    assert refusal(by_quantize, cell(encoding, style), original).code == "plan.encoding"


@pytest.mark.parametrize("encoding, style", CELLS)
def test_the_command_does_not_take_codes_for_numbers(cell, original, encoding, style):
    folder = cell(encoding, style)
    for verb in ("plan", "load"):
        command = ["loadstone", verb, folder, "--skeleton", original / "skeleton.json", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        expected = "plan.missing" if (encoding, style) in RENAMED else "plan.encoding"
        assert f'"{expected}"' in done.stdout


@pytest.mark.parametrize("encoding, style", [("fp8", "modelopt"), ("nvfp4", "compressed-tensors")])
def test_what_was_dequantized_loads_through_the_same_doors(cell, original, encoding, style):
    """The control: the doors are shut to codes alone."""
    folder = original / f"numbers-{encoding}-{style}"
    loadstone.convert(cell(encoding, style), folder, dequantize=True)
    for door in [*DOORS, *TRACING]:
        door(folder, original)


def as_others(tensors, style):
    """One weight of the plain model under the names of other writers."""
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
    return tensors | {UP: codes, stem + leaf: scale}


@pytest.mark.parametrize(
    "style",
    [
        "DeepSeek",
        "inference code of DeepSeek",
        "Comfy",
        "Mistral",
        "int8 of bitsandbytes",
    ],
)
def test_layouts_of_others_are_not_taken_for_numbers(original, tmp_path, style):
    save_file(
        as_others(load_file(original / "plain/model.safetensors"), style),
        tmp_path / "m.safetensors",
    )
    for door in DOORS:
        error = refusal(door, tmp_path, tmp_path)
        assert error.code == "plan.encoding", door.__name__
        assert [f.target for f in error.findings if f.severity == "error"] == [UP]


def test_mxfp4_blocks_are_not_taken_for_numbers(tmp_path):
    tensors = {
        "experts_blocks": torch.zeros(4, 2, 16, dtype=torch.uint8),
        "experts_scales": torch.zeros(4, 2, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    model = torch.nn.Module()
    model.register_parameter("experts", torch.nn.Parameter(torch.zeros(4, 64)))
    rules = [{"op": "rename", "sources": ["experts_blocks"], "targets": ["experts"]}]
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.load(model, tmp_path, rules=rules)
    assert caught.value.code == "plan.encoding"


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
