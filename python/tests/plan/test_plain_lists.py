"""Tests the warning for config lists that name modules as plain although the files quantize them.

The oracles are functions of compressed-tensors, transformers and diffusers, and fnmatch for
ModelOpt.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import verified
from compressed_tensors.utils.match import match_name
from diffusers import BitsAndBytesConfig
from diffusers.quantizers.bitsandbytes.utils import _replace_with_bnb_linear
from readback_cells import styles_of, written_encodings
from safetensors.torch import save_file
from transformers.quantizers.quantizers_utils import should_convert_module

import loadstone

H = 256
MODULES = [
    *(f"model.layers.{layer}.self_attn.{each}_proj" for layer in (0, 1, 10) for each in "qo"),
    *(f"model.layers.{layer}.mlp.{each}_proj" for layer in (0, 1, 10) for each in ("up", "down")),
]
UNREAD = "cannot be compared"
DOWN_0 = "model.layers.0.mlp.down_proj"
PLAIN = ["lm_head", "model.embed_tokens", "model.visual.proj"]

# Entries for every list; each library interprets them differently.
ENTRIES = [
    "re:.*down_proj",
    "re:.*down_proj$",
    "re:model.layers.1.*",
    "re:down_proj",
    "re:.*layers\\.(0|1)\\.mlp",
    "re:^(?!lm_head).*",
    "*down_proj*",
    "*down_proj",
    "model.layers.1*",
    "model.layers.1.*",
    "model.layers.[0-9].mlp.up_proj",
    "model.layers.[!0].mlp.up_proj",
    "model.layers.?.mlp.up_proj",
    "model.layers.1",
    "model.layers.10.mlp",
    "model.layers.10.mlp.down_proj",
    "layers.10.mlp.down_proj",
    "down_proj",
    "_proj",
    "mlp",
    "(.*\\.)?mlp",
    "^model.layers.0.mlp.up_proj$",
    "model.layers.*",
    "lm_head",
    "visual",
    "model.layers.2",
    "mtp.layers.0.mlp.down_proj",
    "",
    "re:(?!model).*",
    "re:^(?!.*down_proj).*mlp.*",
    "re:(?!.*(down|up)_proj)(?=.*layers.1).*",
    "re:(?!)",
    "re:(?i).*DOWN_proj$",
    "re:(?i)^(?!.*DOWN).*",
    "^(?!.*mlp).*_proj",
]

# Patterns that RE2 does not support.
BEYOND_RE2 = [
    r"re:.*(?<=self_attn)\.q_proj$",
    r"re:.*(l)ayers.0.se\1f_attn.q_proj",
    "re:.*+q_proj|.*q_proj",
    "re:(?>.*mlp)",
    "re:.*(?!down)._proj",
    r"re:model\.visual\.(?!merger).*",
    r"re:model\.visual\.((?=a)|b(?<!c))*.*",
    "re:.*norm(?<!q_norm)$",
    "re:(?!.*mlp).*q_proj|.*o_proj",
    "re:(?!a)*.*",
    "re:(a)?(?(1)b|.*)",
    r"re:\N{LATIN SMALL LETTER M}odel",
]


Reader = Callable[[str, str], bool]


def reads(reader: Reader, module: str, entry: str) -> bool:
    """Return whether an entry leaves the module plain; false if the library rejects the entry."""
    try:
        return reader(module, entry)
    except re.error:
        return False


def by_compressed_tensors(module: str, entry: str) -> bool:
    return match_name(module, entry)


def by_modelopt(module: str, entry: str) -> bool:
    return fnmatch.fnmatchcase(module, entry)


def by_transformers(module: str, entry: str) -> bool:
    return not should_convert_module(module, [entry])


def by_diffusers(module: str, entry: str) -> bool:
    """Convert a model that consists of this layer."""
    model = parent = torch.nn.Module()
    *outer, last = module.split(".")
    for name in outer:
        parent.add_module(name, torch.nn.Module())
        parent = parent.get_submodule(name)
    parent.add_module(last, torch.nn.Linear(1, 1))
    config = BitsAndBytesConfig(load_in_4bit=True)
    _replace_with_bnb_linear(model, [entry], quantization_config=config)
    return type(parent.get_submodule(last)) is torch.nn.Linear


# Entries for which loadstone finds fewer modules than the library, and how many fewer. Checking for
# a dot after a match would need look-around, which RE2 lacks.
UNKNOWN = {
    (by_transformers, "model.layers.1*"): 4,  # the modules of layer 1
}


LOOK_AROUND = re.compile(r"\(\?<?[=!](\([^()]*\)|[^()])*\)(?!\*)")


def is_unread(reader: Reader, entry: str) -> bool:
    """Return true if loadstone or the library cannot read the entry as a pattern.

    An entry with look-around counts as unreadable if modules match without the look-around, except
    that look-around at the beginning is supported.
    """
    is_expression = entry.startswith("re:")
    if reader is not by_transformers and (reader is not by_compressed_tensors or not is_expression):
        return False
    try:
        reader(MODULES[0], entry)
    except re.error:
        return True
    without = LOOK_AROUND.sub("", entry)
    if without == entry:
        return entry in BEYOND_RE2
    is_inside = entry in BEYOND_RE2 or (reader is by_transformers and is_expression)
    return is_inside and any(reads(reader, each, without) for each in MODULES)


# By style: the list's name, its file, its section, and the library's function.
LISTS: dict[str | None, list[tuple[str, str, str, Reader]]] = {
    "compressed-tensors": [("ignore", "config.json", "quantization_config", by_compressed_tensors)],
    "modelopt": [
        ("ignore", "config.json", "quantization_config", by_modelopt),
        ("exclude_modules", "hf_quant_config.json", "quantization", by_modelopt),
    ],
    None: [("llm_int8_skip_modules", "config.json", "quantization_config", by_transformers)],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    tensors = {f"{each}.weight": torch.randn(H, H).mul(0.05).bfloat16() for each in MODULES + PLAIN}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def change(path: Path, section: str, edit: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads(path.read_text())
    edit(config[section])
    path.write_text(json.dumps(config))


def reported(folder: Path) -> list[str]:
    """Return the warnings of a plain load."""
    status, report = verified(folder)
    found = [each["message"] for each in report["findings"] if each["code"] == "q.config"]
    assert bool(found) == (status == 1)
    return found


CELLS = [(each, style) for each in written_encodings() for style in styles_of(each)]


@pytest.mark.parametrize(("encoding", "style"), CELLS)
def test_each_list_of_each_encoding(
    encoding: str, style: str | None, source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    loadstone.convert(source, folder, quantize=encoding, style=style)
    assert reported(folder) == []  # control
    for key, file, section, reader in LISTS[style]:
        kept = (folder / file).read_text()
        if key not in json.loads(kept)[section]:
            continue
        known = [
            each
            for each in ENTRIES
            if (reader, each) not in UNKNOWN and not is_unread(reader, each)
        ]
        entry = next(each for each in known if reads(reader, DOWN_0, each))
        change(folder / file, section, lambda its, k=key, e=entry: its[k].append(e))
        (message,) = reported(folder)
        assert f"found {key} '" in message and file in message
        assert DOWN_0 in named([message])
        report = loadstone.convert(folder, tmp_path / key)
        assert [each.message for each in report.findings if each.code == "q.config"] == [message]
        (folder / file).write_text(kept)


READERS: dict[str, tuple[str, str | None, str, str, str, Reader]] = {
    f"{encoding}, {key}": (encoding, style, *one)
    for encoding, style in [
        ("int8-channel", "compressed-tensors"),
        ("fp8", "modelopt"),
        ("nf4", None),
    ]
    for one in LISTS[style]
    for key in [one[0]]
} | {
    f"{encoding} of diffusers": (encoding, None, *LISTS[None][0][:3], by_diffusers)
    for encoding in ("nf4", "int8")
}


@pytest.mark.parametrize("case", READERS)
def test_entries_are_read_as_libraries_do(case: str, source: Path, tmp_path: Path) -> None:
    encoding, style, key, file, section, reader = READERS[case]
    folder = tmp_path / "out"
    loadstone.convert(source, folder, quantize=encoding, style=style)
    if reader is by_diffusers:
        config = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(config | {"_class_name": "FluxTransformer2DModel"}))
    found, expected = {}, {}
    for entry in ENTRIES + BEYOND_RE2:
        change(folder / file, section, lambda its, e=entry: its.update({key: [e]}))
        unread = is_unread(reader, entry)
        listed = [each for each in MODULES if not unread and reads(reader, each, entry)]
        expected[entry] = UNKNOWN.get((reader, entry), len(listed))
        messages = reported(folder)
        assert [entry in each for each in messages if UNREAD in each] == [True] * unread
        found[entry] = sum(map(count_of, messages))
        assert len(messages) <= 1
        assert all(each in listed for each in named(messages))
    assert found == expected
    assert len(set(expected.values())) > 2


def named(messages: list[str]) -> list[str]:
    """Return the modules that warnings name."""
    ends = [each.partition("; expected ")[2] for each in messages]
    return [name for each in ends for name in re.findall("'([^']*)'", each)]


def count_of(message: str) -> int:
    """Return the number of modules in a warning."""
    _, _, modules = message.partition("; expected ")
    more = re.search(r" and (\d+) more$", modules)
    return modules.count("'") // 2 + (int(more[1]) if more else 0)


def with_section(source: Path, folder: Path, encoding: str, section: dict[str, Any]) -> Path:
    """Write codes in the style of compressed-tensors, with their own config."""
    loadstone.convert(source, folder, quantize=encoding, style="compressed-tensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= section
    (folder / "config.json").write_text(json.dumps(config))
    return folder


DOWN = sum("down_proj" in each for each in MODULES)
UP = "re:.*up_proj"
# Fields of a section, and the number of quantized modules that they leave plain.
SECTIONS: dict[str, tuple[dict[str, Any], int]] = {
    "targets of siblings": ({"targets": [UP, "re:.*self_attn"]}, DOWN),
    "targets of one layer": ({"targets": ["model.layers.1.mlp.up_proj"]}, len(MODULES) - 1),
    "targets of a block": ({"targets": ["re:.*self_attn"]}, 2 * DOWN),
    "targets by look-ahead": ({"targets": ["re:(?!.*mlp)"]}, 2 * DOWN),
    "an empty list of targets": ({"targets": []}, len(MODULES)),
    "targets of embeddings": ({"targets": ["Embedding"]}, 0),
    "look-around in other modules": ({"ignore": ["re:model.visual.(?!merger).*"]}, 0),
    "look-behind in other targets": ({"targets": ["re:.*_proj", "re:.*(?<=x)y"]}, 0),
    "targets of every class": ({"targets": ["Module"]}, 0),
    "a class, and an unread pattern": ({"targets": ["Linear", "re:(?<=x)"]}, 0),
    "ignored class": ({"ignore": ["Linear"]}, len(MODULES)),
    "every class ignored": ({"ignore": ["lm_head", "Module"]}, len(MODULES)),
    "ignored embeddings": ({"ignore": ["Embedding", "LlamaMLP"]}, 0),
    "all targets": ({"targets": [UP, "re:.*down_proj$", "re:.*self_attn"]}, 0),
    "targets of a class": ({"targets": [UP, "Linear"]}, 0),
    "targets under other names": ({"targets": ["re:language_model.*"]}, 0),
    "targets of other modules": ({"targets": ["re:.*self_attn.*", "re:.*feed_forward.*"]}, 0),
    "no targets": ({"targets": None}, 0),
    "fp8": ({"quant_method": "fp8", "modules_to_not_convert": ["down_proj"]}, DOWN),
    "fp8, other modules": ({"quant_method": "fp8", "modules_to_not_convert": ["gate", "mlp"]}, 0),
    "fp8, a list of another library": ({"quant_method": "fp8", "ignore": [UP]}, 0),
    "a list of another library": ({"modules_to_not_convert": ["down_proj"]}, 0),
    "another program": ({"quant_method": "quark", "ignore": ["re:.*down_proj"]}, 0),
    "not a list": ({"ignore": "re:.*down_proj"}, 0),
    "null": ({"ignore": None}, 0),
}


@pytest.mark.parametrize("case", SECTIONS)
def test_sections(case: str, source: Path, tmp_path: Path) -> None:
    section, count = dict(SECTIONS[case][0]), SECTIONS[case][1]
    folder = with_section(source, tmp_path / "out", "fp8-channel", {})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    its = config["quantization_config"]
    if "targets" in section:
        its["config_groups"]["group_0"]["targets"] = section.pop("targets")
    its |= section
    path.write_text(json.dumps(config))
    messages = reported(folder)
    assert sum(map(count_of, messages)) == count
    assert not any(UNREAD in each for each in messages)


@pytest.mark.parametrize(("targets", "count"), [(["Linear"], 0), (["re:.*_proj"], 1)])
def test_a_quantized_module_is_linear_whatever_its_name(
    targets: list[str], count: int, source: Path, tmp_path: Path
) -> None:
    """Vision models have linear layers whose names are like those of embeddings."""
    folder = with_section(source, tmp_path / "out", "fp8-channel", {})
    for path in folder.glob("*.safetensors*"):
        text = path.read_bytes()
        path.write_bytes(
            text.replace(b"model.layers.10.mlp.up_proj", b"model.layers.10.patch_embed")
        )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = targets
    (folder / "config.json").write_text(json.dumps(config))
    messages = reported(folder)
    assert sum(map(count_of, messages)) == count
    assert all("patch_embed" in each for each in messages)


# Lists that loadstone cannot compare with the tensors.
UNREAD_LISTS: dict[str, tuple[str, list[str], str]] = {
    "ignore": ("ignore", ["lm_head", "re:(?<=x)"], "look-behind"),
    "not a pattern": ("ignore", ["re:*down_proj"], "nothing to repeat"),
    "a long pattern": ("ignore", ["re:" + "a" * 5000], "too long"),
    "much look-ahead": ("ignore", ["re:" + 9 * "(?!x)"], "look-ahead"),
    "targets": ("targets", [UP, "re:.*(?<=self_attn).q_proj"], "look-behind"),
    "targets of a class": ("targets", [UP, "LlamaAttention"], "classes"),
    "targets of a class alone": ("targets", ["Conv2d"], "classes"),
}


@pytest.mark.parametrize("case", UNREAD_LISTS)
def test_a_list_that_cannot_be_compared_is_named(case: str, source: Path, tmp_path: Path) -> None:
    key, entries, reason = UNREAD_LISTS[case]
    folder = with_section(source, tmp_path / "out", "fp8-channel", {})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    section = config["quantization_config"]
    (section["config_groups"]["group_0"] if key == "targets" else section)[key] = entries
    path.write_text(json.dumps(config))
    (message,) = reported(folder)
    assert f"{key} '{entries[-1][:100]}" in message and reason in message and UNREAD in message
    report = loadstone.convert(folder, tmp_path / "again")
    assert [each.message for each in report.findings if each.code == "q.config"] == [message]


@pytest.mark.parametrize("encoding", ["fp8-channel", "nvfp4", "mxfp4"])
def test_symmetry(encoding: str, source: Path, tmp_path: Path) -> None:
    folder = with_section(source, tmp_path / "out", encoding, {})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    path.write_text(json.dumps(config))
    (message,) = reported(folder)
    assert "found symmetric false;" in message


def test_lists_of_a_part_are_not_judged(source: Path, tmp_path: Path) -> None:
    """The config of a component contains names within the component, so its list is ignored."""
    entry = {"ignore": ["re:.*down_proj"]}
    folder = with_section(source, tmp_path / "out", "fp8-channel", entry)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    assert len(reported(folder)) == 1
    path.write_text(json.dumps({"text_config": config}))
    assert len(reported(folder)) == 1
    path.write_text(json.dumps(config | {"text_config": config}))
    assert reported(folder) == []


def test_a_long_list_takes_no_long_time(source: Path, tmp_path: Path) -> None:
    """Too many patterns cause a warning, but any number of names is looked up."""
    many = [f"re:.*layers\\.{i}\\.none" for i in range(200_000)]
    folder = with_section(source, tmp_path / "out", "fp8-channel", {"ignore": many})
    (message,) = reported(folder)
    assert UNREAD in message and len(message) < 1000
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(200_000)]
    folder = with_section(source, tmp_path / "names", "fp8-channel", {"ignore": names})
    assert sum(map(count_of, reported(folder))) == DOWN
