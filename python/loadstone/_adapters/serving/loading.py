"""Run a server's own model code on a checkpoint, and check that all parameters get values."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from loadstone._adapters.serving.converted import ConvertedCheckpoint, plan_conversion
from loadstone._adapters.serving.copies import PendingCopies
from loadstone._adapters.serving.deferred import (
    DeferredCheckpoint,
    DeferredTensor,
    lost_memory,
    materialize,
)
from loadstone._adapters.serving.options import Options
from loadstone._adapters.serving.proof import require_written
from loadstone._adapters.serving.receipts import current_rank, receipt_of, save
from loadstone._adapters.serving.threads import Recording, tensor_at_submit
from loadstone._adapters.serving.write_tracking import MemoryAccess, WriteTracker
from loadstone._base.dtypes import dtype_name
from loadstone._base.errors import Error, new_error
from loadstone._base.machine import peak_resident_bytes
from loadstone._base.progress import ProgressCallback, show_progress
from loadstone._execute.report import human_bytes
from loadstone._files.catalog import open_catalog
from loadstone._files.receipt import Receipt


class ModelLoad:
    """One load, or one stream of tensors.

    Args:
        dtype: safetensors name of the dtype of decoded values.
        is_proved: true if :meth:`run` consumes the tensors. If false, the server consumes them, and
            each tensor has its values before the server gets it.
    """

    def __init__(self, options: Options, dtype: str, is_proved: bool = True) -> None:
        self.options = options
        self._dtype = dtype
        self._is_deferred = is_proved and options.deferred
        self._reset()
        self._checkpoints: list[DeferredCheckpoint | ConvertedCheckpoint] = []
        self._current: tuple[str, str, torch.Tensor] | None = None  # path, name and tensor in use

    def tensors(
        self, path: str, wants: Callable[[str], bool], is_auxiliary: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the wanted tensors; no option changes the tensors of an auxiliary checkpoint.

        Raises:
            FormatError, LoadError, PlanError: the checkpoint cannot be read.
        """
        checkpoint = self._checkpoint(path, is_auxiliary)
        self._checkpoints.append(checkpoint)
        tensors = iter(checkpoint.tensors(wants))
        while True:
            with torch._C.DisableTorchFunction():  # hides loadstone's own access to addresses
                item = next(tensors, None)
            if item is None:
                break
            name, tensor = item
            if not isinstance(tensor, DeferredTensor):
                self._writes.note(tensor)  # counts as written, because a model may keep it
            self._current = path, name, tensor
            yield name, tensor
        self._current = None

    def run_and_log(
        self,
        load: Callable[[], Any],
        model: torch.nn.Module,
        path: str,
        is_exempt: Callable[[str, torch.nn.Module], bool],
        logger: logging.Logger,
        *,
        is_drafter: bool,
        shows_progress: bool = True,
        repeats: bool = True,
    ) -> None:
        """Like :meth:`run`, with a progress bar; saves this rank's receipt if requested."""
        with show_progress(shows_progress, "loading") as progress:
            line, is_as_always = self.run(load, model, path, is_exempt, progress, repeats)
        if self.options.receipt:
            save(self.receipt(model), self.options.receipt, current_rank(), is_drafter)
        (logger.info if is_as_always else logger.warning)(line)

    def run(
        self,
        load: Callable[[], Any],
        model: torch.nn.Module,
        path: str,
        is_exempt: Callable[[str, torch.nn.Module], bool],
        progress: ProgressCallback | None = None,
        repeats: bool = True,
    ) -> tuple[str, bool]:
        """Load a model with its own code, which consumes :meth:`tensors`; then read the values.

        Args:
            path: path of the checkpoint, for errors.
            is_exempt: selects modules whose parameters get values elsewhere.
            repeats: ``load`` may run again. If the model's code uses an unread tensor in a way that
                requires memory, ``load`` runs again on tensors that are already read.

        Returns:
            A line for the log, and whether it is free of warnings.

        Raises:
            FormatError, LoadError: the checkpoint cannot be read.
            PlanError: ``plan.shape``: the model's code rejects a tensor.
            AuditError: ``audit.unaccounted``: parameters have no values.
        """
        begin = time.perf_counter()
        remarks = ["all parameters have values"]
        try:
            self._run(load, model)
        except Error as error:
            if error.code != "plan.untraceable" or not self._is_deferred or not repeats:
                raise
            reason = error.message.removesuffix("; set deferred to false")
            remarks.append(f"each tensor was read whole, as {reason}")
            if not self._recording.end():
                raise
            self._is_deferred = False
            self._reset()
            self._run(load, model)
        try:
            require_written(model, self._writes, path, is_exempt)
        except Error as error:
            if self.options.missing == "error":
                raise
            remarks[0] = str(error)
        self._copies.close(progress)
        seconds = time.perf_counter() - begin
        bytes_read = sum(checkpoint.bytes_read for checkpoint in self._checkpoints)
        line = (
            f"loadstone read {human_bytes(bytes_read)} in {seconds:.2f} s "
            f"({bytes_read / seconds / 1e9:.2f} GB/s); {'; '.join(remarks)}; "
            f"peak of the process: {human_bytes(peak_resident_bytes())}"
        )
        return line, remarks == ["all parameters have values"]

    def receipt(self, model: torch.nn.Module) -> Receipt:
        reads = [
            checkpoint.receipts
            for checkpoint in self._checkpoints
            if isinstance(checkpoint, DeferredCheckpoint)
        ]
        return receipt_of(model, self.options.digest, reads, self._copies.done)

    def _run(self, load: Callable[[], Any], model: torch.nn.Module) -> None:
        with self._recording.active():
            try:
                load()
                for error in self._thread_errors():
                    raise error
                materialize(model, self._writes.note)
            except Error:
                raise
            except Exception as error:
                for reason in self._thread_errors():  # an error here is the cause of `error`
                    raise reason from error
                raise self._explain(error) from error

    def _thread_errors(self) -> list[Error]:
        return [*self._copies.unrecorded, *self._recording.errors]

    def _reset(self) -> None:
        self._copies = PendingCopies(lambda: recording.covers_this_thread())
        self._writes = WriteTracker(self._copies.before_operation)
        recording = Recording(
            self._writes, MemoryAccess(self._copies.expose), lambda: self._current
        )
        self._recording = recording

    def _checkpoint(
        self, path: str, is_auxiliary: bool
    ) -> DeferredCheckpoint | ConvertedCheckpoint:
        options = self.options
        if is_auxiliary or not options.changes:
            copies = self._copies if self._is_deferred else None
            catalog = open_catalog(path, allow_links=options.allow_links)
            return DeferredCheckpoint(catalog, options, self._dtype, copies)
        group_bytes = options.staging_bytes_max // 3  # one group is made while one is consumed
        planned = plan_conversion(
            path, options.changes, options.threads, group_bytes, options.allow_links
        )
        return ConvertedCheckpoint(planned)

    def _explain(self, error: Exception) -> Exception:
        """Add the current tensor to an error of the server's code."""
        current = tensor_at_submit(error) or (None if self._recording.threads else self._current)
        if current is None:
            return error
        path, name, tensor = current
        if isinstance(tensor, DeferredTensor) and "python storage" in str(error):
            return lost_memory(name)
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        found = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
        message = f"the server's code for this model rejects the tensor ({reason})"
        return new_error("plan.shape", message, path=path, tensor=name, found=found)


def paths_of(
    path: str, patterns: Any, prepare: Callable[[], tuple[Any, ...]], subfolder: str = ""
) -> list[str]:
    """Return a source's folder, or its files if patterns select them.

    Args:
        prepare: the server's method, which downloads the files if they are not local.
    """
    if Path(path).exists() and patterns is None:
        return [str(Path(path, subfolder))]
    folder, files, *_ = prepare()
    return [str(folder)] if patterns is None else sorted(files)
