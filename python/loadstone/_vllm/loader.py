"""The load format, as vLLM asks for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from loadstone._catalog import inspect
from loadstone._dtypes import dtype_name
from loadstone._errors import Error, make
from loadstone._machine import peak_resident_bytes
from loadstone._report import human_bytes
from loadstone._vllm.options import Options
from loadstone._vllm.proof import require_written
from loadstone._vllm.stream import Stream
from loadstone._vllm.written import Writes

# Not vLLM's children, so that its settings for logs hold.
logger = init_logger("vllm.loadstone")


class LoadstoneLoader(DefaultModelLoader):  # type: ignore[misc]
    """Brings the tensors of a checkpoint to a model's own ``load_weights``, and proves the result.

    Each rank reads all tensors that vLLM's code for the model asks for, less the experts of other
    ranks where vLLM filters them.
    """

    def __init__(self, load_config: Any) -> None:
        self.options = Options.of(load_config.model_loader_extra_config)
        given = load_config.model_loader_extra_config
        try:
            load_config.model_loader_extra_config = {}  # vLLM's own loader refuses ours
            super().__init__(load_config)
        finally:
            load_config.model_loader_extra_config = given
        self._bytes_read = 0
        self._now: tuple[str, str, torch.Tensor] | None = None  # path, name, what is being taken

    def download_model(self, model_config: Any) -> None:
        """Fetches a checkpoint of a hub; one of this machine is there."""
        if not Path(model_config.model).exists():
            super().download_model(model_config)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """As vLLM's own loader; what stays without values is an error.

        Raises:
            FormatError, LoadError: the checkpoint cannot be read.
            PlanError: ``plan.shape``: the model's code does not take a tensor; ``plan.options``:
                the model's layers want codes, and numbers are asked for.
            AuditError: ``audit.unaccounted``: parameters have no values.
        """
        begin = time.perf_counter()
        self._require_agreement(model_config)
        self._init_ep_weight_filter(model_config)
        self._encoder_only_lm_prefixes = None
        self._dtype = dtype_name(model_config.dtype)
        with Writes() as self._writes:
            try:
                load: Any = model.load_weights
                load(self.get_all_weights(model_config, model))
            except Error:
                raise
            except Exception as error:
                raise self._refused(error) from error
        proof = "all parameters have values"
        try:
            require_written(model, self._writes, model_config.model)
        except Error as error:
            if self.options.missing == "error":
                raise
            proof = str(error)
        seconds = time.perf_counter() - begin
        self.counter_after_loading_weights = time.perf_counter()
        log = logger.info if proof.startswith("all") else logger.warning
        log(
            "loadstone read %s in %.2f s (%.2f GB/s); %s; peak of the process: %s",
            human_bytes(self._bytes_read),
            seconds,
            self._bytes_read / seconds / 1e9,
            proof,
            human_bytes(peak_resident_bytes()),
        )

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        path = self._path_of(source)
        is_unused = source.is_unused_weight or (lambda name: False)

        def is_wanted(name: str) -> bool:
            return not is_unused(name) and not should_skip_weight(name, self.local_expert_ids)

        stream = Stream(inspect(path), self.options, self._dtype, is_wanted)
        for name, tensor in stream:
            self._writes.note(tensor)  # a model may keep it
            self._now = path, name, tensor
            yield source.prefix + name, tensor
        self._now = None
        self._bytes_read += stream.bytes_read

    def _require_agreement(self, model_config: Any) -> None:
        """Layers were made before: numbers do not fit those that take codes."""
        if not self.options.dequantize or model_config.quantization is None:
            return
        raise make(
            "plan.options",
            "the model's layers take codes, and dequantize asks for numbers; add --hf-overrides "
            "'{\"quantization_config\": null}'",
            field="dequantize",
            found=f"quantization {model_config.quantization}",
            path=str(model_config.model),
        )

    def _path_of(self, source: Any) -> str:
        path = str(source.model_or_path)
        if Path(path).exists():
            return str(Path(path, source.subfolder or ""))
        folder, *_ = self._prepare_weights(
            path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        return str(folder)

    def _refused(self, error: Exception) -> Exception:
        """What vLLM's code raised, with the tensor that it was given."""
        if self._now is None:
            return error
        path, name, tensor = self._now
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        found = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
        message = f"vLLM's code for this model does not take the tensor ({reason})"
        return make("plan.shape", message, path=path, tensor=name, found=found)
