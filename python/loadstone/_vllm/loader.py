"""The load format, as vLLM asks for it."""

from __future__ import annotations

import dataclasses
import json
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
from loadstone._progress import shown
from loadstone._report import human_bytes
from loadstone._vllm.converted import Converted, conversion, quantization_config
from loadstone._vllm.deferred import Copies, Deferred, Deferring, settle
from loadstone._vllm.drafter import is_drafter, options_of, taken_from_target
from loadstone._vllm.options import Changes, Options
from loadstone._vllm.proof import require_written
from loadstone._vllm.written import Writes

# Not vLLM's children, so that its settings for logs hold.
logger = init_logger("vllm.loadstone")


class LoadstoneLoader(DefaultModelLoader):  # type: ignore[misc]
    """Brings the tensors of a checkpoint to a model's own ``load_weights``, and proves the result.

    That code is given tensors that are not read yet. Each rank reads what it keeps of them, after
    the proof that all parameters will have values.
    """

    def __init__(self, load_config: Any) -> None:
        self.options = Options.of(load_config.model_loader_extra_config)
        given = load_config.model_loader_extra_config
        try:
            load_config.model_loader_extra_config = {}  # vLLM's own loader refuses ours
            super().__init__(load_config)
        finally:
            load_config.model_loader_extra_config = given
        self._options = self.options  # those that hold for the model that is being loaded
        self._speculative: Any = None
        self._checkpoints: list[Deferring | Converted] = []
        self._now: tuple[str, str, torch.Tensor] | None = None  # path, name, what is being taken

    def download_model(self, model_config: Any) -> None:
        """Fetches a checkpoint of a hub; one of this machine is there."""
        if not Path(model_config.model).exists():
            super().download_model(model_config)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """As vLLM's own loader."""
        is_one = is_drafter(model_config)
        self._speculative = vllm_config.speculative_config if is_one else None
        model: torch.nn.Module = super().load_model(vllm_config, model_config, prefix)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """As vLLM's own loader; what stays without values is an error.

        Raises:
            FormatError, LoadError: the checkpoint cannot be read.
            PlanError: ``plan.shape``: the model's code does not take a tensor; ``plan.options``:
                the model's layers want codes, and numbers are asked for.
            AuditError: ``audit.unaccounted``: parameters have no values.
        """
        begin = time.perf_counter()
        self._checkpoints.clear()
        self._options = options_of(self.options, model_config, self._speculative)
        self._require_agreement(model_config)
        self._init_ep_weight_filter(model_config)
        self._encoder_only_lm_prefixes = None
        self._dtype = dtype_name(model_config.dtype)
        self._model = str(model_config.model)
        self._copies = Copies()
        with Writes(self._copies.before) as self._writes:
            try:
                load: Any = model.load_weights
                load(self.get_all_weights(model_config, model))
                settle(model, self._writes.note)
            except Error:
                raise
            except Exception as error:
                raise self._refused(error) from error
        proof = "all parameters have values"
        try:
            replaced = taken_from_target(model, self._speculative)
            require_written(model, self._writes, model_config.model, replaced)
        except Error as error:
            if self._options.missing == "error":
                raise
            proof = str(error)
        with shown(self.load_config.use_tqdm_on_load, "loading") as progress:
            self._copies.carry_out(progress)
        bytes_read = sum(each.bytes_read for each in self._checkpoints)
        seconds = time.perf_counter() - begin
        self.counter_after_loading_weights = time.perf_counter()
        log = logger.info if proof.startswith("all") else logger.warning
        log(
            "loadstone read %s in %.2f s (%.2f GB/s); %s; peak of the process: %s",
            human_bytes(bytes_read),
            seconds,
            bytes_read / seconds / 1e9,
            proof,
            human_bytes(peak_resident_bytes()),
        )

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        path = self._path_of(source)
        is_unused = source.is_unused_weight or (lambda name: False)

        def is_wanted(name: str) -> bool:
            return not is_unused(name) and not should_skip_weight(name, self.local_expert_ids)

        checkpoint = self._checkpoint(path)
        self._checkpoints.append(checkpoint)
        for name, tensor in checkpoint.tensors(is_wanted):
            if not isinstance(tensor, Deferred):
                self._writes.note(tensor)  # a model may keep it
            self._now = path, name, tensor
            yield source.prefix + name, tensor
        self._now = None

    def _checkpoint(self, path: str) -> Deferring | Converted:
        if not self._changes:
            return Deferring(inspect(path), self._options, self._dtype, self._copies)
        group_bytes = self._options.staging_bytes_max // 3  # one is made while another is taken
        return Converted(conversion(path, self._changes, self._options.threads, group_bytes))

    def _require_agreement(self, model_config: Any) -> None:
        """Layers were made before: they take codes of one kind, or numbers."""
        asked = Changes.of_overrides(vars(model_config.hf_config))
        self._changes = self._options.changes
        if asked.quantize and not self._changes.quantize:
            self._changes = dataclasses.replace(asked, lora=self._changes.lora)
        if self._changes.quantize:
            self._require_codes(model_config)
        elif self._options.dequantize and model_config.quantization is not None:
            self._refuse_numbers(model_config)

    def _require_codes(self, model_config: Any) -> None:
        made = conversion(str(model_config.model), self._changes)
        wanted = quantization_config(made)
        found = getattr(model_config.hf_config, "quantization_config", None)
        fields = wanted or {}
        if isinstance(found, dict) and found | fields == found:  # vLLM adds some
            return
        text = json.dumps(self._changes.quantize)
        raise make(
            "plan.options",
            "the model's layers do not take these codes; add --config-format loadstone "
            f"--hf-overrides '{{\"loadstone_quantize\": {text}}}', with the same style, include "
            "and exclude",
            field="quantize",
            found=json.dumps(found),
            expected=json.dumps(wanted),
            path=str(model_config.model),
        )

    def _refuse_numbers(self, model_config: Any) -> None:
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
        if self._options.weights and path == self._model:
            return self._options.weights
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
        """An error of vLLM's code, with the tensor that it was given."""
        if self._now is None:
            return error
        path, name, tensor = self._now
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        found = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
        message = f"vLLM's code for this model does not take the tensor ({reason})"
        return make("plan.shape", message, path=path, tensor=name, found=found)
