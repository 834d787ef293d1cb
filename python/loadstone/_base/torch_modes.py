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
    """A process-wide setting that constructors change and that loadstone restores.

    Thread-safe. If threads overlap, the last thread to leave restores the value that the first one
    found. If another thread sets the value deliberately meanwhile, its value is lost.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.read = read
        self.write = write
        self._initial: Any = None
        self._inside: list[int] = []  # ids of the threads inside, one entry per nested use
        self.renew()

    def renew(self) -> None:
        """Reset after a fork: the child process has only the thread that forked."""
        self._lock = threading.Lock()
        self._inside = [thread for thread in self._inside if thread == threading.get_ident()]

    @contextlib.contextmanager
    def kept(self, *, is_mine: bool = False) -> Iterator[None]:
        """Restore the value on leaving.

        ``is_mine``: no other thread sets the value meanwhile, so restore it immediately.
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
    """Reset the locks in a forked child, which lacks the threads that may have held them."""
    global _lock
    _lock = threading.RLock()
    default_dtype.renew()
    random_numbers.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that sees every operation and that torch's compiler skips.

    For the compiler to skip a mode, torch wraps ``__torch_dispatch__``. That wrapper imports the
    compiler, which costs a second and 800 modules even if nothing is compiled. This class marks the
    code of ``__torch_dispatch__`` instead.
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
    """Restore torch's default dtype on leaving. All code of loadstone that sets it runs in here.

    One thread at a time is inside; the same thread may enter again.

    Args:
        dtype: the default dtype inside; None: the current one, which a library may then change.
    """
    with _lock, default_dtype.kept(is_mine=True):
        if dtype is not None:
            torch.set_default_dtype(dtype)
        yield


def wrap_always(wrap_call: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return the ``wrap`` of a hook that is active even without :func:`loadstone.patch`.

    All such hooks share the lock of :func:`constructing`.

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
    """Make ordinary tensors inside, because torch does not count writes to inference tensors.

    In addition, torch does not decompose operations inside ``torch.inference_mode()``, but tracing
    of conversion code needs that. Gradient recording stays unchanged.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    records = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        yield
