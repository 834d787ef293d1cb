"""Threads that a model's loading code gives work to: recorded as the one that began the load.

Torch's modes are per thread. While a load is in progress, ``threading.Thread`` and
``ThreadPoolExecutor`` take the modes along, from threads that are recorded and from no others.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _pop_mode, _push_mode

from loadstone._patch import Hook, Hooks
from loadstone._torch_state import DispatchMode, in_turn


class _Thread(threading.local):
    recording: Recording | None = None


_this = _Thread()


class Recording:
    """Two modes of a load, in the thread that began it and in those that it gives work to.

    Args:
        writes: thread-safe, and so is ``handing``.
        taken: returns the tensor that the code was given last, for errors.

    Attributes:
        has_threads: a thread was started that may raise errors of any tensor.
    """

    def __init__(
        self, writes: DispatchMode, handing: TorchFunctionMode, taken: Callable[[], Any]
    ) -> None:
        self.has_threads = False
        self._writes = writes
        self._handing = handing
        self._taken = taken
        self._tasks: weakref.WeakSet[concurrent.futures.Future[Any]] = weakref.WeakSet()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Records this thread and those that it gives work to."""
        _hooks.acquire()
        try:
            with self._writes, self._handing, _recorded_by(self):
                yield
        finally:
            _hooks.release()

    def is_here(self) -> bool:
        """Return ``True`` if the calling thread is recorded."""
        return _this.recording is self

    def end_tasks(self) -> None:
        """Cancels or waits for the tasks of pools: they must not write later."""
        with self._lock:
            tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        concurrent.futures.wait(tasks)

    def follow(self, thread: threading.Thread) -> None:
        """Records a thread that is going to be started."""
        self.has_threads |= not thread.daemon  # those of progress bars touch no tensor
        run = thread.run

        def recorded() -> None:
            thread.run = run  # type: ignore[method-assign]
            self._run(run)

        thread.run = recorded  # type: ignore[method-assign]

    def _run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        _push_mode(self._writes)  # entered by `with`, it would set flags of the whole process
        try:
            with self._handing, _recorded_by(self):
                return function(*args, **kwargs)
        finally:
            _pop_mode()

    def _run_task(
        self, taken: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            return self._run(function, *args, **kwargs)
        except Exception as error:
            error._loadstone_taken = taken  # type: ignore[attr-defined]
            raise

    def submit(
        self, submit: Any, executor: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """``Executor.submit`` of a task that is recorded; the thread that takes it may be older."""
        task = functools.partial(self._run_task, self._taken(), function)
        with unrecorded():  # a pool's new thread lives on, and takes tasks of others
            future = submit(executor, task, *args, **kwargs)
        with self._lock:
            self._tasks.add(future)
        return future


@contextlib.contextmanager
def _recorded_by(recording: Recording | None) -> Iterator[None]:
    before = _this.recording
    _this.recording = recording
    try:
        yield
    finally:
        _this.recording = before


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Work that is given to threads inside is loadstone's own."""
    return _recorded_by(None)


def taken_by(error: Exception) -> Any:
    """The tensor that the code was given last when it submitted the task that failed, or None."""
    return getattr(error, "_loadstone_taken", None)


def _start(start: Any, thread: threading.Thread) -> None:
    recording = _this.recording
    if recording is not None and thread.ident is None:
        recording.follow(thread)
    start(thread)


def _submit(
    submit: Any, executor: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    recording = _this.recording
    if recording is None:
        return submit(executor, function, *args, **kwargs)
    return recording.submit(submit, executor, function, *args, **kwargs)


_hooks = Hooks(
    [
        Hook(threading.Thread, "start", in_turn(_start)),
        Hook(concurrent.futures.ThreadPoolExecutor, "submit", in_turn(_submit)),
    ]
)
