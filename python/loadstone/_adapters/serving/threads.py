"""Apply a load's torch modes to the threads that the model's loading code starts.

torch's modes are per thread. During a load, hooks on ``threading.Thread`` and
``ThreadPoolExecutor`` pass the modes from a recorded thread to the threads that it starts.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _pop_mode, _push_mode

from loadstone._adapters.patch import Hook, Hooks
from loadstone._adapters.serving.write_tracking import WriteTracker
from loadstone._base.errors import Error
from loadstone._base.torch_modes import wrap_always

# Maximum time that a second run waits for the first run's work.
_WAIT_SECONDS = 60.0


class _Thread(threading.local):
    recording: Recording | None = None


_this = _Thread()


class Recording:
    """Two modes of a load, active in its thread and in the threads that it starts.

    Args:
        writes, access: the modes, which are thread-safe; ``writes`` records nothing after the load.
        current: returns the tensor that the code received last, for errors.

    Attributes:
        threads: started threads, without daemons.
        errors: exceptions that ended a thread; Python prints them, and the load continues.
    """

    def __init__(
        self, writes: WriteTracker, access: TorchFunctionMode, current: Callable[[], Any]
    ) -> None:
        self.threads: list[threading.Thread] = []
        self.errors: list[Error] = []
        self._writes = writes
        self._access = access
        self._current = current
        self._tasks: weakref.WeakSet[concurrent.futures.Future[Any]] = weakref.WeakSet()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        _hooks.acquire()
        try:
            with self._writes, self._access, _recorded_by(self):
                yield
        finally:
            self._writes.is_over = True  # threads with the modes may outlive the load
            _hooks.release()

    def covers_this_thread(self) -> bool:
        return _this.recording is self

    def end(self) -> bool:
        """Cancel or await the work of other threads; return ``False`` if some still runs."""
        with self._lock:
            tasks, threads = list(self._tasks), list(self.threads)
        until = time.monotonic() + _WAIT_SECONDS
        running = [task for task in tasks if not task.cancel()]
        concurrent.futures.wait(running, _WAIT_SECONDS)
        for thread in threads:
            if thread.is_alive():
                thread.join(max(until - time.monotonic(), 0))
        return all(task.done() for task in running) and not any(t.is_alive() for t in threads)

    def follow(self, thread: threading.Thread) -> None:
        if not thread.daemon:  # daemons are progress bars, which touch no tensors
            with self._lock:
                self.threads.append(thread)
        run = thread.run

        def recorded() -> None:
            thread.run = run  # type: ignore[method-assign]
            try:
                self._run(run)
            except Error as error:
                self.errors.append(error)
                raise

        thread.run = recorded  # type: ignore[method-assign]

    def _run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        _push_mode(self._writes)  # `with` would set process-wide flags
        try:
            with self._access, _recorded_by(self):
                return function(*args, **kwargs)
        finally:
            _pop_mode()

    def _run_task(
        self, current: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            return self._run(function, *args, **kwargs)
        except Exception as error:
            error._loadstone_current = current  # type: ignore[attr-defined]
            raise

    def submit(
        self, submit: Any, executor: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Submit a recorded task; the thread that executes it may be older than the load."""
        task = functools.partial(self._run_task, self._current(), function)
        with unrecorded():  # a new pool thread outlives this task and executes other code's tasks
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
    """Mark threads that start inside the block as loadstone's own, which are not recorded."""
    return _recorded_by(None)


def tensor_at_submit(error: Exception) -> Any:
    """Return the last tensor that the code received before it submitted the failed task."""
    return getattr(error, "_loadstone_current", None)


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
        Hook(threading.Thread, "start", wrap_always(_start)),
        Hook(concurrent.futures.ThreadPoolExecutor, "submit", wrap_always(_submit)),
    ]
)
