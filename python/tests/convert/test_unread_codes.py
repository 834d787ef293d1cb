"""Weights that no library reads as codes stay plain; if codes are requested, loadstone warns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from readback_cells import styles_of, written_encodings
from safetensors.torch import load_file, save_file

import loadstone

# Names of weights, and the kinds of their layers. None is a linear layer.
LAYERS = {
    "transformer.h.0.attn.c_attn.weight": "Conv1D",
    "transformer.h.0.mlp.c_fc.weight": "Conv1D",
    "transformer.wte.weight": "embedding",
    "transformer.h.0.conv.weight": "convolution",
    "transformer.h.0.mlp.up_proj.weight": None,
}
FORMATS = [
    ("fp8", "modelopt"),
    ("fp8", "compressed-tensors"),
    ("fp8-channel", "compressed-tensors"),
    ("nvfp4", "modelopt"),
    ("nvfp4", "compressed-tensors"),
]
CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({name: torch.randn(128, 128) for name in LAYERS}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def plain(folder: Path) -> set[str]:
    found = load_file(folder / "model.safetensors")
    return {
        name for name, value in found.items() if value.dtype == torch.float32 and name in LAYERS
    }


def unread(findings: Any) -> dict[str, str]:
    named = [each for each in findings if each.code == "convert.unread"]
    assert {each.severity for each in named} <= {"warning"}
    return {source: each.message for each in named for source in each.sources}


@pytest.mark.parametrize(("quantize", "style"), FORMATS)
def test_they_stay_plain(model: Path, tmp_path: Path, quantize: str, style: str) -> None:
    report = loadstone.convert(model, tmp_path / "out", quantize=quantize, style=style)
    assert plain(tmp_path / "out") == {name for name, why in LAYERS.items() if why}
    assert not unread(report.findings)


@pytest.mark.parametrize(("quantize", "style"), FORMATS)
def test_a_request_is_a_warning(model: Path, tmp_path: Path, quantize: str, style: str) -> None:
    report = loadstone.convert(model, tmp_path / "out", quantize=quantize, style=style, include=".")
    assert plain(tmp_path / "out") == set()
    found = unread(report.findings)
    assert found.keys() == {name for name, why in LAYERS.items() if why}
    assert all(str(LAYERS[name]) in message for name, message in found.items())
    words = ["--quantize", quantize, "--style", style, "--include", "."]
    done = run("convert", model, tmp_path / "strict", *words, "--strict")
    assert done.returncode == 3
    assert "Conv1D" in done.stderr


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_bitsandbytes_has_layers_for_conv1d(model: Path, tmp_path: Path, quantize: str) -> None:
    report = loadstone.convert(model, tmp_path / "out", quantize=quantize, include=".")
    assert unread(report.findings).keys() == {
        name for name, why in LAYERS.items() if why in ("embedding", "convolution")
    }


@pytest.mark.parametrize("quantize", ["fp8", "fp8-block", "nvfp4", "mxfp4", "nf4", "int8"])
def test_diffusers_has_no_quantizer(quantize: str, tmp_path: Path) -> None:
    folder = tmp_path / "transformer"
    folder.mkdir()
    name = "transformer_blocks.0.ff.net.2.weight"
    save_file({name: torch.randn(128, 128)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    report = loadstone.convert(folder, tmp_path / "out", quantize=quantize)
    found = unread(report.findings)
    assert found.keys() == (set() if quantize in ("nf4", "int8") else {name})
    assert all("diffusers has no quantizer" in message for message in found.values())
    hints = [each.suggestion for each in report.findings if each.code == "convert.unread"]
    assert all("loadstone.diffusers.from_pretrained()" in each for each in hints)
    for file in (folder, folder / "model.safetensors"):
        report = loadstone.convert(file, tmp_path / "out.safetensors", quantize=quantize)
        found = unread(report.findings)  # one file never declares its encoding
        assert found.keys() == {name}
        assert "in one file" in found[name]


MARKS = ("blocks.0.self_attn.norm_q.weight", "text_embedding.2.weight", "head.modulation")


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_single_file_of_an_image_model(prefix: str, tmp_path: Path) -> None:
    """The warning of the command and its dry run name the function that opens the file."""
    name = f"{prefix}blocks.0.ffn.0.weight"
    tensors = {f"{prefix}{mark}": torch.randn(128) for mark in MARKS}
    save_file(tensors | {name: torch.randn(128, 128)}, tmp_path / "wan.safetensors")
    words = [tmp_path / "wan.safetensors", tmp_path / "out.safetensors", "--quantize", "nvfp4"]
    advice = "(open the file with loadstone.diffusers.from_single_file()) [convert.unread]"
    dry = run("convert", *words, "--dry-run")
    assert advice in dry.stdout
    assert repr(name) in dry.stdout
    assert advice in run("convert", *words).stderr


# ---- stacks of experts, which compressed-tensors cannot store as codes

# Model types, and True if `--experts separate` supports their stacks.
STACKS = {"gpt_oss": True, "llama4_text": True, "granitemoe": False, "separate": False}
UNJOINED = "gpt_oss"  # a model type whose single experts no reader joins again


def stack_model(tmp_path: Path, model_type: str) -> Path:
    """Write a model with a stack of two experts, transposed for the model types in `STACKS`."""
    is_transposed = model_type in STACKS
    names = ("experts.gate_up_proj", "experts.down_proj")
    if not STACKS.get(model_type, True):
        names = ("moe.w_in.weight", "moe.w_out.weight")
    folder = tmp_path / "model"
    folder.mkdir()
    up, down = (f"model.layers.0.mlp.{name}" for name in names)
    tensors = {
        up: torch.randn(2, *((512, 256) if is_transposed else (256, 512))),
        down: torch.randn(2, *((128, 512) if is_transposed else (512, 128))),
        "model.layers.0.self_attn.o_proj.weight": torch.randn(128, 128),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def assert_readable(folder: Path, source: Path) -> None:
    for arguments in ([folder], [source, folder]):
        done = run("verify", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("encoding", [each for each in written_encodings() if styles_of(each)])
@pytest.mark.parametrize("model_type", STACKS)
def test_stacks_are_refused_or_readable(encoding: str, model_type: str, tmp_path: Path) -> None:
    folder = stack_model(tmp_path, model_type)
    for style in styles_of(encoding):
        out = tmp_path / f"out-{style}"
        if style != "compressed-tensors":
            loadstone.convert(folder, out, quantize=encoding, style=style)
            assert_readable(out, folder)
            if style is not None and "compressed-tensors" in styles_of(encoding):
                with pytest.raises(loadstone.Error):  # compressed-tensors has no such layout
                    loadstone.convert(out, tmp_path / "other", style="compressed-tensors")
                assert not (tmp_path / "other").exists()
            continue
        asked: dict[str, Any] = {"quantize": encoding, "style": style}
        doors = () if encoding.startswith("int4-packed") else (loadstone.convert, loadstone.merge)
        for door in doors:
            with pytest.raises(loadstone.PlanError, match="has no layout for tensors") as caught:
                door(folder, out, **asked)
            (finding,) = [each for each in caught.value.findings if each.severity == "error"]
            assert finding.code == "plan.options"
            is_advised = STACKS[model_type] and model_type != UNJOINED
            assert ("--experts separate" in finding.suggestion) == is_advised
            assert not out.exists()
        # Follow the suggestions of the finding.
        loadstone.convert(folder, out, **asked, exclude="moe|experts")
        assert_readable(out, folder)
        if STACKS[model_type]:
            loadstone.convert(folder, tmp_path / "single", experts="separate")
            loadstone.convert(tmp_path / "single", tmp_path / "codes", **asked)
            assert_readable(tmp_path / "codes", tmp_path / "single")


def test_stacks_that_are_taken_apart_have_a_layout(tmp_path: Path) -> None:
    """Control: the experts of most models are written separately."""
    folder = stack_model(tmp_path, "qwen3_moe")
    loadstone.convert(folder, tmp_path / "out", quantize="fp8", style="compressed-tensors")
    assert max(value.dim() for value in load_file(tmp_path / "out/model.safetensors").values()) == 2


@pytest.mark.parametrize("encoding", [each for each in written_encodings() if styles_of(each)])
def test_experts_of_a_layer_in_several_encodings_warn(encoding: str, tmp_path: Path) -> None:
    folder = stack_model(tmp_path, "qwen3_moe")
    stack = "model.layers.0.mlp.experts"
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"quantize": encoding, "exclude": r"experts\.1\."}, True),
        ({"quantize": {r"experts\.1\.": encoding, "": "fp8"}}, encoding != "fp8"),
        ({"quantize": encoding}, False),
        ({"quantize": encoding, "exclude": "experts"}, False),
    ]
    for style in styles_of(encoding):
        for i, (options, is_mixed) in enumerate(cases):
            if style is None and isinstance(options["quantize"], dict):
                continue  # bitsandbytes has one encoding per checkpoint
            out = tmp_path / f"{style}-{i}"
            found = unread(loadstone.convert(folder, out, **options, style=style).findings)
            assert (stack in found) == is_mixed
            assert "several encodings" in found.get(stack, "several encodings")


def test_a_matrix_that_is_no_layers_weight_warns(tmp_path: Path) -> None:
    tensors = {"a.table": torch.randn(128, 128), "a.proj.weight": torch.randn(128, 128)}
    save_file(tensors, tmp_path / "a.safetensors")
    report = loadstone.convert(
        tmp_path / "a.safetensors", tmp_path / "o.safetensors", quantize="fp8", include="."
    )
    assert unread(report.findings).keys() == {"a.table"}


@pytest.mark.parametrize("name", ["layers.0.mixer.A_log", "layers.0.mlp.experts.table"])
@pytest.mark.parametrize("encoding", [each for each in written_encodings() if styles_of(each)])
def test_an_include_without_names_for_components_is_refused(
    encoding: str, name: str, tmp_path: Path
) -> None:
    """Only ModelOpt's style has names for components of a matrix that is not a ``.weight``."""
    source, out = tmp_path / "a.safetensors", tmp_path / "o.safetensors"
    values = {name: torch.randn(128, 128), "layers.0.proj.weight": torch.randn(128, 128)}
    save_file(values, source)
    for style in styles_of(encoding):
        options: dict[str, Any] = {"quantize": encoding, "style": style}
        if style != "modelopt":
            with pytest.raises(loadstone.Error, match=re.escape(f"'{name}' stays unchanged")):
                loadstone.convert(source, out, **options, include=re.escape(name))
            assert not out.exists()
        made = tmp_path / f"{style}.safetensors"
        report = loadstone.convert(source, made, **options, include=".")
        alone = {each.target for each in report.findings if each.code == "convert.left_alone"}
        assert alone == (set() if style == "modelopt" else {name})
        loadstone.convert(made, tmp_path / f"{style} decoded.safetensors", dequantize=True)
        found = load_file(tmp_path / f"{style} decoded.safetensors")
        assert found.keys() == values.keys()
        for each, value in values.items():
            assert (found[each].float() - value).norm() < 0.2 * value.norm()
            assert torch.equal(found[each].float(), value) == (each in alone)


@pytest.mark.parametrize("only_attention", [False, True])
@pytest.mark.parametrize("experts", ["keep", "separate"])
@pytest.mark.parametrize("encoding", [each for each in written_encodings() if styles_of(each)])
def test_stacks_next_to_codes_warn(
    encoding: str, experts: str, only_attention: bool, tmp_path: Path
) -> None:
    """If a config declares codes, transformers looks for separate experts of Llama 4.

    Nothing finds separate experts of GPT-OSS, nor those of Llama 4 in the style modelopt.
    """
    folder = stack_model(tmp_path, "llama4_text")
    for style in styles_of(encoding):
        for model_type in ("llama4_text", "gpt_oss"):
            (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
            report = loadstone.convert(
                folder,
                tmp_path / f"{style} {model_type}",
                quantize={"self_attn": encoding} if only_attention else encoding,
                style=style,
                experts=experts,
                exclude=[r"\.experts\."],
            )
            needs_separate = model_type == "llama4_text" and style != "modelopt"
            stack = "model.layers.0.mlp.experts."
            if experts == "keep":
                lost = {f"{stack}gate_up_proj", f"{stack}down_proj"} if needs_separate else set()
            else:
                names = ("gate_proj", "up_proj", "down_proj")
                lost = {f"{stack}{i}.{each}.weight" for i in range(2) for each in names}
            is_lost = experts == "keep" or not needs_separate
            assert unread(report.findings).keys() == (lost if is_lost else set())


def test_a_merge_warns_too(model: Path, tmp_path: Path) -> None:
    options = {"quantize": "fp8", "include": "up_proj|wte"}
    report = loadstone.merge({model: 1.0}, tmp_path / "out", method="linear", **options)
    assert unread(report.findings).keys() == {"transformer.wte.weight"}


def test_linear_layers_elsewhere(model: Path, tmp_path: Path) -> None:
    """Control: a different model has linear layers under these names."""
    (model / "config.json").write_text(json.dumps({"model_type": "own"}))
    report = loadstone.convert(
        model, tmp_path / "out", quantize="fp8", style="compressed-tensors", include="c_attn|c_fc"
    )
    assert not unread(report.findings)
    assert "transformer.h.0.attn.c_attn.weight" not in plain(tmp_path / "out")


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_choice_without_quantize_is_an_error(model: Path, tmp_path: Path, option: str) -> None:
    with pytest.raises(loadstone.Error, match="have no effect without") as caught:
        loadstone.convert(model, tmp_path / "out", **{option: "c_attn"})
    assert caught.value.code == "plan.options"
    done = run("convert", model, tmp_path / "out", f"--{option}", "c_attn")
    assert done.returncode == 2
    assert "have no effect without" in done.stderr
    with pytest.raises(loadstone.Error, match="have no effect without"):
        loadstone.merge({model: 1.0}, tmp_path / "out", method="linear", **{option: "c_attn"})
    assert not (tmp_path / "out").exists()


def test_the_explanation_agrees_with_the_page() -> None:
    """Not every reader that lacks an encoding is satisfied by an exclusion."""
    text = run("explain", "convert.unread").stdout
    assert "docs/opens-where.md" in text and "choose an encoding or a style" in text
    page = (Path(__file__).parents[3] / "docs" / "opens-where.md").read_text()
    assert "so `--exclude experts` does not help" in " ".join(page.split())
    assert "do not belong to linear layers, exclude them" in " ".join(text.split())


@pytest.mark.parametrize("encoding", ["int4-packed", "int4-packed-32"])
@pytest.mark.parametrize("model_type", STACKS)
def test_stacks_stay_plain_in_int4_packed(encoding: str, model_type: str, tmp_path: Path) -> None:
    """The encoding has no layout for a stack in any style."""
    folder, out = stack_model(tmp_path, model_type), tmp_path / "out"
    report = loadstone.convert(folder, out, quantize=encoding)
    left = [each for each in report.findings if each.code == "convert.left_alone"]
    assert [each.severity for each in left] == ["warning"] * 2
    assert all("only single matrices" in each.message for each in left)
    assert_readable(out, folder)
