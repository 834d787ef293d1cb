"""Threads that a model's loading code gives work to: recorded as the one that began the load.

Torch's modes are per thread. While a load is in progress, ``threading.Thread`` and
``ThreadPoolExecutor`` take the modes along, from threads that are recorded and from no others.
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

# A second run waits this long for work that the first one began.
_WAIT_SECONDS = 60.0


class _Thread(threading.local):
    recording: Recording | None = None


_this = _Thread()


class Recording:
    """Two modes of a load, in the thread that began it and in those that it gives work to.

    Args:
        writes: thread-safe, and so is ``access``. Notes nothing after the load.
        taken: returns the tensor that the code was given last, for errors.

    Attributes:
        threads: that were started, without daemons.
        errors: that ended one of them; Python prints them, and the load goes on.
    """

    def __init__(
        self, writes: WriteTracker, access: TorchFunctionMode, taken: Callable[[], Any]
    ) -> None:
        self.threads: list[threading.Thread] = []
        self.errors: list[Error] = []
        self._writes = writes
        self._access = access
        self._taken = taken
        self._tasks: weakref.WeakSet[concurrent.futures.Future[Any]] = weakref.WeakSet()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Records this thread and those that it gives work to."""
        _hooks.acquire()
        try:
            with self._writes, self._access, _recorded_by(self):
                yield
        finally:
            self._writes.is_over = True  # threads may live on with the modes
            _hooks.release()

    def covers_this_thread(self) -> bool:
        """Returns ``True`` if the calling thread is recorded."""
        return _this.recording is self

    def end(self) -> bool:
        """Cancel the work of other threads or wait for its end; ``False``: some still runs."""
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
        """Records a thread that is going to be started."""
        if not thread.daemon:  # those of progress bars touch no tensor
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
        _push_mode(self._writes)  # entered by `with`, it would set flags of the whole process
        try:
            with self._access, _recorded_by(self):
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


def tensor_at_submit(error: Exception) -> Any:
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
        Hook(threading.Thread, "start", wrap_always(_start)),
        Hook(concurrent.futures.ThreadPoolExecutor, "submit", wrap_always(_submit)),
    ]
)
