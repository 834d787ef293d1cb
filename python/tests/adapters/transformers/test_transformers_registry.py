"""Tests that the conversions built for one model type equal those in transformers' registry."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import conversion_mapping
from transformers.core_model_loading import WeightRenaming

from loadstone._adapters.patch import hooked
from loadstone._adapters.transformers import registry


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset transformers' caches to those of a process that has not loaded anything."""
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
    monkeypatch.setattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", set())


def asked(model_type: str) -> Any:
    """Return the conversions, through the hooked function that transformers' loader calls."""
    with hooked(registry.hooks()):
        return conversion_mapping.get_checkpoint_conversion_mapping(model_type)


def state(transforms: Any) -> Any:
    """Return the attributes of the transforms and of their operations."""
    if not isinstance(transforms, list):
        return transforms
    return [
        (type(transform), [(name, plain(transform, name)) for name in names(transform)])
        for transform in transforms
    ]


def names(transform: Any) -> list[str]:
    slots = {name for cls in type(transform).__mro__ for name in getattr(cls, "__slots__", ())}
    return sorted(
        name
        for name in slots | getattr(transform, "__dict__", {}).keys()
        if hasattr(transform, name)
    )


def plain(transform: Any, name: str) -> Any:
    value = getattr(transform, name)
    if isinstance(value, types.FunctionType):
        return value.__code__
    return state(value) if name == "operations" else value


def test_each_model_has_the_librarys_own(fresh: None):
    library = conversion_mapping._build_checkpoint_conversion_mapping()
    assert len(library) > 100
    for model_type, transforms in library.items():
        assert state(asked(model_type)) == state(transforms), model_type
    assert asked("no such model") is None
    assert conversion_mapping._checkpoint_conversion_mapping_cache is None


def test_the_comparison_sees_another_pattern_and_another_operation(fresh: None):
    converters = asked("mixtral")
    assert state(converters) == state(asked("mixtral"))
    changed = copy.deepcopy(converters)
    changed[-1].operations[0].dim += 1
    assert state(changed) != state(converters)
    assert state([WeightRenaming("a", "b")]) != state([WeightRenaming("a", "c")])


def test_what_a_caller_does_to_its_own_stays_there(fresh: None):
    asked("legacy").clear()
    asked("legacy")[0]._was_used = True
    assert state(asked("legacy")) == state(
        conversion_mapping._build_checkpoint_conversion_mapping()["legacy"]
    )


def test_a_registration_of_the_users_counts(fresh: None):
    mine = [WeightRenaming("mine", "theirs")]
    conversion_mapping.register_checkpoint_conversion_mapping("mixtral", mine, overwrite=True)
    assert state(asked("mixtral")) == state(mine)
    assert state(asked("legacy")) == state(
        conversion_mapping._build_checkpoint_conversion_mapping()["legacy"]
    )


@pytest.mark.parametrize(
    "name", ["_build_checkpoint_conversion_mapping", "_checkpoint_conversion_mapping_cache"]
)
def test_a_library_that_makes_them_in_another_way_makes_them(
    name: str, fresh: None, monkeypatch: pytest.MonkeyPatch
):
    """If transformers lacks an internal name, the hook calls transformers' own function."""
    own = [WeightRenaming("its", "own")]
    monkeypatch.setattr(
        conversion_mapping, "get_checkpoint_conversion_mapping", lambda model_type: own
    )
    assert asked("mixtral") is not own
    monkeypatch.delattr(conversion_mapping, name)
    assert asked("mixtral") is own
