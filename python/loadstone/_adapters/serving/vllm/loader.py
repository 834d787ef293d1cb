"""A model loader with vLLM's interface."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from loadstone._adapters.serving.loading import ModelLoad, paths_of
from loadstone._adapters.serving.options import Options
from loadstone._adapters.serving.vllm.config import checked_options
from loadstone._adapters.serving.vllm.drafter import is_drafter, is_taken_from_target
from loadstone._base.dtypes import dtype_name

# A child of vLLM's logger, so that vLLM's log settings apply.
logger = init_logger("vllm.loadstone")

# The folder of each model's first load. The option `weights` replaces only this folder.
_folders: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()


class LoadstoneLoader(DefaultModelLoader):  # type: ignore[misc]
    """Runs a model's own ``load_weights`` on unread tensors, and proves the result.

    Each rank reads only its own share, after loadstone has proved that every parameter gets a
    value.
    """

    def __init__(self, load_config: Any) -> None:
        self.options = Options.from_mapping(load_config.model_loader_extra_config)
        with _as_vllm_accepts_it(load_config):
            super().__init__(load_config)
        self._speculative: Any = None
        self._model_load: ModelLoad | None = None  # set during a load

    def download_model(self, model_config: Any) -> None:
        """Download the checkpoint unless the path is local."""
        if not Path(model_config.model).exists():
            with _as_vllm_accepts_it(self.load_config):
                super().download_model(model_config)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        is_one = is_drafter(model_config)
        self._speculative = vllm_config.speculative_config if is_one else None
        model: torch.nn.Module = super().load_model(vllm_config, model_config, prefix)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load weights, in place of vLLM's loader.

        Raises:
            FormatError, LoadError: the checkpoint cannot be read.
            PlanError: ``plan.shape``: the model's code rejects a tensor; ``plan.options``: the
                layers expect quantized weights, but the options request plain values.
            AuditError: ``audit.unaccounted``: parameters have no values.
        """
        self._init_ep_weight_filter(model_config)
        self._encoder_only_lm_prefixes = None
        _folders.setdefault(model, str(model_config.model))
        self._model_load = self._new_model_load(model_config, is_proved=True)
        load: Any = model.load_weights
        try:
            self._model_load.run_and_log(
                lambda: load(self.get_all_weights(model_config, model)),
                model,
                str(model_config.model),
                lambda name, module: (
                    _is_for_others(module)
                    or is_taken_from_target(name, module, model, self._speculative)
                ),
                logger,
                is_drafter=is_drafter(model_config),
                shows_progress=self.load_config.use_tqdm_on_load,
            )
        finally:
            self._model_load = None

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Override vLLM's method, which vLLM also calls outside a load to reload weights."""
        folder = str(model_config.model)
        is_first = _folders.get(model, folder) == folder
        self._stream = self._model_load or self._new_model_load(model_config, is_proved=False)
        weights = self._stream.options.weights
        self._folder = folder
        self._weights = {folder: weights} if weights and is_first else {}
        yield from super().get_all_weights(model_config, model)

    def _new_model_load(self, model_config: Any, is_proved: bool) -> ModelLoad:
        options = checked_options(self.options, model_config, self._speculative)
        return ModelLoad(options, dtype_name(model_config.dtype), is_proved)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        is_unused = source.is_unused_weight or (lambda name: False)

        def is_wanted(name: str) -> bool:
            return not is_unused(name) and not should_skip_weight(name, self.local_expert_ids)

        is_auxiliary = str(source.model_or_path) != self._folder
        is_auxiliary = is_auxiliary or source.allow_patterns_overrides is not None
        for path in self._paths_of(source):
            for name, tensor in self._stream.tensors(path, is_wanted, is_auxiliary):
                yield source.prefix + name, tensor

    def _paths_of(self, source: Any) -> list[str]:
        path = str(source.model_or_path)
        if path in self._weights:
            return [self._weights[path]]
        patterns, subfolder = source.allow_patterns_overrides, source.subfolder
        arguments = path, subfolder, source.revision, source.fall_back_to_pt, patterns
        with _as_vllm_accepts_it(self.load_config):
            return paths_of(
                path, patterns, lambda: self._prepare_weights(*arguments), subfolder or ""
            )


@contextlib.contextmanager
def _as_vllm_accepts_it(load_config: Any) -> Iterator[None]:
    """Hide loadstone's options and load format, which vLLM's own loader rejects."""
    saved = load_config.model_loader_extra_config, load_config.load_format
    load_config.model_loader_extra_config, load_config.load_format = {}, "auto"
    try:
        yield
    finally:
        load_config.model_loader_extra_config, load_config.load_format = saved


def _is_for_others(module: torch.nn.Module) -> bool:
    """Exempt cache scales, which checkpoints may omit, and modules that vLLM quantizes itself."""
    method: Any = getattr(module, "quant_method", None)
    return isinstance(method, BaseKVCacheMethod) or getattr(method, "uses_meta_device", False)
