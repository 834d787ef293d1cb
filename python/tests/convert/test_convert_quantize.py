"""Quantized checkpoints against the libraries that define the layouts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("modelopt")
import modelopt.torch.quantization as mtq
from command import output
from modelopt.torch.export import export_hf_checkpoint
from modelopt_models import write
from transformers import AutoModelForCausalLM

import loadstone

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write(name, root / name) for name in ("llama", "qwen3_moe", "deepseek_v3")}


def tensors_in(folder: Path) -> Tensors:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def config_of(folder: Path, name: str = "config.json") -> dict:
    return json.loads((folder / name).read_text())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def differences(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of tensors that are missing or differ in dtype, shape or bytes."""
    found = set(first) ^ set(second)
    for name in set(first) & set(second):
        a, b = first[name], second[name]
        same_kind = a.dtype == b.dtype and a.shape == b.shape
        if not same_kind or not torch.equal(as_bytes(a), as_bytes(b)):
            found.add(name)
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    ("encoding", "config"),
    [
        ("nvfp4", "W4A16_NVFP4_CFG"),
        ("fp8", "FP8_DEFAULT_CFG"),
        ("mxfp8", "MXFP8_DEFAULT_CFG"),
        ("int8-channel", "INT8_WEIGHT_ONLY_CFG"),
    ],
)
def test_files_are_those_of_modelopts_export(
    folders: dict[str, Path], name: str, encoding: str, config: str, tmp_path: Path
) -> None:
    """For fp8, ignore the activation scales, which only a calibration can compute."""
    expect_modelopts_export(folders[name], encoding, config, tmp_path)


def test_blocks_are_those_of_modelopts_export(tmp_path: Path) -> None:
    """Use weights of several blocks, because ModelOpt's export treats the scale of a single block
    as a scale of the whole weight and shares it with partners."""
    source = write("llama", tmp_path / "wide", hidden_size=256, intermediate_size=384)
    config = "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"
    expect_modelopts_export(source, "fp8-block", config, tmp_path)


def expect_modelopts_export(source: Path, encoding: str, config: str, tmp_path: Path) -> None:
    loadstone.convert(source, tmp_path / "ours", quantize=encoding, mode="modelopt-compat")
    model = AutoModelForCausalLM.from_pretrained(source)
    tokens = torch.arange(64)[None]
    loop = (lambda model: model(tokens)) if encoding == "fp8" else None
    mtq.quantize(model, getattr(mtq, config), forward_loop=loop)
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=tmp_path / "theirs")
    ours, theirs = tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs")
    if encoding == "fp8":
        theirs = {name: t for name, t in theirs.items() if not name.endswith(".input_scale")}
    assert differences(ours, theirs) == set()
    changed = dict(ours) | {"model.norm.weight": ours["model.norm.weight"] + 1}  # control
    assert differences(changed, theirs) == {"model.norm.weight"}
    file = "hf_quant_config.json"
    assert config_of(tmp_path / "ours", file) == config_of(tmp_path / "theirs", file)
    section = config_of(tmp_path / "ours")["quantization_config"]
    assert section == config_of(tmp_path / "theirs")["quantization_config"]
    before = config_of(source)
    assert {**config_of(tmp_path / "ours"), "quantization_config": 0} == {
        **before,
        "quantization_config": 0,
    }


def with_partners_apart(source: Path, target: Path) -> Path:
    """Write the tensors into two files, so that partners are in different files."""
    target.mkdir()
    tensors = tensors_in(source)
    files = {f"m-{i + 1:05}-of-00002.safetensors": sorted(tensors)[i::2] for i in range(2)}
    for file, names in files.items():
        save_file({name: tensors[name].clone() for name in names}, target / file)
    index = {name: file for file, names in files.items() for name in names}
    (target / "m.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


@pytest.mark.parametrize("encoding", ["nvfp4", "fp8"])
def test_partners_share_what_one_matrix_of_them_has(
    folders: dict[str, Path], encoding: str, tmp_path: Path
) -> None:
    source = with_partners_apart(folders["qwen3_moe"], tmp_path / "apart")
    loadstone.convert(source, tmp_path / "out", quantize=encoding, shard_size=4000)
    before, after = tensors_in(source), tensors_in(tmp_path / "out")
    layer = "model.layers.1."
    groups = [
        [f"{layer}self_attn.{name}_proj.weight" for name in "qkv"],
        [f"{layer}self_attn.o_proj.weight"],
        [f"{layer}mlp.experts.2.{name}_proj.weight" for name in ("gate", "up")],
        [f"{layer}mlp.experts.2.down_proj.weight"],
    ]
    suffixes = {"data": "", "scale": "_scale", "scale_2": "_scale_2"}
    for group in groups:
        unit = loadstone.quantize(torch.cat([before[name] for name in group]), encoding)
        row = 0
        for name in group:
            rows = slice(row, row := row + len(before[name]))
            for part, value in unit.parts.items():
                expected = value[rows] if value.dim() > 0 else value
                assert differences({"": after[name + suffixes[part]]}, {"": expected}) == set()


@pytest.mark.parametrize("encoding", ["nf4", "fp4", "int8"])
def test_transformers_loads_what_bitsandbytes_would_have_saved(
    folders: dict[str, Path], encoding: str, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    chosen = (
        BitsAndBytesConfig(load_in_8bit=True)
        if encoding == "int8"
        else BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=encoding,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    )
    loadstone.convert(folders["llama"], tmp_path / "ours", quantize=encoding)
    theirs = AutoModelForCausalLM.from_pretrained(folders["llama"], quantization_config=chosen)
    theirs.save_pretrained(tmp_path / "theirs")
    found = differences(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))
    assert {name for name in found if "quant_state" not in name} == set()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tokens = torch.arange(16)[None]
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
    assert type(ours.model.layers[0].mlp.up_proj).__module__.startswith("bitsandbytes")


def test_patterns_styles_and_tables(folders: dict[str, Path], tmp_path: Path) -> None:
    patterns = {"experts": "nvfp4", "o_proj": "none", "": "fp8"}
    options = {"quantize": patterns, "style": "compressed-tensors", "exclude": "layers.0.self_attn"}
    table = str(loadstone.convert(folders["qwen3_moe"], tmp_path / "out", **options, dry_run=True))
    assert "BF16 -> nvfp4" in table
    assert "router" in table
    assert not (tmp_path / "out").exists()
    loadstone.convert(folders["qwen3_moe"], tmp_path / "out", **options)
    tensors = tensors_in(tmp_path / "out")
    assert "model.layers.0.mlp.experts.0.up_proj.weight_packed" in tensors
    assert tensors["model.layers.0.mlp.experts.0.up_proj.weight_global_scale"].shape == (1,)
    assert tensors["model.layers.1.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert tensors["model.layers.1.self_attn.o_proj.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    section = config_of(tmp_path / "out")["quantization_config"]
    assert section["format"] == "mixed-precision"
    assert section["quant_method"] == "compressed-tensors"
    as_loads_take_it = {"": loadstone.Quantization("nf4", nested=True)}
    for wrong in (
        {"mode": "modelopt-compat"},
        {"quantize": "nf5"},
        {"quantize": "fp8", "style": "other"},
        {"quantize": as_loads_take_it},
        {"quantize": ["nf4"]},
    ):
        with pytest.raises(loadstone.Error) as caught:
            loadstone.convert(folders["llama"], tmp_path / "wrong", **wrong)
        assert caught.value.code == "plan.options"


def test_the_encoding_for_all_comes_last(folders: dict[str, Path], tmp_path: Path) -> None:
    rows = [("mlp", "nvfp4"), ("", "fp8")]
    for name, order in {"last": rows, "first": rows[::-1]}.items():
        loadstone.convert(folders["llama"], tmp_path / name, quantize=dict(order))
        words = [f"--quantize={f'{pattern}=' if pattern else ''}{e}" for pattern, e in order]
        output("convert", folders["llama"], tmp_path / f"{name} by command", *words)
    found = {each.read_bytes() for each in tmp_path.glob("*/model.safetensors")}
    assert len(found) == 1
    loadstone.convert(folders["llama"], tmp_path / "control", quantize="fp8")
    assert (tmp_path / "control/model.safetensors").read_bytes() not in found


def test_what_servers_want_plain_stays(folders: dict[str, Path], tmp_path: Path) -> None:
    loadstone.convert(folders["deepseek_v3"], tmp_path / "out", quantize="fp8")
    tensors = tensors_in(tmp_path / "out")
    plain = {name for name, t in tensors.items() if t.dtype == torch.bfloat16 and t.dim() == 2}
    kinds = {name.rsplit(".", 2)[-2] for name in plain}
    assert kinds == {"embed_tokens", "lm_head", "gate", "kv_b_proj"}


def test_numbers_that_are_not_finite_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = tensors_in(folders["llama"])
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name].view(-1)[77] = float("nan")
    (tmp_path / "nan").mkdir()
    save_file(tensors, tmp_path / "nan" / "model.safetensors")
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(tmp_path / "nan", tmp_path / "out", quantize="nvfp4")
    assert caught.value.code == "q.nan"
    assert caught.value.tensor == name
    assert "77" in str(caught.value)
    assert not (tmp_path / "out").exists()
    report = loadstone.convert(
        tmp_path / "nan", tmp_path / "out", quantize="nvfp4", allow_non_finite=True
    )
    assert [finding.code for finding in report.findings if finding.severity == "warning"] == [
        "q.nan"
    ]
    scales = [t for name, t in tensors_in(tmp_path / "out").items() if "weight_scale" in name]
    assert all(scale.float().isfinite().all() for scale in scales)


def test_memory_does_not_grow_with_layers(tmp_path: Path) -> None:
    """The command keeps only one group of layers in memory at a time."""
    peaks = []
    for layers in (4, 8):
        folder = tmp_path / str(layers)
        folder.mkdir()
        tensors = {
            f"model.layers.{layer}.mlp.{name}_proj.weight": torch.randn(1536, 2048).bfloat16()
            for layer in range(layers)
            for name in ("gate", "up", "down")
        }
        save_file(tensors, folder / "model.safetensors")
        command: list[str | Path] = [Path(sys.executable).parent / "loadstone", "convert", folder]
        command += [tmp_path / f"out-{layers}", "--quantize", "nvfp4", "--threads", "1", "--json"]
        done = subprocess.run(command, check=True, capture_output=True)
        document = json.loads(done.stdout)
        assert document["process"]["anonymous_bytes_peak"] < 64 << 20
        peaks.append(document["process"]["resident_bytes_peak"])
    assert abs(peaks[1] - peaks[0]) < 4 << 20
