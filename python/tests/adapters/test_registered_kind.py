"""Tests that every entry point loads a kind of target that a library's adapter registers."""

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
    """A layer of a pretend library, whose weight is stored negated in checkpoints."""

    __module__ = LIBRARY


class NegatedWeight(torch.nn.Parameter):
    __module__ = LIBRARY

    @staticmethod
    def __torch_function__(function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch._C._disabled_torch_function_impl(function, types, args, kwargs or {})


def holding_negated() -> torch.nn.Linear:
    layer = torch.nn.Linear(3, 4)
    layer.weight = NegatedWeight(layer.weight.detach())
    return layer


class Negation(TargetExtension):
    def __init__(self, model: Any) -> None:
        self.names = {
            f"{path}.weight"
            for path, module in model.named_modules()
            if isinstance(module, Negated)
            or isinstance(module._parameters.get("weight"), NegatedWeight)
        }

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


LAYERS = {"module": lambda: Negated(3, 4), "tensor": holding_negated}


class Config(transformers.PretrainedConfig):
    model_type = "negated"

    def __init__(self, kind: str = "module", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind = kind


class Pretrained(transformers.PreTrainedModel):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.first, self.second = LAYERS[config.kind](), torch.nn.Linear(4, 2)
        self.post_init()


class Diffusing(diffusers.ModelMixin, diffusers.ConfigMixin):
    @register_to_config
    def __init__(self, kind: str = "module") -> None:
        super().__init__()
        self.first, self.second = LAYERS[kind](), torch.nn.Linear(4, 2)


def plain(kind: str) -> torch.nn.Module:
    return torch.nn.ModuleDict({"first": LAYERS[kind](), "second": torch.nn.Linear(4, 2)})


def saved(model: Any, folder: Path) -> Any:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    return model


def load(folder: Path, kind: str) -> tuple[Any, Any]:
    stored = saved(plain(kind), folder)
    with loadstone.skeleton():
        model = plain(kind)
    loadstone.load(model, folder)
    return stored, model


def with_accelerate(folder: Path, kind: str) -> tuple[Any, Any]:
    stored = saved(plain(kind), folder)
    with loadstone.skeleton():
        model = plain(kind)
    loadstone.accelerate.load_checkpoint_in_model(model, folder)
    return stored, model


def with_transformers(folder: Path, kind: str) -> tuple[Any, Any]:
    stored = saved(Pretrained(Config(kind)), folder)
    return stored, loadstone.transformers.from_pretrained(Pretrained, folder)


def with_diffusers(folder: Path, kind: str) -> tuple[Any, Any]:
    stored = saved(Diffusing(kind), folder)
    return stored, loadstone.diffusers.from_pretrained(Diffusing, folder)


def with_modelopt(folder: Path, kind: str) -> tuple[Any, Any]:
    pytest.importorskip("modelopt")
    stored = saved(plain(kind), folder)
    with loadstone.skeleton():
        model = plain(kind)
    config = {"quant_cfg": [{"quantizer_name": "*", "enable": False}], "algorithm": None}
    return stored, loadstone.modelopt.load(model, folder, config)


ENTRY_POINTS = (load, with_accelerate, with_transformers, with_diffusers, with_modelopt)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_a_registered_kind_is_reached(
    entry_point: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = ModuleType(LIBRARY)
    library.extend = lambda recipes, model, *_: recipes.extensions.append(Negation(model))
    monkeypatch.setitem(sys.modules, LIBRARY, library)
    adapter = adapters.LibraryAdapter(
        LIBRARY, extend=f"{LIBRARY}:extend", tensor_classes=(f"{LIBRARY}.NegatedWeight",)
    )
    monkeypatch.setitem(adapters.ADAPTERS, LIBRARY, adapter)
    stored, model = entry_point(tmp_path, kind)
    assert torch.equal(model.get_parameter("first.weight"), -stored.get_parameter("first.weight"))
    for name in ("first.bias", "second.weight", "second.bias"):
        assert torch.equal(model.get_parameter(name), stored.get_parameter(name))
    assert loadstone.audit(model).ok
