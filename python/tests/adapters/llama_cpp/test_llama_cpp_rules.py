"""Tests of conversions to GGUF by rules that were traced from llama.cpp's converter."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import llama_cpp_golden as golden
import llama_cpp_networks as networks
import llama_cpp_oracle as oracle
import numpy as np
import pytest
import torch
from codec_nibbles import low_first
from codec_scaled import power
from safetensors.torch import load_file, save_file

import loadstone
from loadstone._adapters.llama_cpp import rules
from loadstone._adapters.llama_cpp.converter import Converter
from loadstone._command import command

TOOLS = Path(__file__).parents[4] / "tools"
sys.path.insert(0, str(TOOLS))

import gguf_rules  # noqa: E402

# The converter has special functions for the tokenizers of these.
WITHOUT_TOKENIZER = ("phi3", "hunyuan", "bert")


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    """Return llama.cpp's converter; it and the rules accept the tests' tokenizers."""
    known = rules.traced_rules()
    pre = {"text": "", "names": SimpleNamespace(get=lambda _: "gpt-2")}
    monkeypatch.setattr(rules, "traced_rules", lambda: known | {"pre": pre})
    return oracle.with_any_tokenizer(monkeypatch)


CASES = [case for name in gguf_rules.ARCHITECTURES for case in gguf_rules.cases(name)]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", None])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.network)
def test_a_file_is_the_converters_own(
    converter: Converter, tmp_path: Path, case: gguf_rules.Case, dtype: str | None
) -> None:
    name = case.network
    model = networks.make(name, tmp_path / "model", **case.options, **case.fixed)
    if name == "bert":
        config = json.loads((model / "config.json").read_text())
        del config["num_key_value_heads"]  # a field of the other networks
        (model / "config.json").write_text(json.dumps(config))
    report = loadstone.convert(model, tmp_path / "out.gguf", dtype=dtype, threads=1)
    own = oracle.written(converter, model, tmp_path / "own.gguf", dtype)
    is_whole = name not in WITHOUT_TOKENIZER
    oracle.require_same_files(tmp_path / "out.gguf", own, "" if is_whole else "tokenizer.")
    [finding] = [each for each in report.findings if each.code == "convert.traced"]
    assert ("without the keys of its tokenizer" in finding.message) is not is_whole
    assert any(each.code == "convert.metadata" for each in report.findings) is not is_whole


def test_the_rules_are_those_of_the_converter() -> None:
    """Trace all rules again; `python tools/gguf_rules.py FOLDER` writes the file."""
    oracle.converter()
    assert gguf_rules.text_of(gguf_rules.trace_all(oracle.FOLDER)) == rules.FILE.read_text()


def test_the_docs_list_the_architectures_and_the_release() -> None:
    page = (TOOLS.parent / "docs" / "how-to" / "gguf-models.md").read_text()
    section = page.partition("## Without llama.cpp")[2].partition("\n## ")[0]
    table = "".join(line for line in section.splitlines() if line.startswith("|"))
    assert set(table.split("`")[1::2]) == rules.traced_rules()["architectures"].keys()
    assert f"llama-cpp-python {gguf_rules.RELEASE}" in section
    assert f"version={gguf_rules.RELEASE}\n" in (TOOLS / "llama_cpp.sh").read_text()


# --- without llama.cpp ----------------------------------------------------------------------------

GOLDEN = json.loads(golden.RULES.read_text())


@pytest.fixture(params=golden.NETWORKS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str, tmp_path: Path) -> Path:
    """Write the model of which ``GOLDEN`` has the converter's keys and a digest of its tensors."""
    return write(tmp_path / "model", GOLDEN[name])


def write(folder: Path, facts: Any, **fields: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(facts["config"] | fields))
    save_file(golden.values(facts["shapes"]), folder / "model.safetensors")
    return folder


def require_golden(path: Path, name: str) -> None:
    reader = oracle.read(path)
    assert golden.digest(reader) == GOLDEN[name]["sha256"]
    assert sorted(map(list, oracle.keys_of(reader))) == sorted(GOLDEN[name]["keys"])


def test_rules_make_the_converters_own_file(model: Path, name: str, tmp_path: Path) -> None:
    report = loadstone.convert(model, tmp_path / "out.gguf")
    require_golden(tmp_path / "out.gguf", name)
    [finding] = [each for each in report.findings if each.code == "convert.traced"]
    assert finding.severity == "info"
    assert "llama-cpp-python 0.3" in finding.message
    [finding] = [each for each in report.findings if each.code == "convert.metadata"]
    assert "tokenizer.ggml.tokens" in finding.message


def test_rules_work_in_the_command(
    model: Path, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.gguf"
    arguments = command.prepare(["convert", str(model), str(target)], tmp_path)
    assert "[convert.traced]" in capfd.readouterr().err
    rules_file, metadata = (each.partition("=")[2] for each in arguments[3:])
    loadstone.convert(model, target, rules=rules_file, metadata=Path(metadata))
    require_golden(target, name)


def test_rules_quantize_in_the_same_pass(model: Path, tmp_path: Path) -> None:
    loadstone.convert(model, tmp_path / "out.gguf", quantize="q8_0")
    types = {each.tensor_type.name for each in oracle.read(tmp_path / "out.gguf").tensors}
    assert "Q8_0" in types


def test_a_passed_converter_is_preferred(model: Path, tmp_path: Path) -> None:
    with pytest.raises(loadstone.Error, match=r"converter is not in this folder"):
        loadstone.convert(model, tmp_path / "out.gguf", converter=tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("vocab_size", 32016), ("rope_parameters", {"rope_type": "linear", "factor": 2.0}),
     ("num_experts", 4), ("architectures", ["OtherForCausalLM"])],
)  # fmt: skip
def test_other_configs_need_the_converter(tmp_path: Path, field: str, value: Any) -> None:
    model = write(tmp_path / "model", GOLDEN["llama"], **{field: value})
    with pytest.raises(loadstone.Error, match="pass converter=") as caught:
        loadstone.convert(model, tmp_path / "out.gguf")
    assert caught.value.code == "plan.options"
    assert (field if field != "architectures" else value[0]) in str(caught.value)


def test_other_tensors_need_the_converter(tmp_path: Path) -> None:
    model = write(tmp_path / "model", GOLDEN["llama"])
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"model.other.weight": torch.ones(2)}, model / "model.safetensors")
    with pytest.raises(loadstone.Error, match="do not support this tensor") as caught:
        loadstone.convert(model, tmp_path / "out.gguf")
    assert caught.value.tensor == "model.other.weight"


def with_next_layer(model: Path) -> None:
    """Add a layer beyond the config's number, as published models of DeepSeek have one."""
    tensors = load_file(model / "model.safetensors")
    more = {
        name.replace(".1.", ".2.", 1): value.clone()
        for name, value in tensors.items()
        if name.startswith("model.layers.1.")
    }
    more["model.layers.2.eh_proj.weight"] = torch.ones(2, 2)
    save_file(tensors | more, model / "model.safetensors")


def test_a_layer_beyond_the_number_is_dropped_as_in_the_converter(tmp_path: Path) -> None:
    model = write(tmp_path / "model", GOLDEN["deepseek2"])
    with_next_layer(model)
    loadstone.convert(model, tmp_path / "out.gguf")
    require_golden(tmp_path / "out.gguf", "deepseek2")


def test_a_layer_beyond_the_number_is_rejected_as_in_the_converter(tmp_path: Path) -> None:
    model = write(tmp_path / "model", GOLDEN["llama"])
    with_next_layer(model)
    with pytest.raises(loadstone.Error, match="do not support this tensor") as caught:
        loadstone.convert(model, tmp_path / "out.gguf")
    assert caught.value.tensor.startswith("model.layers.2.")


@pytest.mark.parametrize(("network", "is_kept"), [("deepseek2", False), ("llama", True)])
def test_a_tied_head_is_kept_as_in_the_converter(
    tmp_path: Path, network: str, is_kept: bool
) -> None:
    model = write(tmp_path / "model", GOLDEN[network], tie_word_embeddings=True)
    loadstone.convert(model, tmp_path / "out.gguf")
    names = {each.name for each in oracle.read(tmp_path / "out.gguf").tensors}
    assert ("output.weight" in names) is is_kept


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    model = write(tmp_path / "model", GOLDEN["qwen3-moe"])
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(loadstone.PlanError, match=r"blk\.1\.ffn_up_exps\.weight") as caught:
        loadstone.convert(model, tmp_path / "out.gguf")
    assert caught.value.code == "plan.missing"


def test_a_reranker_needs_the_converter(tmp_path: Path) -> None:
    """The converter searches the model card, the folder's name and the config for this name."""
    [qwen3] = rules.traced_rules()["architectures"]["Qwen3ForCausalLM"]
    values = {
        path: next((each for each in allowed if not str(each).startswith("@")), 1)
        for path, allowed in qwen3["guards"]["values"].items()
        if rules.ABSENT not in allowed
    }
    names = ("README.md", "_name_or_path")
    fields = values | dict.fromkeys(names, "model") | {"rope_parameters": {}}
    assert rules.unsupported_field(qwen3["guards"], fields) == ""
    for name in names:
        changed = fields | {name: "# Qwen3-Reranker"}
        assert rules.unsupported_field(qwen3["guards"], changed) == name


def test_a_config_of_other_shapes_is_reported(tmp_path: Path) -> None:
    model = write(tmp_path / "model", GOLDEN["llama"], num_attention_heads=5)
    with pytest.raises(loadstone.PlanError, match=r"does not match config\.json") as caught:
        loadstone.convert(model, tmp_path / "out.gguf")
    assert caught.value.code == "plan.shape"


def test_a_file_equals_its_conversion(model: Path, tmp_path: Path) -> None:
    loadstone.convert(model, tmp_path / "out.gguf", quantize="q8_0")
    assert loadstone.verify(model, tmp_path / "out.gguf", quantize="q8_0").ok
    assert not loadstone.verify(model, tmp_path / "out.gguf").ok


def test_quantized_tensors_are_decoded(tmp_path: Path) -> None:
    """A quantized source gives the file of its decoded tensors."""
    model = write(tmp_path / "model", GOLDEN["llama"])
    loadstone.convert(model, tmp_path / "small", quantize="int8-channel")
    loadstone.convert(tmp_path / "small", tmp_path / "plain", dequantize=True, dtype="float32")
    files = [tmp_path / "small.gguf", tmp_path / "plain.gguf"]
    for file in files:
        loadstone.convert(file.with_suffix(""), file, dtype="bfloat16")
    found, expected = map(oracle.read, files)
    assert golden.digest(found) == golden.digest(expected)


def with_codes(model: Path) -> dict[str, torch.Tensor]:
    """Replace a GPT-OSS model's experts by random MXFP4 codes, and return their values."""
    path = model / "model.safetensors"
    tensors = load_file(path)
    values = {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 135, (experts, rows, columns // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = (low_first(blocks) * power(scales)[..., None]).flatten(-2)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (model / "config.json").write_text(json.dumps(config))
    return values


@pytest.mark.parametrize(
    ("quantize", "kind"), [(None, "MXFP4"), ("mxfp4_moe", "MXFP4"), ("q8_0", "Q8_0")]
)
def test_experts_of_gpt_oss_keep_their_values(
    quantize: str | None, kind: str, tmp_path: Path
) -> None:
    model = networks.make("gpt-oss", tmp_path / "model")
    values = with_codes(model)
    loadstone.convert(model, tmp_path / "out.gguf", quantize=quantize)
    found = {tensor.name: tensor for tensor in oracle.read(tmp_path / "out.gguf").tensors}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        both = values[f"{experts}.gate_up_proj"]
        expected = {
            "gate": both[:, ::2],
            "up": both[:, 1::2],
            "down": values[f"{experts}.down_proj"],
        }
        for name, numbers in expected.items():
            tensor = found[f"blk.{layer}.ffn_{name}_exps.weight"]
            assert tensor.tensor_type.name == kind
            decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert torch.equal(torch.from_numpy(np.array(decoded)), numbers), name
