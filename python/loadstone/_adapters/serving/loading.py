"""A server's own code for a model at work on a checkpoint, and the proof of what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from loadstone._adapters.serving.converted import Converted, conversion
from loadstone._adapters.serving.copies import Copies
from loadstone._adapters.serving.deferred import Deferred, Deferring, lost_memory, settle
from loadstone._adapters.serving.options import Options
from loadstone._adapters.serving.proof import require_written
from loadstone._adapters.serving.receipts import receipt_of
from loadstone._adapters.serving.threads import Recording, taken_by
from loadstone._adapters.serving.written import Handing, Writes
from loadstone._base.dtypes import dtype_name
from loadstone._base.errors import Error, make
from loadstone._base.machine import peak_resident_bytes
from loadstone._base.progress import ProgressCallback
from loadstone._execute.report import human_bytes
from loadstone._files.catalog import inspect
from loadstone._files.receipt import Receipt


class Loading:
    """One load, or one stream of tensors.

    Attributes:
        options: as given.

    Args:
        dtype: of numbers that are decoded, by its safetensors name.
        is_proved: the tensors are taken by :meth:`carry_out`. Else whoever takes them does so
            without us, and gets each with its values.
    """

    def __init__(self, options: Options, dtype: str, is_proved: bool = True) -> None:
        self.options = options
        self._dtype = dtype
        self._is_deferred = is_proved and options.deferred
        self._new_records()
        self._checkpoints: list[Deferring | Converted] = []
        self._now: tuple[str, str, torch.Tensor] | None = None  # path, name, what is being taken

    def tensors(
        self, path: str, wants: Callable[[str], bool], is_beside: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of a file or folder that are wanted by their names in it.

        Args:
            is_beside: it is not the model's own checkpoint, and nothing is to change it.

        Raises:
            FormatError, LoadError, PlanError: it cannot be read.
        """
        checkpoint = self._checkpoint(path, is_beside)
        self._checkpoints.append(checkpoint)
        named = iter(checkpoint.tensors(wants))
        while True:
            with torch._C.DisableTorchFunction():  # addresses that it asks for are ours
                following = next(named, None)
            if following is None:
                break
            name, tensor = following
            if not isinstance(tensor, Deferred):
                self._writes.note(tensor)  # a model may keep it
            self._now = path, name, tensor
            yield name, tensor
        self._now = None

    def carry_out(
        self,
        load: Callable[[], Any],
        model: torch.nn.Module,
        path: str,
        is_exempt: Callable[[str, torch.nn.Module], bool],
        progress: ProgressCallback | None = None,
        repeats: bool = True,
    ) -> tuple[str, bool]:
        """Has a model loaded by its own code, which takes :meth:`tensors`; then reads the values.

        Args:
            path: of the checkpoint, for errors.
            is_exempt: modules, by name, whose parameters others give values to.
            repeats: ``load`` can be done once more. It is, on tensors that are read, where the code
                does to one that is not what can only be done to memory.

        Returns:
            A line for the log, and whether there is nothing in it to worry about.

        Raises:
            FormatError, LoadError: the checkpoint cannot be read.
            PlanError: ``plan.shape``: the model's code does not take a tensor.
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
            self._begin_anew()
            self._run(load, model)
        try:
            require_written(model, self._writes, path, is_exempt)
        except Error as error:
            if self.options.missing == "error":
                raise
            remarks[0] = str(error)
        self._copies.close(progress)
        seconds = time.perf_counter() - begin
        bytes_read = sum(each.bytes_read for each in self._checkpoints)
        line = (
            f"loadstone read {human_bytes(bytes_read)} in {seconds:.2f} s "
            f"({bytes_read / seconds / 1e9:.2f} GB/s); {'; '.join(remarks)}; "
            f"peak of the process: {human_bytes(peak_resident_bytes())}"
        )
        return line, remarks == ["all parameters have values"]

    def receipt(self, model: torch.nn.Module) -> Receipt:
        """What was read, and what the model holds now, by content."""
        reads = [each.receipts for each in self._checkpoints if isinstance(each, Deferring)]
        return receipt_of(model, self.options.digest, reads, self._copies.done)

    def _run(self, load: Callable[[], Any], model: torch.nn.Module) -> None:
        with self._recording.begun():
            try:
                load()
                for error in self._unseen():
                    raise error
                settle(model, self._writes.note)
            except Error:
                raise
            except Exception as error:
                for reason in self._unseen():  # the code misses what its thread did not do
                    raise reason from error
                raise self._refused(error) from error

    def _unseen(self) -> list[Error]:
        """Return errors of threads, which the code may not know of."""
        return [*self._copies.strangers, *self._recording.lost]

    def _begin_anew(self) -> None:
        self._is_deferred = False
        self._new_records()

    def _new_records(self) -> None:
        self._copies = Copies(lambda: recording.is_here())
        self._writes = Writes(self._copies.before)
        recording = Recording(self._writes, Handing(self._copies.give), lambda: self._now)
        self._recording = recording

    def _checkpoint(self, path: str, is_beside: bool) -> Deferring | Converted:
        options = self.options
        if is_beside or not options.changes:
            copies = self._copies if self._is_deferred else None
            catalog = inspect(path, allow_links=options.allow_links)
            return Deferring(catalog, options, self._dtype, copies)
        group_bytes = options.staging_bytes_max // 3  # one is made while another is taken
        return Converted(conversion(path, options.changes, options.threads, group_bytes))

    def _refused(self, error: Exception) -> Exception:
        """An error of the server's code, with the tensor that it was given."""
        taken = taken_by(error) or (None if self._recording.threads else self._now)
        if taken is None:
            return error
        path, name, tensor = taken
        if isinstance(tensor, Deferred) and "python storage" in str(error):
            return lost_memory(name)
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        found = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
        message = f"the server's code for this model does not take the tensor ({reason})"
        return make("plan.shape", message, path=path, tensor=name, found=found)
