"""A minimal stand-in for SGLang 0.5.23, which needs a GPU: its plugin hooks and its loader.

Names, signatures and the order of calls follow SGLang's sources; function bodies do not.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import pytest
import torch


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    hooks: ClassVar[dict[str, tuple[Callable[..., Any], HookType]]] = {}

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER) -> None:
        cls.hooks[target] = hook, hook_type

    @classmethod
    def apply_hooks(cls) -> None:
        for target, (hook, hook_type) in cls.hooks.items():
            assert hook_type is HookType.AROUND
            module, _, name = target.rpartition(".")
            original = getattr(sys.modules[module], name)
            setattr(sys.modules[module], name, _around(original, hook))


def _around(original: Any, hook: Any) -> Any:
    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return hooked


class BaseKVCacheMethod:
    pass


@dataclass
class LoadConfig:
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)
    draft_model_idx: int | None = None


@dataclass
class Source:
    model_or_path: str
    revision: str | None
    prefix: str = ""
    fall_back_to_pt: bool = True
    allow_patterns_overrides: Any = None
    model_config: Any = None


@dataclass
class ModelConfig:
    model_path: str
    build: Callable[[], torch.nn.Module]
    revision: str | None = None
    dtype: torch.dtype = torch.bfloat16
    quantization: str | None = None
    is_draft_model: bool = False


class BaseModelLoader:
    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config


class DefaultModelLoader(BaseModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        unexpected = load_config.model_loader_extra_config.keys() - {"enable_multithread_load"}
        if unexpected:
            raise ValueError(f"Unexpected extra config keys: {unexpected}")

    def _prepare_weights(self, model_name_or_path: str, revision: str | None, *rest: Any) -> Any:
        raise AssertionError("nothing is fetched here")

    def _get_weights_iterator(
        self, source: Source, *, resolved_source: Any = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("SGLang's own way of reading")

    @classmethod
    def _filter_mtp_weights(
        cls, weights_iterator: Any, prefix: str, draft_model_idx: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        kept = f"mtp.{draft_model_idx}."
        return (
            (prefix + name.replace(kept, "mtp.0."), tensor)
            for name, tensor in weights_iterator
            if not name.startswith("mtp.") or name.startswith(kept)
        )

    def _get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        path, revision = model_config.model_path, model_config.revision
        yield from self._get_weights_iterator(Source(path, revision, model_config=model_config))

    def load_model(self, *, model_config: ModelConfig, device_config: Any) -> torch.nn.Module:
        model = model_config.build()
        self.load_weights_and_postprocess(
            model, self._get_all_weights(model_config, model), torch.device("cpu")
        )
        return model.eval()

    @staticmethod
    def load_weights_and_postprocess(
        model: Any, weights: Iterable[tuple[str, torch.Tensor]], target_device: Any
    ) -> None:
        model.load_weights(weights)
        model.processed = True


def get_model_loader(load_config: LoadConfig, model_config: Any = None) -> BaseModelLoader:
    return DefaultModelLoader(load_config)


_MODULES = {
    "sglang.srt.layers.quantization.kv_cache": [BaseKVCacheMethod],
    "sglang.srt.model_loader.loader": [BaseModelLoader, DefaultModelLoader, get_model_loader],
    "sglang.srt.plugins.hook_registry": [HookRegistry, HookType],
}


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install the stand-in as ``sglang``; return its module of loaders."""
    names = {
        name.rsplit(".", count)[0] for name in _MODULES for count in range(name.count(".") + 1)
    }
    for name in sorted(names):
        module: Any = types.ModuleType(name)
        module.__path__ = []
        module.__version__ = "0.5.23"
        for each in _MODULES.get(name, ()):
            setattr(module, each.__name__, each)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    monkeypatch.setattr(HookRegistry, "hooks", {})
    monkeypatch.delitem(sys.modules, "loadstone._adapters.serving.sglang.loader", raising=False)
    return sys.modules["sglang.srt.model_loader.loader"]
