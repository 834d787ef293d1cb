"""GGUF files from Python: metadata by key, read back with the gguf package."""

import json
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from command import COMMAND, run
from safetensors.torch import save_file

import loadstone


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.safetensors"
    torch.manual_seed(0)
    tensors = {
        "blocks.0.attn.weight": torch.randn(48, 256, dtype=torch.bfloat16),
        "blocks.0.norm.weight": torch.randn(48),
        "ids": torch.arange(5),
    }
    save_file(tensors, path)
    return path


def fields_of(path: Path) -> dict:
    fields = gguf.GGUFReader(path).fields
    return {key: each.contents() for key, each in fields.items() if not key.startswith("GGUF.")}


def types_of(path: Path) -> dict[str, str]:
    return {each.name: each.tensor_type.name for each in gguf.GGUFReader(path).tensors}


def test_metadata_by_key(source, tmp_path):
    target = tmp_path / "out.gguf"
    report = loadstone.convert(
        source,
        target,
        metadata={
            "general.architecture": "wan",
            "flag": True,
            "count": {"type": "u32", "value": 7},
            "rate": {"type": "f32", "value": float("inf")},
            "words": {"type": "array", "items": "string", "value": ["a", "b"]},
        },
    )
    assert report.outputs == [target]
    assert fields_of(target) == {
        "general.architecture": "wan",
        "flag": True,
        "count": 7,
        "rate": float("inf"),
        "words": ["a", "b"],
    }
    before, after = loadstone.open(source), loadstone.open(target)
    with before, after:
        for name in before:
            assert torch.equal(before[name].tensor(), after[name].tensor())


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("layers", [0, 2])
def test_vectors_of_a_language_model_are_not_cast_without_a_word(source, tmp_path, layers, dtype):
    metadata = {"general.architecture": "llama"}
    if layers:
        metadata["llama.block_count"] = {"type": "u32", "value": layers}
    given = {"metadata": metadata}
    report = loadstone.convert(source, tmp_path / "cast.gguf", dtype=dtype, **given)
    told = [each.sources for each in report.findings if each.code == "convert.unread"]
    assert told == [["blocks.0.norm.weight"]] * bool(layers)
    assert types_of(tmp_path / "cast.gguf")["blocks.0.norm.weight"] == dtype.upper()
    report = loadstone.convert(source, tmp_path / "mix.gguf", quantize=dtype, **given)
    assert not [each for each in report.findings if each.code == "convert.unread"]
    assert types_of(tmp_path / "mix.gguf")["blocks.0.norm.weight"] == "F32"


def test_metadata_from_a_file(source, tmp_path):
    path = tmp_path / "metadata.json"
    entry = {"key": "general.architecture", "type": "string", "value": "wan"}
    path.write_text(
        json.dumps({"format": "loadstone-gguf-metadata", "version": 1, "entries": [entry]})
    )
    loadstone.convert(source, tmp_path / "out.gguf", metadata=path)
    assert fields_of(tmp_path / "out.gguf") == {"general.architecture": "wan"}


# Plain values, and the types that they get.
PLAIN = {
    "general.architecture": ("wan", "string"),
    "general.file_type": (7, "u32"),
    "tokenizer.ggml.scores": ([1, 0.5], "array of f32"),
    "tokenizer.ggml.token_type": ([], "array of i32"),
    "wan.block_count": (40, "u32"),
    "wan.rope.freq_base": (10000, "f32"),
    "wan.attention.head_count_kv": ([8, 4], "array of u32"),
    "a.flag": (True, "bool"),
    "a.text": ("7", "string"),
    "a.most": (2**32 - 1, "u32"),
    "a.larger": (2**32, "u64"),
    "a.below": (-(2**31), "i32"),
    "a.lower": (-(2**31) - 1, "i64"),
    "a.part": (0.5, "f32"),
    "a.texts": (["a", ""], "array of string"),
    "a.flags": ([True], "array of bool"),
    "a.signed": ([1, -2], "array of i32"),
    "a.wide": ([-1, 2**31], "array of i64"),
    "a.typed": ({"type": "u8", "value": 7}, "u8"),
}


def test_plain_values_get_the_types_of_their_keys_or_values(source, tmp_path):
    plain = {key: value for key, (value, _) in PLAIN.items()}
    path = tmp_path / "metadata.json"
    path.write_text(json.dumps(plain))
    for metadata in (plain, path):
        report = loadstone.convert(source, tmp_path / "out.gguf", metadata=metadata)
        assert report.outputs
        found = loadstone.inspect(tmp_path / "out.gguf")
        types = json.loads(found.to_json())["metadata_types"]
        assert types == {key: kind for key, (_, kind) in PLAIN.items()}
        expected = plain | {"a.typed": 7}
        assert {key: found.metadata[key] for key in PLAIN} == expected


WITHOUT_TYPE = [None, [None], {"b": 1}, [[1]], [], [1, "a"], [1, 0.5], [True, 1], 1e39, {}]


@pytest.mark.parametrize("value", WITHOUT_TYPE, ids=str)
def test_a_value_without_a_type_is_an_error_that_names_the_key(source, tmp_path, value):
    path = tmp_path / "metadata.json"
    path.write_text(json.dumps({"some.key": value}))
    for metadata in ({"some.key": value}, path):
        with pytest.raises(loadstone.Error, match=r"some\.key") as caught:
            loadstone.convert(source, tmp_path / "out.gguf", metadata=metadata)
        assert caught.value.code == "convert.metadata_json"


@pytest.mark.parametrize("value", [{1}, b"a", float("nan"), torch.zeros(1)], ids=str)
def test_a_value_that_json_lacks_is_an_error_that_names_the_key(source, tmp_path, value):
    with pytest.raises(loadstone.Error, match=r"some\.key") as caught:
        loadstone.convert(source, tmp_path / "out.gguf", metadata={"some.key": value})
    assert caught.value.code == "plan.options"


@pytest.mark.parametrize(
    "value", [{"type": "u8", "value": 256}, {"type": "u8"}, {"type": "u9", "value": 1}, {}]
)
def test_values_that_are_none(source, tmp_path, value):
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(source, tmp_path / "out.gguf", metadata={"a": value})
    assert caught.value.code == "convert.metadata_json"
    assert not (tmp_path / "out.gguf").exists()


def test_an_architecture_is_needed(source, tmp_path):
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(source, tmp_path / "out.gguf")
    assert caught.value.code == "convert.architecture"


HUGGING_FACE = {"model.embed_tokens.weight": (4, 32), "model.layers.0.mlp.up_proj.weight": (4, 32)}
LLAMA_CPP = {"token_embd.weight": (4, 32), "blk.0.ffn_up.weight": (4, 32)}
RENAMES = [{"op": "rename", "sources": [r"model\.(.*)"], "targets": ["$1"]}]
DIFFUSERS = {"transformer_blocks.0.attn.add_q_proj.weight": (4, 32)}

# Tensor names, rules, architecture, and the severity of the finding about the tensor names.
NAMES = {
    "another program's": (HUGGING_FACE, None, "llama", "warning"),
    "llama.cpp's": (LLAMA_CPP, None, "llama", None),
    "named by rules": (HUGGING_FACE, RENAMES, "llama", None),
    "ComfyUI's": (HUGGING_FACE, None, "wan", None),
    "diffusers'": (DIFFUSERS, None, "sd3", "error"),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_must_be_those_that_readers_know(tmp_path, case):
    shapes, rules, architecture, severity = NAMES[case]
    path = tmp_path / "m.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path)
    report = loadstone.convert(
        path,
        tmp_path / "out.gguf",
        rules=rules,
        metadata={"general.architecture": architecture},
        dry_run=True,
    )
    told = [each for each in report.findings if each.code == "convert.architecture"]
    assert [each.severity for each in told] == ([severity] if severity else [])
    assert severity != "warning" or "--converter" in told[0].suggestion


@pytest.mark.parametrize("rules", [None, RENAMES])
def test_names_of_diffusers_that_comfyui_does_not_read(tmp_path, rules):
    """The dry run and the conversion warn, unless rules give the names."""
    folder = tmp_path / "transformer"
    folder.mkdir()
    save_file({"model.blocks.0.attn1.to_q.weight": torch.zeros(4, 32)}, folder / "w.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": "WanTransformer3DModel"}))
    words = [folder, tmp_path / "out.gguf", "--arch", "wan"]
    if rules is not None:
        (tmp_path / "rules.json").write_text(json.dumps(rules))
        words += ["--rules", tmp_path / "rules.json"]
    told = "the output keeps diffusers' names, which ComfyUI does not read"
    assert (told in run("convert", *words, "--dry-run").stdout) == (rules is None)
    assert (told in run("convert", *words).stderr) == (rules is None)


def test_the_plan_says_how_to_name_the_architecture(source, tmp_path):
    words = [source, tmp_path / "out.gguf"]
    for done in (run("convert", *words, "--dry-run"), run("convert", *words)):
        assert done.returncode == 1
        assert "--arch NAME" in done.stdout + done.stderr


def test_files_of_gguf_keep_their_names(source, tmp_path):
    loadstone.convert(source, tmp_path / "a.gguf", metadata={"general.architecture": "toy"})
    report = loadstone.convert(tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert not [each for each in report.findings if each.code == "convert.architecture"]


# Keys of the tokenizer, tensor names, architecture, and the keys that llama.cpp misses.
TOKENIZERS = {
    "none": ({}, LLAMA_CPP, "llama", ["model", "tokens"]),
    "without merges": ({"model": "gpt2", "tokens": ["a"]}, LLAMA_CPP, "llama", ["merges"]),
    "complete": ({"model": "llama", "tokens": ["a"]}, LLAMA_CPP, "llama", []),
    "a model without text": ({"model": "none"}, LLAMA_CPP, "llama", []),
    "no embedding": ({}, {"blk.0.ffn_up.weight": (4, 32)}, "llama", []),
    "a video model": ({}, LLAMA_CPP, "wan", []),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_missing_tokenizer_is_named(tmp_path, case):
    keys, shapes, architecture, missing = TOKENIZERS[case]
    path = tmp_path / "m.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path)
    metadata = {"general.architecture": architecture}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    report = loadstone.convert(path, tmp_path / "out.gguf", metadata=metadata)
    told = [each for each in report.findings if each.code == "convert.metadata"]
    expected = [f"tokenizer.ggml.{key}" for key in missing]
    assert [each.sources for each in told] == [expected] * bool(missing)
    for each in told:
        assert each.severity == "warning"
        assert all(key in each.message for key in expected)
        assert "--converter" in each.suggestion and "--metadata" in each.suggestion


@pytest.mark.parametrize("width", [256, 96])
def test_a_type_that_no_tensor_gets_is_told(tmp_path, width):
    path = tmp_path / "m.safetensors"
    save_file({"blk.0.ffn_up.weight": torch.randn(4, width), "blk.1.x": torch.randn(4, 96)}, path)
    report = loadstone.convert(
        path,
        tmp_path / "out.gguf",
        quantize="q4_k",
        include="blk",
        metadata={"general.architecture": "llama"},
    )
    told = {each.severity for each in report.findings if each.code == "convert.fallback"}
    assert told == {"info" if width == 256 else "warning"}


@pytest.mark.parametrize("kind", ["q4_0", "q5_1", "q8_0"])
def test_blocks_are_those_of_the_gguf_package(source, tmp_path, kind):
    target = tmp_path / "out.gguf"
    loadstone.convert(source, target, quantize=kind, metadata={"general.architecture": "wan"})
    assert types_of(target) == {
        "blocks.0.attn.weight": kind.upper(),
        "blocks.0.norm.weight": "F32",
        "ids": "I64",
    }
    with loadstone.open(source) as file:
        numbers = file["blocks.0.attn.weight"].tensor().float().numpy()
    expected = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind.upper()])
    (tensor,) = (each for each in gguf.GGUFReader(target).tensors if "attn" in each.name)
    assert np.array_equal(np.asarray(tensor.data), expected)


def test_split_files(source, tmp_path):
    target = tmp_path / "out.gguf"
    report = loadstone.convert(
        source, target, shard_size=100, metadata={"general.architecture": "wan"}
    )
    assert [each.name for each in report.outputs] == [
        f"out-{i}-of-00003.gguf" for i in ("00001", "00002", "00003")
    ]
    with loadstone.open(report.outputs[0]) as file:
        assert len(file.keys()) == 3
    with pytest.raises(loadstone.Error, match="shard_size requires several files"):
        loadstone.convert(source, tmp_path / "out.safetensors", shard_size=100)


def test_parts_of_a_file_are_not_the_callers(source, tmp_path):
    target = tmp_path / "out.gguf"
    with pytest.raises(loadstone.PlanError, match=r"split\.count") as caught:
        loadstone.convert(
            source,
            target,
            metadata={"general.architecture": "x", "split.count": {"type": "u16", "value": 3}},
        )
    assert caught.value.code == "plan.options"
    assert not target.exists()


BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
BLOCKS += ("iq4_nl", "iq4_xs", "iq3_s", "tq1_0", "tq2_0", "mxfp4-gguf", "nvfp4-gguf")


@pytest.mark.parametrize("kind", BLOCKS)
def test_verify_knows_blocks_of_ordinary_weights(tmp_path, kind):
    """Accept large rounding errors of low-bit formats, but detect rows in a different order."""
    torch.manual_seed(1)
    weight = torch.randn(64, 512) * 0.05
    source, target = tmp_path / "source.safetensors", tmp_path / "out.gguf"
    save_file({"a.weight": weight}, source)
    options = {"quantize": kind, "include": "a", "metadata": {"general.architecture": "x"}}
    loadstone.convert(source, target, **options)
    command = [COMMAND, "verify", source, target]
    assert subprocess.run(command, capture_output=True).returncode == 0
    save_file({"a.weight": weight.flip(0).contiguous()}, source)
    assert subprocess.run(command, capture_output=True).returncode == 1
