"""The types of ``_base/vocabulary.py`` list exactly the words that the core accepts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file

import loadstone
from loadstone import _core
from loadstone._base import vocabulary

# Subcommand, option, and the type of the Python keyword with the same meaning.
OPTIONS = [
    ("convert", "--unexpected", vocabulary.Unexpected),
    ("convert", "--receipt", vocabulary.ReceiptDigest),
    ("convert", "--page-cache", vocabulary.PageCache),
    ("convert", "--experts", vocabulary.Experts),
    ("convert", "--style", vocabulary.Style),
    ("convert", "--mode", vocabulary.Mode),
    ("merge", "--tie", vocabulary.Tie),
    ("merge", "--method", vocabulary.MergeMethod),
]

# For each keyword of the public signatures, the name of its type.
KEYWORDS = {
    "missing": "Missing",
    "unexpected": "Unexpected",
    "tie": "Tie",
    "receipt": "ReceiptDigest",
    "page_cache": "PageCache",
    "experts": "Experts",
    "mode": "Mode",
    "style": "Style",
    "method": "MergeMethod",
    "progress": "Progress",
}
FUNCTIONS = [
    *(loadstone.plan, loadstone.load, loadstone.convert, loadstone.merge, loadstone.Plan.execute),
    loadstone.Plan.to_html,
]
LIBRARIES = {
    "transformers": ["from_pretrained"],
    "diffusers": ["from_single_file", "from_pretrained"],
    "accelerate": ["load_checkpoint_in_model", "load_checkpoint_and_dispatch"],
    "modelopt": ["init_quantized_weights", "load"],
}


@pytest.mark.parametrize(
    ("subcommand", "option", "words"), OPTIONS, ids=[option for _, option, _ in OPTIONS]
)
def test_words_are_those_of_the_command(run, subcommand: str, option: str, words: Any) -> None:
    text = run(subcommand, "--help", status=0).stdout
    (listed,) = re.findall(rf"^ +{option} \S+?:\{{(.*?)\}}", text, re.MULTILINE)
    assert {*listed.split(",")} == set(get_args(words))


def test_words_are_those_of_the_core() -> None:
    policies = {*_core.MISSING_POLICIES, "initialize"}
    assert set(get_args(vocabulary.MissingPolicy)) == policies
    assert set(get_args(vocabulary.ModelOptMode)) == set(_core.DIALECTS["fp8"])


def file_of_one_tensor(folder: Path) -> Path:
    save_file({"weight": torch.ones(2, 2)}, folder / "in.safetensors")
    return folder / "in.safetensors"


def convert(folder: Path, **options: Any) -> None:
    loadstone.convert(file_of_one_tensor(folder), folder / "out.safetensors", **options)


def merge(folder: Path, **options: Any) -> None:
    loadstone.merge(file_of_one_tensor(folder), folder / "out.safetensors", **options)


def plan(folder: Path, **options: Any) -> None:
    loadstone.plan(torch.nn.Linear(2, 2, bias=False), file_of_one_tensor(folder), **options)


# A function, its keyword, and the keyword's type.
ACCEPTED = [
    (plan, "missing", vocabulary.MissingPolicy),
    (plan, "unexpected", vocabulary.Unexpected),
    (plan, "tie", vocabulary.Tie),
    (convert, "unexpected", vocabulary.Unexpected),
    (convert, "receipt", vocabulary.ReceiptDigest),
    (convert, "page_cache", vocabulary.PageCache),
    (convert, "experts", vocabulary.Experts),
    (convert, "style", vocabulary.Style),
    (convert, "mode", vocabulary.Mode),
    (merge, "method", vocabulary.MergeMethod),
    (merge, "tie", vocabulary.Tie),
]


@pytest.mark.parametrize(
    ("function", "keyword", "words"),
    ACCEPTED,
    ids=[f"{function.__name__}-{keyword}" for function, keyword, _ in ACCEPTED],
)
def test_words_are_those_that_the_function_accepts(
    tmp_path: Path, function: Callable[..., None], keyword: str, words: Any
) -> None:
    with pytest.raises(loadstone.OptionError) as caught:
        function(tmp_path, **{keyword: "nonsense"})
    assert caught.value.field == keyword
    (listed,) = re.findall(r"expected (.*?)(?: \[|$)", str(caught.value))
    assert {*re.split(", | or ", listed)} == {*get_args(words)} - {"initialize"}


def assert_types(function: Callable[..., Any], types: dict[str, str]) -> None:
    for name, parameter in inspect.signature(function).parameters.items():
        if name in types:
            assert parameter.annotation.removesuffix(" | None") == types[name], name


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_signatures_have_these_types(function: Callable[..., Any]) -> None:
    converts = function in (
        loadstone.convert,
        loadstone.merge,
    )  # their max_memory is a single limit
    assert_types(function, KEYWORDS | ({} if converts else {"max_memory": "MaxMemory"}))


@pytest.mark.parametrize("library", LIBRARIES)
def test_signatures_for_libraries_have_these_types(library: str) -> None:
    pytest.importorskip(library)
    module = getattr(loadstone, library)
    types = KEYWORDS | {"max_memory": "MaxMemory", "mode": "ModelOptMode"}
    for name in LIBRARIES[library]:
        assert_types(getattr(module, name), types)


def test_every_module_for_a_library_lists_its_public_names() -> None:
    for path in Path(loadstone.__file__).parent.glob("[!_]*.py"):
        try:
            module = getattr(loadstone, path.stem)
        except AttributeError:  # the library is not installed
            continue
        assert all(callable(getattr(module, name)) for name in module.__all__), path.stem
        assert not {"patches", "skeleton_builder"} & set(module.__all__), path.stem
