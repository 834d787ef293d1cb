"""Every entry point loads a kind of target that a library's adapter registers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import pytest
import safetensors.torch
import torch
import transformers
from diffusers.configuration_utils import register_to_config

import loadstone
from loadstone._base import adapters
from loadstone._plan.extensions import TargetExtension

LIBRARY = "negating"


class Negated(torch.nn.Linear):
    """A layer of a different library, whose weight checkpoints store negated."""

    __module__ = LIBRARY


class Negation(TargetExtension):
    def __init__(self, model: Any) -> None:
        paths = (path for path, module in model.named_modules() if isinstance(module, Negated))
        self.names = {f"{path}.weight" for path in paths}

    def installed_targets(self) -> set[str]:
        return self.names

    def prepare(self, model: Any, targets: Any, values: Any, offload: Any) -> Any:
        weights = {
            target.name: torch.nn.Parameter(-value)
            for target, value in zip(targets, values, strict=True)
            if target.name in self.names
        }

        def install() -> None:
            for name, weight in weights.items():
                model.get_submodule(name.removesuffix(".weight")).weight = weight

        return install


class Config(transformers.PretrainedConfig):
    model_type = "negated"


class Pretrained(transformers.PreTrainedModel):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.first, self.second = Negated(3, 4), torch.nn.Linear(4, 2)
        self.post_init()


class Diffusing(diffusers.ModelMixin, diffusers.ConfigMixin):
    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Negated(3, 4), torch.nn.Linear(4, 2)


def plain() -> torch.nn.Module:
    return torch.nn.ModuleDict({"first": Negated(3, 4), "second": torch.nn.Linear(4, 2)})


def saved(model: Any, folder: Path) -> Any:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    return model


def load(folder: Path) -> tuple[Any, Any]:
    stored = saved(plain(), folder)
    with loadstone.skeleton():
        model = plain()
    loadstone.load(model, folder)
    return stored, model


def with_accelerate(folder: Path) -> tuple[Any, Any]:
    stored = saved(plain(), folder)
    with loadstone.skeleton():
        model = plain()
    loadstone.accelerate.load_checkpoint_in_model(model, folder)
    return stored, model


def with_transformers(folder: Path) -> tuple[Any, Any]:
    stored = saved(Pretrained(Config()), folder)
    return stored, loadstone.transformers.from_pretrained(Pretrained, folder)


def with_diffusers(folder: Path) -> tuple[Any, Any]:
    stored = saved(Diffusing(), folder)
    return stored, loadstone.diffusers.from_pretrained(Diffusing, folder)


@pytest.mark.parametrize("entry_point", [load, with_accelerate, with_transformers, with_diffusers])
def test_a_registered_kind_is_reached(
    entry_point: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = ModuleType(LIBRARY)
    library.extend = lambda recipes, model, *_: recipes.extensions.append(Negation(model))
    monkeypatch.setitem(sys.modules, LIBRARY, library)
    adapter = adapters.LibraryAdapter(LIBRARY, extend=f"{LIBRARY}:extend")
    monkeypatch.setitem(adapters.ADAPTERS, LIBRARY, adapter)
    stored, model = entry_point(tmp_path)
    assert torch.equal(model.get_parameter("first.weight"), -stored.get_parameter("first.weight"))
    for name in ("first.bias", "second.weight", "second.bias"):
        assert torch.equal(model.get_parameter(name), stored.get_parameter(name))
    assert loadstone.audit(model).ok
