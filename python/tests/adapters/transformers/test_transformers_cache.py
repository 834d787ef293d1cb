"""Tests the recipes in the user's cache folder: private, used, and rejected when damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compare import assert_same_state, library_load
from edited_models import copied, edit
from transformers_models import by_name, write_checkpoint

import loadstone
from loadstone import _core

pytest.importorskip("transformers")
ours = loadstone.transformers.from_pretrained


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(by_name("mixtral"), tmp_path_factory.mktemp("mixtral"), "public")


def test_recipes_are_cached_privately_and_used(
    mixtral: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    from loadstone._adapters.transformers import derivation

    cls = by_name("mixtral").cls
    first = ours(cls, mixtral)
    (file,) = cache_folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(derivation, "derive", None)  # recipes can come only from the cache
    second, info = ours(cls, mixtral, output_loading_info=True)
    assert_same_state(second, first, None, None)
    library = library_load(cls, mixtral)
    assert_same_state(second, library.model, info, library.info)


def test_the_key_has_the_code_of_the_adapter_and_of_the_tracer():
    from loadstone._adapters.transformers import cache

    names = {f"{file.parent.name}/{file.name}" for file in cache.own_code()}
    assert {"transformers/derivation.py", "tracing/_trace.py"} <= names


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied", "foreign"])
def test_a_corrupt_cache_is_ignored_and_rewritten(damage: str, mixtral: Path, cache_folder: Path):
    cls = by_name("mixtral").cls
    first = ours(cls, mixtral)
    (file,) = cache_folder.iterdir()
    good = file.read_bytes()
    changed = good.replace(b"gate_up_proj", b"gate_xx_proj", 1)
    damaged = {"cut": good[:-9], "changed": changed, "emptied": b"", "foreign": b"[1]\n[]"}[damage]
    assert damaged != good
    file.write_bytes(damaged)
    assert_same_state(ours(cls, mixtral), first, None, None)
    assert file.read_bytes() == good


def test_recipes_of_an_untried_release_are_neither_kept_nor_used(
    mixtral: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    import transformers

    from loadstone._adapters.sites.transformers import SITES

    cls = by_name("mixtral").cls
    known = ours(cls, mixtral)
    files = {path: path.read_bytes() for path in cache_folder.iterdir()}
    assert files  # control: the recipes of the installed release are cached
    *first, last = SITES.newest
    with monkeypatch.context() as patched:
        patched.setattr(transformers, "__version__", ".".join(map(str, [*first, last + 1, 0])))
        assert_same_state(ours(cls, mixtral), known, None, None)
        patched.setattr(_core.Recipes, "from_json", None)  # fails if the load uses a cached file
        assert_same_state(ours(cls, mixtral), known, None, None)
    assert {path: path.read_bytes() for path in cache_folder.iterdir()} == files


def test_another_question_has_another_answer(mixtral: Path, cache_folder: Path, tmp_path: Path):
    cls = by_name("mixtral").cls
    ours(cls, mixtral)
    for options in ({"dtype": torch.float32}, {"key_mapping": {"^nothing": "x"}}):
        before = set(cache_folder.iterdir())
        ours(cls, mixtral, **options)
        assert len(set(cache_folder.iterdir()) - before) == 1, options
        ours(cls, mixtral, **options)
        assert len(set(cache_folder.iterdir()) - before) == 1, options
    folder = copied(mixtral, tmp_path / "other")
    edit(folder, lambda state: state.update(more=torch.zeros(1)))
    before = set(cache_folder.iterdir())
    ours(cls, folder)
    assert len(set(cache_folder.iterdir()) - before) == 1


def test_a_dtype_of_the_caller_has_recipes_of_its_own(mixtral: Path, cache_folder: Path):
    """The same dtype casts all floats if the caller chose it, and no others if not."""
    cls = by_name("mixtral").cls
    for dtype in (None, torch.bfloat16, None):
        with loadstone.skeleton():
            model = cls(cls.config_class.from_pretrained(mixtral)).to(torch.bfloat16)
        model.lm_head.to(torch.float32)
        loadstone.load(model, mixtral, rules="transformers", dtype=dtype)
        assert model.lm_head.weight.dtype == (dtype or torch.float32)


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert loadstone.audit(ours(by_name("mixtral").cls, mixtral)).ok
