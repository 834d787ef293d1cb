"""Quantized folders of models whose files have different module names than transformers' classes.

transformers must build quantized layers for exactly the modules with codes. The files have the
published names, such as `visual.blocks.0` and `vit.layers.0`, but transformers matches the lists in
config.json against its own names, `model.visual.blocks.0` and `model.vision_tower.layers.0`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModel
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers_models import by_name, write_checkpoint

import loadstone

TYPES = [
    "gemma3",
    "got_ocr2",
    "granite_speech",
    "hunyuan_vl",
    "internvl",
    "llava",
    "mistral3",
    "mllama",
    "paddleocr_vl",
    "paligemma",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen2_vl",
    "step3p7",
    "voxtral",
]
# Models with experts. They are tested only with fp8, because transformers does not open experts in
# the other encodings.
WITH_EXPERTS = ["deepseek_ocr2", "mistral_large4", "phimoe", "unlimited_ocr"]
CHOSEN = ["llava", "qwen2_vl", "gemma3"]
OPTIONS: dict[str, dict[str, Any]] = {
    "nf4": {"quantize": "nf4"},
    "int8": {"quantize": "int8"},
    "fp8": {"quantize": "fp8", "style": "compressed-tensors"},
    "int8-channel": {"quantize": "int8-channel", "style": "compressed-tensors"},
    "mixed": {
        "quantize": {"self_attn": "fp8", "": "fp8-channel"},
        "style": "compressed-tensors",
    },
}


def without_codes(model: torch.nn.Module, missing: set[str]) -> Iterator[str]:
    """Yield quantized layers whose codes or scales the files lack."""
    yield from (name for name in missing if "scale" in name)
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            if getattr(module.weight, "quant_state", None) is None:
                yield name
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt) and module.weight.dtype != torch.int8:
            yield name


def wrong_layers(case: Any, folder: Path, cls: Any = None) -> list[str]:
    """Return the quantized layers that transformers builds without codes, and unused scales."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = (cls or case.cls).from_pretrained(
            folder, dtype=torch.bfloat16, output_loading_info=True
        )
    unused = {str(name) for name in info["unexpected_keys"] if str(name).endswith("_scale")}
    return sorted({*without_codes(model, info["missing_keys"]), *unused})


def converted(case: Any, folder: Path, **options: Any) -> Path:
    base = write_checkpoint(case, folder / "base", "public")
    loadstone.convert(base, folder / "out", **options)
    return folder / "out"


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in TYPES for option in OPTIONS]
    + [(name, "fp8") for name in WITH_EXPERTS],
)
def test_the_library_quantizes_what_has_codes(name: str, option: str, tmp_path: Path) -> None:
    case = by_name(name)
    assert wrong_layers(case, converted(case, tmp_path, **OPTIONS[option])) == []


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("exclude", [r"layers\.0\.self_attn", r"down_proj|fc2", r"layers\.1\."])
def test_chosen_layers_stay_plain(name: str, option: str, exclude: str, tmp_path: Path) -> None:
    case = by_name(name)
    out = converted(case, tmp_path, **OPTIONS[option], exclude=exclude)
    assert wrong_layers(case, out) == []


# Choices that treat layers of a tower and of the language model differently, although the layers
# have equal names.
BOTH_SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "two formats": (
        "llava",
        {
            "quantize": {"vision_tower": "fp8", "": "int8-channel"},
            "include": ["vision_tower.*_proj"],
            "style": "compressed-tensors",
        },
    ),
    "a part of a tower": (
        "llava",
        {"quantize": "fp8", "include": ["vision_tower.*fc2"], "style": "compressed-tensors"},
    ),
    "a part of a tower in int8": ("llava", {"quantize": "int8", "include": ["vision_tower.*fc2"]}),
    "a part of an audio tower": (
        "qwen2_audio",
        {"quantize": "fp8", "include": ["audio_tower.*fc1"], "style": "compressed-tensors"},
    ),
    "the head": (
        "cosmos3_omni",
        {"quantize": "fp8", "include": ["lm_head"], "style": "compressed-tensors"},
    ),
    "a layer before a tied head": ("roberta", {"quantize": "int8", "include": [r"lm_head\.dense"]}),
    "a layer before BERT's tied head": (
        "bert",
        {"quantize": "fp8", "include": ["cls.*transform.*dense"], "style": "compressed-tensors"},
    ),
}


@pytest.mark.parametrize("choice", BOTH_SIDES)
def test_layers_of_one_name_are_told_apart(choice: str, tmp_path: Path) -> None:
    name, options = BOTH_SIDES[choice]
    case = by_name(name)
    assert wrong_layers(case, converted(case, tmp_path, **options)) == []


# Options that leave some layers of a list unquantized, by model type. AutoModel drops `model.`,
# `roberta.` and `tracker_model.`; AltCLIP calls `encoder.layers` `encoder.layer`.
IN_PART: dict[str, dict[str, Any]] = {
    "bart": {"exclude": [r"encoder\.layers\.0\."]},
    "mbart": {"exclude": [r"encoder\.layers\.0\.", r"decoder\.layers\.1\.encoder_attn"]},
    "whisper": {"exclude": [r"encoder\.layers\.0\."]},
    "llava": {
        "include": ["vision_tower.*(self_attn|mlp)"],
        "exclude": [r"language_model.*layers\.1\.self_attn\.q_proj"],
    },
    "video_llava": {
        "include": ["video_tower.*(self_attn|mlp)"],
        "exclude": [r"language_model\.model\.layers\.1\.self_attn\.v_proj"],
    },
    "roberta": {"include": [r"encoder\.layer\."], "exclude": [r"layer\.0\."]},
    "bert": {"include": [r"encoder\.layer\.0\..*dense"]},
    "altclip": {"include": ["^visual_projection"]},
    "sam3_tracker": {},
}


@pytest.mark.parametrize("is_auto", [False, True])
@pytest.mark.parametrize("option", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize("name", IN_PART)
def test_lists_of_layers_that_are_plain_in_part(
    name: str, option: str, is_auto: bool, tmp_path: Path
) -> None:
    case = by_name(name)
    out = converted(case, tmp_path, **OPTIONS[option], **IN_PART[name])
    assert wrong_layers(case, out, AutoModel if is_auto else None) == []


@pytest.mark.parametrize("is_auto", [False, True])
@pytest.mark.parametrize("name", [name for name in IN_PART if IN_PART[name].get("exclude")])
def test_lists_of_layers_in_two_formats(name: str, is_auto: bool, tmp_path: Path) -> None:
    case = by_name(name)
    choice = IN_PART[name]
    formats = dict.fromkeys(choice["exclude"], "int8-channel") | {"": "fp8"}
    include = choice.get("include", [])
    out = converted(case, tmp_path, quantize=formats, style="compressed-tensors", include=include)
    assert wrong_layers(case, out, AutoModel if is_auto else None) == []


@pytest.mark.parametrize("option", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["hunyuan_vl", "paddleocr_vl", "bart", "altclip"])
def test_names_of_the_file_alone_do_not_find_them(name: str, option: str, tmp_path: Path) -> None:
    """Control."""
    case = by_name(name)
    out = converted(case, tmp_path, **OPTIONS[option], **IN_PART.get(name, {}))
    config = json.loads((out / "config.json").read_text())
    section = config["quantization_config"]
    key = "ignore" if option == "fp8" else "llm_int8_skip_modules"
    with safe_open(out / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    section[key] = [each for each in section[key] if {each, f"{each}.weight"} & stored]
    (out / "config.json").write_text(json.dumps(config))
    assert wrong_layers(case, out, AutoModel if name in IN_PART else None) != []


def test_a_plain_name_may_be_the_end_of_a_quantized_one(tmp_path: Path) -> None:
    """transformers compares the ends of names, so the list needs a pattern for the whole name."""
    (tmp_path / "in").mkdir()
    state = {f"{name}.weight": torch.randn(64, 64).bfloat16() for name in ("proj", "layers.0.proj")}
    save_file(state, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text("{}")
    loadstone.convert(tmp_path / "in", tmp_path / "out", quantize="nf4")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    skipped = config["quantization_config"]["llm_int8_skip_modules"]
    assert should_convert_module("layers.0.proj", skipped)
    assert not should_convert_module("proj", skipped)


@pytest.mark.parametrize("tower", ["image_tower", "video_tower"])
def test_towers_stay_plain_by_default(tower: str, tmp_path: Path) -> None:
    out = converted(by_name("video_llava"), tmp_path, quantize="int8")
    with safe_open(out / "model.safetensors", "pt") as file:
        quantized = [name for name in file.keys() if name.endswith(".SCB")]  # noqa: SIM118
    assert quantized
    assert not any(tower in name for name in quantized)


def is_read(case: Any, folder: Path) -> bool:
    """Return whether transformers finds a layer for all codes and scales."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _, info = case.cls.from_pretrained(
                folder, dtype=torch.bfloat16, output_loading_info=True
            )
        except RuntimeError:
            return False
    return not info["unexpected_keys"] and not wrong_layers(case, folder)


# Model types, and True if transformers joins or splits their layers while it loads.
CHANGED = {
    "qwen3_moe": "joins",
    "mixtral": "joins",
    "deepseek_v3": "joins",
    "qwen3_vl_moe": "joins",
    "hy_v4": "joins",
    "ernie4_5_vl_moe": "joins",
    "minimax_m3_vl": "joins",
    "hrm_text": "splits",
    "jina_embeddings_v3": "splits",
    "molmo2_text": "splits",
    "nomic_bert": "splits",
    "radio": "splits",
    "sapiens2": "splits",
    "llama": "",
    "qwen2_vl": "",
}


# For int8-channel, the keys do not show whether transformers reads a split layer.
READ = [
    (name, option)
    for name, change in CHANGED.items()
    for option in ("nf4", "int8", "fp8", "int8-channel")
    if (option, change) != ("int8-channel", "splits")
]


@pytest.mark.parametrize(("name", "option"), READ)
def test_a_plan_tells_of_layers_that_the_library_changes(
    name: str, option: str, tmp_path: Path
) -> None:
    """A conversion warns of exactly the layers whose codes transformers does not read."""
    case = by_name(name)
    base = write_checkpoint(case, tmp_path / "base", "public", torch.bfloat16)
    report = loadstone.convert(base, tmp_path / "out", **OPTIONS[option])
    warned = [each.message for each in report.findings if each.code == "convert.unread"]
    assert is_read(case, tmp_path / "out") == (not warned)
    assert all(f"transformers {CHANGED[name]}" in each for each in warned)
