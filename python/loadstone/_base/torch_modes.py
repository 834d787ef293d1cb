"""Set and restore torch's per-process and per-thread state."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.utils._python_dispatch import TorchDispatchMode


class Setting:
    """Process-wide state that constructors change and that this restores.

    Thread-safe. If threads overlap, the last one to leave restores the value that the first one
    found; a value that a different thread sets meanwhile on purpose is lost.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.read = read
        self.write = write
        self._initial: Any = None
        self._inside: list[int] = []  # thread ids, once per entry
        self.renew()

    def renew(self) -> None:
        """Reset after a fork: the child has none of the other threads."""
        self._lock = threading.Lock()
        self._inside = [thread for thread in self._inside if thread == threading.get_ident()]

    @contextlib.contextmanager
    def kept(self, *, is_mine: bool = False) -> Iterator[None]:
        """Restore the value on leaving.

        ``is_mine``: no other thread sets the value meanwhile, so restore it at once.
        """
        thread = threading.get_ident()
        with self._lock:
            value = self.read()
            if not self._inside:
                self._initial = value
            self._inside.append(thread)
        try:
            yield
        finally:
            with self._lock:
                self._inside.remove(thread)
                if not self._inside:
                    self.write(self._initial)
                elif is_mine or set(self._inside) == {thread}:
                    self.write(value)


def _generators() -> dict[torch.Generator, torch.Tensor]:
    generators = [torch.default_generator]
    generators += (*torch.cuda.default_generators, *torch.xpu.default_generators)
    return {generator: generator.get_state() for generator in generators}


def _set_generators(states: dict[torch.Generator, torch.Tensor]) -> None:
    for generator, state in states.items():
        generator.set_state(state)


default_dtype = Setting(torch.get_default_dtype, torch.set_default_dtype)
random_numbers = Setting(_generators, _set_generators)
_lock = threading.RLock()


def _renew() -> None:
    """Reset the locks in a forked child: it lacks the threads that may have held them."""
    global _lock
    _lock = threading.RLock()
    default_dtype.renew()
    random_numbers.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees every operation and that torch's compiler skips.

    torch wraps ``__torch_dispatch__`` for that purpose, and the wrapper imports the compiler: a
    second and 800 modules for a process that compiles nothing. This class marks the code instead.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]
        code = cls.__torch_dispatch__.__code__
        set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no wrapper


@contextlib.contextmanager
def constructing(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Restore torch's default dtype on leaving; all code that sets it runs in here.

    One thread at a time is inside; the same thread may enter again.

    Args:
        dtype: the default dtype inside; None: the current one, which a library may set.
    """
    with _lock, default_dtype.kept(is_mine=True):
        if dtype is not None:
            torch.set_default_dtype(dtype)
        yield


def wrap_always(wrap_call: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return the ``wrap`` of a hook for all callers, patched or not: they share the lock.

    Args:
        wrap_call: called with the library's own function and then the call's arguments.
    """

    def wrap(original: Any) -> Any:
        if isinstance(original, classmethod | staticmethod):
            return type(original)(wrap(original.__func__))

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return wrap_call(original, *args, **kwargs)

        return wrapper

    return wrap


def construct(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with constructing():
        return original(*args, **kwargs)


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make no inference tensors inside, because torch does not count writes to them.

    Inside ``torch.inference_mode()`` torch also does not decompose operations, which tracing of
    conversion code needs. Gradient recording stays unchanged.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    records = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        yield
