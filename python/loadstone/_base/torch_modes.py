"""State that torch keeps for a process or a thread, and that a load sets for a time."""

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
    """State of the whole process that constructors change: it ends as it was.

    Thread-safe. Where threads overlap, the last one out puts back the value that the first one
    found; what another thread sets meanwhile on purpose is then lost.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.read = read
        self.write = write
        self._found: Any = None
        self._inside: list[int] = []  # threads, once for each entry
        self.renew()

    def renew(self) -> None:
        """A forked child has none of the other threads."""
        self._lock = threading.Lock()
        self._inside = [each for each in self._inside if each == threading.get_ident()]

    @contextlib.contextmanager
    def kept(self, *, is_mine: bool = False) -> Iterator[None]:
        """Puts the value back on leaving.

        Args:
            is_mine: no other thread sets the value meanwhile, so it is put back at once.
        """
        thread = threading.get_ident()
        with self._lock:
            value = self.read()
            if not self._inside:
                self._found = value
            self._inside.append(thread)
        try:
            yield
        finally:
            with self._lock:
                self._inside.remove(thread)
                if not self._inside:
                    self.write(self._found)
                elif is_mine or set(self._inside) == {thread}:
                    self.write(value)


def _generators() -> dict[torch.Generator, torch.Tensor]:
    """The default generators of all devices that are in use, and their states."""
    devices = (torch.cuda, torch.xpu)
    found = (torch.default_generator, *(each for of in devices for each in of.default_generators))
    return {generator: generator.get_state() for generator in found}


def _set_generators(states: dict[torch.Generator, torch.Tensor]) -> None:
    for generator, state in states.items():
        generator.set_state(state)


default_dtype = Setting(torch.get_default_dtype, torch.set_default_dtype)
random_numbers = Setting(_generators, _set_generators)
_lock = threading.RLock()


def _renew() -> None:
    """A forked child has none of the threads that may have held the locks."""
    global _lock
    _lock = threading.RLock()
    default_dtype.renew()
    random_numbers.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees every operation, and that torch's compiler leaves alone.

    torch wraps ``__torch_dispatch__`` for that purpose, and the wrapper imports the compiler: a
    second and 800 modules for a process that compiles nothing. Here the code is marked instead.
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
    """The only place where a default dtype is set, here or by a library inside of it.

    Args:
        dtype: the default dtype inside; None: the one that is there, which a library may set.

    On leaving, torch's default dtype is the one from before, however the construction ended.

    Thread safety: one thread at a time is inside; the same thread may enter again.
    """
    with _lock, default_dtype.kept(is_mine=True):
        if dtype is not None:
            torch.set_default_dtype(dtype)
        yield


def wrap_always(wrap_call: Callable[..., Any]) -> Callable[[Any], Any]:
    """The ``wrap`` of a hook that concerns all callers, patched or not: they share the lock.

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
    """A call of a library's function that constructs, in turn with others."""
    with constructing():
        return original(*args, **kwargs)


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Tensors made inside are no inference tensors, whose writes torch does not count.

    Inside ``torch.inference_mode()`` torch also leaves operations whole that conversion code is
    traced through. Whether gradients are recorded stays as it is.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    records = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        yield
