"""A model loader with SGLang's interface."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.model_loader.loader import DefaultModelLoader

from loadstone._adapters.serving.loading import ModelLoad, paths_of
from loadstone._adapters.serving.options import Options
from loadstone._base.dtypes import dtype_name
from loadstone._base.errors import new_error

logger = logging.getLogger("sglang.loadstone")

# Modules that a drafter gets from its target model after loading.
_TARGET_WEIGHTS = (".embed_tokens", ".lm_head")


class LoadstoneLoader(DefaultModelLoader):  # type: ignore[misc]
    """Runs a model's own ``load_weights`` on unread tensors, and proves the result.

    Each rank reads only its own share, after loadstone has proved that every parameter gets a
    value.
    """

    def __init__(self, load_config: Any) -> None:
        extra_config = load_config.model_loader_extra_config
        self.options = Options.from_mapping(extra_config["loadstone"])
        try:
            library_options = {k: v for k, v in extra_config.items() if k != "loadstone"}
            load_config.model_loader_extra_config = library_options  # SGLang rejects our options
            super().__init__(load_config)
        finally:
            load_config.model_loader_extra_config = extra_config
        self._model_load: ModelLoad | None = None  # set during a load
        self._model_config: Any = None

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        """Load a model, in place of SGLang's loader.

        Raises:
            FormatError, LoadError: the checkpoint cannot be read.
            PlanError: ``plan.shape``: the model's code rejects a tensor; ``plan.options``: the
                layers and the options disagree about quantized weights.
            AuditError: ``audit.unaccounted``: parameters have no values.
        """
        self._require_agreement(model_config)
        self._model_config = model_config
        self._model_load = ModelLoad(self.options, dtype_name(model_config.dtype))
        try:
            model: torch.nn.Module = super().load_model(
                model_config=model_config, device_config=device_config
            )
        finally:
            self._model_load = None
        return model

    def load_weights_and_postprocess(
        self, model: Any, weights: Iterable[tuple[str, torch.Tensor]], target_device: Any
    ) -> None:
        """Override SGLang's method to run the proof between loading and postprocessing."""
        model_load = self._model_load
        if model_load is None:  # SGLang did not start with load_model
            super().load_weights_and_postprocess(model, weights, target_device)
            return
        load = model.load_weights

        def load_and_prove(tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
            results: list[Any] = []
            model_load.run_and_log(
                lambda: results.append(load(tensors)),
                model,
                str(self._model_config.model_path),
                self._is_exempt,
                logger,
                is_drafter=bool(self._model_config.is_draft_model),
                repeats=False,
            )
            return results[0]

        model.load_weights = load_and_prove
        try:
            super().load_weights_and_postprocess(model, weights, target_device)
        finally:
            del model.load_weights

    def _get_weights_iterator(self, source: Any, **_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        path = str(source.model_or_path)
        dtype = dtype_name((source.model_config or self._model_config).dtype)
        stream = self._model_load or ModelLoad(self.options, dtype, is_proved=False)
        is_own = self._model_config is not None and path == str(self._model_config.model_path)
        tensors = itertools.chain.from_iterable(
            stream.tensors(file, lambda name: True, is_auxiliary=not is_own)
            for file in self._paths_of(source, path, is_own)
        )
        if self.load_config.draft_model_idx is not None:
            index = self.load_config.draft_model_idx
            return iter(self._filter_mtp_weights(tensors, source.prefix, index))
        return ((source.prefix + name, tensor) for name, tensor in tensors)

    def _paths_of(self, source: Any, path: str, is_own: bool) -> list[str]:
        patterns = source.allow_patterns_overrides
        if self.options.weights and is_own:
            return [self.options.weights]
        arguments = path, source.revision, source.fall_back_to_pt, patterns
        return paths_of(path, patterns, lambda: self._prepare_weights(*arguments))

    def _is_exempt(self, name: str, module: torch.nn.Module) -> bool:
        """Exempt cache scales, which checkpoints may omit, and a drafter's shared modules."""
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
            return True
        return bool(self._model_config.is_draft_model) and f".{name}".endswith(_TARGET_WEIGHTS)

    def _require_agreement(self, model_config: Any) -> None:
        """Reject changed encodings, because SGLang builds its layers from the config alone."""
        if self.options.changes.quantize:
            message = "SGLang cannot quantize during the load: convert the folder first"
            raise new_error("plan.options", message, field="quantize", path=model_config.model_path)
        makes_numbers = self.options.dequantize or self.options.changes.lora
        if makes_numbers and model_config.quantization is not None:
            raise new_error(
                "plan.options",
                "the model's layers are quantized, but these options decode the weights; add "
                "--json-model-override-args '{\"quantization_config\": null}'",
                field="model_loader_extra_config",
                found=f"quantization {model_config.quantization}",
                path=model_config.model_path,
            )
