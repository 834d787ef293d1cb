"""`loadstone convert` to GGUF: files that the gguf package reads, and rejected requests."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

HEADER = {"format": "loadstone-gguf-metadata", "version": 1}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write values of many types, blocks, and tensors whose sizes need padding."""
    path = tmp_path / "source.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 500000.0)
    writer.add_float64("a.double", 0.1)
    writer.add_bool("a.flag", True)
    writer.add_int16("a.short", -5)
    writer.add_uint64("a.long", 2**64 - 1)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "\u00e9", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    numbers = np.random.default_rng(0)
    writer.add_tensor("a.weight", numbers.normal(size=(3, 5)).astype(np.float32))
    writer.add_tensor("b.weight", numbers.normal(size=(7,)).astype(np.float16))
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(numbers.normal(size=(6, 64)).astype(np.float32), kind)
    writer.add_tensor("c.weight", blocks, raw_dtype=kind)
    writer.add_tensor("ids", np.arange(5, dtype=np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fields_of(path: Path) -> dict:
    fields = gguf.GGUFReader(path).fields
    return {
        key: (field.types, field.contents())
        for key, field in fields.items()
        if not key.startswith("GGUF.")
    }


def tensors_of(path: Path) -> dict:
    return {
        each.name: (each.tensor_type.name, list(map(int, each.shape)), bytes(each.data))
        for each in gguf.GGUFReader(path).tensors
    }


def metadata_file(folder: Path, *entries: dict) -> Path:
    path = folder / "metadata.json"
    path.write_text(json.dumps(HEADER | {"entries": list(entries)}))
    return path


def test_the_gguf_package_reads_the_same(run, source, tmp_path):
    target = tmp_path / "out.gguf"
    run("convert", source, target, status=0)
    assert fields_of(target) == fields_of(source)
    assert tensors_of(target) == tensors_of(source)
    run("verify", source, target, status=0)


# Control: the comparison detects one changed byte and one changed value.
def test_the_comparison_sees_a_difference(run, source, tmp_path):
    target = tmp_path / "out.gguf"
    extra = metadata_file(tmp_path, {"key": "a.short", "type": "i16", "value": -6})
    run("convert", source, target, "--dtype", "f16", "--metadata", extra, status=0)
    assert fields_of(target) != fields_of(source)
    assert tensors_of(target)["a.weight"] != tensors_of(source)["a.weight"]


def test_metadata_of_all_types(run, small, tmp_path):
    entries = [
        {"key": "general.architecture", "type": "string", "value": "wan"},
        {"key": "u8", "type": "u8", "value": 255},
        {"key": "i64", "type": "i64", "value": -(2**63)},
        {"key": "f32", "type": "f32", "value": 1e-06},
        {"key": "inf", "type": "f64", "value": "-inf"},
        {"key": "flag", "type": "bool", "value": False},
        {"key": "words", "type": "array", "items": "string", "value": ["a", ""]},
        {"key": "numbers", "type": "array", "items": "i32", "value": [1, -2]},
    ]
    target = tmp_path / "out.gguf"
    run("convert", small, target, "--metadata", metadata_file(tmp_path, *entries), status=0)
    fields = fields_of(target)
    kinds = gguf.GGUFValueType
    assert fields["general.architecture"] == ([kinds.STRING], "wan")
    assert fields["u8"] == ([kinds.UINT8], 255)
    assert fields["i64"] == ([kinds.INT64], -(2**63))
    assert fields["f32"] == ([kinds.FLOAT32], float(np.float32(1e-06)))
    assert fields["inf"] == ([kinds.FLOAT64], -np.inf)
    assert fields["flag"] == ([kinds.BOOL], False)
    assert fields["words"] == ([kinds.ARRAY, kinds.STRING], ["a", ""])
    assert fields["numbers"] == ([kinds.ARRAY, kinds.INT32], [1, -2])
    run("verify", small, target, status=0)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"format": "loadstone-gguf-metadata", "version": 1, "entries": [' + "1," * 100 + "1]}",
        json.dumps(HEADER | {"entries": [{"key": "k", "type": "u8", "value": 256}]}),
        json.dumps(HEADER | {"entries": [{"key": "k\n", "type": "u8", "value": 1}]}),
        json.dumps(HEADER | {"entries": [{"key": "k", "type": "u8", "value": 1}] * 2}),
        json.dumps(
            HEADER
            | {"entries": [{"key": "general.architecture", "type": "string", "value": "x"}] * 1}
        ).replace('"x"', '"\\ud800"'),
    ],
)
def test_hostile_metadata(run, small, tmp_path, text):
    wrong = tmp_path / "wrong.json"
    wrong.write_text(text)
    done = run("convert", small, tmp_path / "out.gguf", "--metadata", wrong)
    assert done.returncode not in (0, 134, 139)
    assert "[convert.metadata_json]" in done.stderr
    assert not (tmp_path / "out.gguf").exists()


def test_an_architecture_by_option(run, small, tmp_path):
    target = tmp_path / "out.gguf"
    run("convert", small, target, "--arch", "wan", status=0)
    kinds = gguf.GGUFValueType
    assert fields_of(target) == {"general.architecture": ([kinds.STRING], "wan")}
    plain = tmp_path / "plain.json"
    plain.write_text('{"general.architecture": "wan", "wan.block_count": 40}')
    run("convert", small, target, "--metadata", plain, "--arch", "wan", status=0)
    assert fields_of(target)["wan.block_count"] == ([kinds.UINT32], 40)
    done = run("convert", small, target, "--metadata", plain, "--arch", "flux", status=2)
    assert "--arch flux contradicts --metadata" in done.stderr and '"wan"' in done.stderr


def test_a_mix_names_the_next_step(run, small, tmp_path, write_safetensors):
    target = tmp_path / "out.gguf"
    done = run("convert", small, target, "--quantize", "q4_k_m", status=2)
    assert "does not specify general.architecture; for llama.cpp, use its own" in done.stderr
    assert len(done.stderr) < 350
    done = run("convert", small, target, "--quantize", "q4_k_m", "--arch", "wam", status=2)
    assert "'wam' is not an image model; did you mean 'wan'?" in done.stderr
    assert len(done.stderr) < 350
    done = run("convert", small, tmp_path / "out", "--quantize", "q4_k_m", status=2)
    assert "only GGUF files can store this mix of types; found q4_k_m;" in done.stderr
    assert len(done.stderr) < 200
    # Follow the advice.
    llama = write_safetensors(
        tmp_path / "in.safetensors", {"blk.0.attn_q.weight": ("F32", [2, 256])}
    )
    words = ["convert", llama, target, "--quantize", "q4_k_m"]
    assert "set it (--arch NAME; metadata= in Python)" in run(*words, status=2).stderr
    lacking = "'llama.block_count', 'tokenizer.ggml.model', 'tokenizer.ggml.tokens'"
    done = run(*words, "--arch", "llama", status=2)
    assert f"lacks {lacking}; add the keys (--metadata FILE; metadata= in Python)" in done.stderr
    plain = tmp_path / "plain.json"
    plain.write_text('{"llama.block_count": 1, "tokenizer.ggml.model": "none"}')
    assert "warning" not in run(*words, "--arch", "llama", "--metadata", plain, status=0).stderr


def test_the_value_without_a_type_is_named(run, small, tmp_path):
    plain = tmp_path / "plain.json"
    plain.write_text('{"general.architecture": "wan", "wan.list": [1, "a"]}')
    done = run("convert", small, tmp_path / "out.gguf", "--metadata", plain, status=1)
    assert "[convert.metadata_json]" in done.stderr
    assert "wan.list" in done.stderr and "expected an integer" in done.stderr


def test_what_is_refused(run, small, source, tmp_path, write_safetensors):
    target = tmp_path / "out.gguf"
    done = run("convert", small, target)
    assert done.returncode != 0
    assert "[convert.architecture]" in done.stderr
    assert "--arch NAME" in done.stderr
    extra = metadata_file(
        tmp_path, {"key": "general.architecture", "type": "string", "value": "wan"}
    )
    video = write_safetensors(tmp_path / "video.safetensors", {"patch": ("F32", [1, 1, 1, 2, 2])})
    refused = run("convert", video, target, "--metadata", extra)
    assert "[convert.dims]" in refused.stderr
    assert "'patch'" in refused.stderr
    run("convert", video, target, "--metadata", extra, "--beyond-ggml", status=0)
    flags = write_safetensors(tmp_path / "flags.safetensors", {"mask": ("BOOL", [3])})
    refused = run("convert", flags, tmp_path / "no.gguf", "--metadata", extra)
    assert "[plan.dtype]" in refused.stderr
    assert "'mask' is BOOL" in refused.stderr
    wrong = run("convert", source, tmp_path / "out.safetensors", "--quantize", "q8_0")
    assert wrong.returncode != 0
    assert ".gguf" in wrong.stderr
    run("convert", source, tmp_path / "out.gguf", "--to", "safetensors", status=2)
    run("convert", source, tmp_path / "out.gguf", "--quantize", "fp8", status=2)
    assert not (tmp_path / "no.gguf").exists()
    assert not (tmp_path / "out.safetensors").exists()


def test_split_files(run, source, tmp_path):
    target = tmp_path / "out.gguf"
    said = run("convert", source, target, "--shard-size", "100", "--json", status=0).stdout
    paths = [Path(each) for each in json.loads(said)["outputs"]]
    count = len(paths)
    assert count > 2
    assert [each.name for each in paths] == [
        f"out-{i + 1:05}-of-{count:05}.gguf" for i in range(count)
    ]
    fields = [fields_of(each) for each in paths]
    kinds = gguf.GGUFValueType
    for number, each in enumerate(fields):
        assert each["split.no"] == ([kinds.UINT16], number)
        assert each["split.count"] == ([kinds.UINT16], count)
        assert each["split.tensors.count"] == ([kinds.INT32], 4)
    assert {key for key in fields[0] if not key.startswith("split.")} == set(fields_of(source))
    assert all(key.startswith("split.") for key in fields[1])
    together: dict = {}
    for each in paths:
        together |= tensors_of(each)
    assert together == tensors_of(source)
    run("verify", source, paths[1], status=0)
    assert not target.exists()


def test_q8_0_is_that_of_the_gguf_package(run, tmp_path, write_safetensors):
    numbers = np.random.default_rng(1).normal(size=(40, 96)).astype(np.float32)
    path = write_safetensors(
        tmp_path / "source.safetensors",
        {"blocks.0.attn.weight": ("F32", [40, 96]), "blocks.0.attn.bias": ("F32", [3])},
        numbers.tobytes() + np.zeros(3, np.float32).tobytes(),
    )
    extra = metadata_file(
        tmp_path, {"key": "general.architecture", "type": "string", "value": "wan"}
    )
    target = tmp_path / "out.gguf"
    run("convert", path, target, "--metadata", extra, "--quantize", "q8_0", status=0)
    tensors = tensors_of(target)
    expected = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
    assert tensors["blocks.0.attn.weight"] == ("Q8_0", [96, 40], expected.tobytes())
    assert tensors["blocks.0.attn.bias"][0] == "F32"
    assert fields_of(target)["general.file_type"] == (
        [gguf.GGUFValueType.UINT32],
        int(gguf.LlamaFileType.MOSTLY_Q8_0),
    )
    run("verify", path, target, status=0)
    back = tmp_path / "back.safetensors"
    run("convert", target, back, "--dequantize", "--dtype", "f32", status=0)
    run("verify", target, back, status=0)


def llama_like(write_safetensors: Callable[..., Path], path: Path, layers: int = 2) -> Path:
    """Write llama.cpp's tensor names, and feed-forward rows that do not fill blocks of 256."""
    shapes = {
        "token_embd.weight": [32, 256],
        "output.weight": [32, 256],
        "output_norm.weight": [256],
    }
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": [256],
            f"blk.{layer}.attn_q.weight": [256, 256],
            f"blk.{layer}.attn_k.weight": [128, 256],
            f"blk.{layer}.attn_v.weight": [128, 256],
            f"blk.{layer}.attn_output.weight": [256, 256],
            f"blk.{layer}.ffn_gate.weight": [96, 256],
            f"blk.{layer}.ffn_up.weight": [96, 256],
            f"blk.{layer}.ffn_down.weight": [256, 96],
        }
    numbers = np.random.default_rng(2)
    values = b""
    dtypes = {}
    for name, shape in shapes.items():
        made = numbers.normal(size=shape).astype(np.float32).view(np.uint32) & 0xFFFF0000
        is_vector = len(shape) == 1
        dtypes[name] = "F32" if is_vector else "BF16"
        values += made.tobytes() if is_vector else (made >> 16).astype(np.uint16).tobytes()
    return write_safetensors(path, {each: (dtypes[each], shapes[each]) for each in shapes}, values)


LLAMA = [
    {"key": "general.architecture", "type": "string", "value": "llama"},
    {"key": "llama.block_count", "type": "u32", "value": 2},
    {"key": "llama.attention.head_count", "type": "u32", "value": 2},
    {"key": "llama.attention.head_count_kv", "type": "u32", "value": 1},
]


def test_a_mix_of_types(run, tmp_path, write_safetensors):
    path = llama_like(write_safetensors, tmp_path / "source.safetensors")
    extra = metadata_file(tmp_path, *LLAMA)
    target = tmp_path / "out.gguf"
    options = ["--metadata", extra, "--quantize", "q4_k_m"]
    plan = run("convert", path, target, *options, "--dry-run", status=0).stdout
    assert "q6_k" in plan
    assert "do not consist of whole blocks of Q4_K" in plan
    run("convert", path, target, *options, status=0)
    types = {name: each[0] for name, each in tensors_of(target).items()}
    assert types["token_embd.weight"] == "Q4_K"
    assert types["output.weight"] == "Q6_K"
    assert types["output_norm.weight"] == types["blk.1.attn_norm.weight"] == "F32"
    assert types["blk.0.attn_v.weight"] == "Q4_K"
    assert types["blk.1.attn_v.weight"] == "Q6_K"
    assert types["blk.0.attn_q.weight"] == "Q4_K"
    assert types["blk.0.ffn_down.weight"] == "Q5_0"
    assert types["blk.1.ffn_down.weight"] == "Q8_0"
    assert fields_of(target)["general.file_type"][1] == 15
    run("verify", path, target, status=0)
    once = target.read_bytes()
    for threads in (1, 3):
        run(
            "convert", path, target, *options, "--threads", threads, "--max-memory", "3MB", status=0
        )
        assert target.read_bytes() == once


def test_resume_after_a_kill_gives_the_same_bytes(run, command, tmp_path, write_safetensors):
    path = llama_like(write_safetensors, tmp_path / "source.safetensors", layers=60)
    extra = metadata_file(tmp_path, *LLAMA)
    options = ["--metadata", extra, "--quantize", "q4_k_s", "--shard-size", "1MB"]
    whole = tmp_path / "whole" / "out.gguf"
    whole.parent.mkdir()
    run("convert", path, whole, *options, status=0)
    target = tmp_path / "killed" / "out.gguf"
    target.parent.mkdir()
    words = [str(each) for each in ["convert", path, target, *options, "--resume", "--threads", 1]]
    waiting = target.parent / ".loadstone-out.gguf.part" / "files"
    with subprocess.Popen([command, *words], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not list(waiting.glob("*")):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    report = json.loads(run(*words, "--json", status=0).stdout)
    assert process.returncode == 0 or report["bytes_kept"] > 0
    for each in sorted(whole.parent.glob("[!.]*")):
        assert (target.parent / each.name).read_bytes() == each.read_bytes()
    assert len(list(target.parent.glob("[!.]*"))) == len(list(whole.parent.glob("[!.]*")))
    again = json.loads(run(*words, "--json", status=0).stdout)
    assert again["bytes_written"] == 0 < again["bytes_kept"]
