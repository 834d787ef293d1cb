"""Observe a constructor with two torch modes, which are per thread.

This module patches nothing in torch and sets no global hook, so other threads' constructions are
unaffected. It detects a parameter when ``register_parameter`` reads its ``grad_fn``. torch has
hooks for this purpose, but they are global to the process, and removing one while a different
thread registers a parameter makes that thread fail ("OrderedDict mutated during iteration").
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from loadstone._base.torch_modes import DispatchMode
from loadstone._skeleton.build import Build

_current: ContextVar[Build | None] = ContextVar("loadstone_skeleton", default=None)

_REGISTER_PARAMETER = torch.nn.Module.register_parameter.__code__
_COPY_PARAMETER = torch.nn.Parameter.__deepcopy__.__code__
# In code with these globals ``is_meta`` stays true, so that initialisers which check their draws
# return immediately.
_INIT_GLOBALS = torch.nn.init.__dict__


def _methods(names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.Tensor, name) for name in names.split())


# Access to a tensor's memory that bypasses the dispatcher: functions that read it or point to it.
_READS = _methods("__array__ numpy tolist")
_POINTS = _methods(
    """__dlpack__ __reduce_ex__ __repr__ _typed_storage data_ptr is_shared share_memory_ storage
    untyped_storage"""
)
_DEVICE_GETTERS = ("device", "is_cpu", "is_cuda", "is_meta")


def current() -> Build | None:
    build = _current.get()
    if build is None or build.busy or build.thread != threading.get_ident():
        return None
    return build


class _FunctionMode(TorchFunctionMode):
    """Intercepts queries of memory and device, for tensors that the constructor takes for real."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        build = current()
        if build is None:
            return func(*args, **(kwargs or {}))
        build.tracker.add_tensors(args)
        build.tracker.add_tensors(kwargs)
        caller = sys._getframe(1)
        if caller.f_code is _COPY_PARAMETER:
            build.tracker.add_copies(caller.f_locals.get("memo"))
        name = getattr(func, "__name__", "")
        if name == "__get__":
            result = self._get(build, func, args)
            build.tracker.add_tensors(result)
            return result
        if name == "__set__" and func.__self__ is torch.Tensor.data:  # type: ignore[attr-defined]
            with build.quietly():
                return build.set_data(*args)
        if func in _READS or func in _POINTS:
            args = build.give_memory(args, values=func in _READS)
        elif build.any_real:
            build.materialize_arguments(args)
        before = build.wants_meta
        build.wants_meta = before or _names_meta(args) or _names_meta((kwargs or {}).values())
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            build.wants_meta = before
        build.tracker.add_tensors(result)
        if isinstance(result, torch.Tensor):
            build.note_literal(args, kwargs, result)
        return result

    def _get(self, build: Build, func: Any, args: tuple[Any, ...]) -> Any:
        tensor, attribute = args[0], func.__self__
        if attribute is torch.Tensor.grad_fn:
            frame = sys._getframe(2)
            if frame.f_code is _REGISTER_PARAMETER:
                with build.quietly():
                    build.parameter_registered(frame.f_locals.get("self"), tensor)
        elif attribute.__name__ == "is_meta" and sys._getframe(2).f_globals is _INIT_GLOBALS:
            with build.quietly():
                build.initialiser_skipped(tensor, sys._getframe(2))
        elif attribute.__name__ in _DEVICE_GETTERS:
            with build.quietly():
                device = build.apparent_device(tensor)
            if device is not None:
                return device if attribute.__name__ == "device" else (
                    attribute.__name__ == f"is_{device.type}"
                )  # fmt: skip
        return func(*args)


def _names_meta(values: Iterable[Any]) -> bool:
    return any(
        (isinstance(value, torch.device) and value.type == "meta")
        or (isinstance(value, str) and value == "meta")
        for value in values
    )


class _DispatchMode(DispatchMode):
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        build = current()
        if build is None:
            return func(*args, **(kwargs or {}))
        with build.quietly():
            result = build.dispatch(func, args, kwargs or {})
        build.tracker.add_tensors(result)
        return result


class _Stack(threading.local):
    """The modes of a thread, entered once for all contexts (such as coroutines) that use them."""

    def __init__(self) -> None:
        self.users = 0
        self.modes: tuple[Any, ...] = ()


_stack = _Stack()


def push(build: Build) -> Build | None:
    """Make a build the current one; return the previous one."""
    if _stack.users == 0:
        _stack.modes = (_FunctionMode(), _DispatchMode())  # type: ignore[no-untyped-call]
        for mode in _stack.modes:
            mode.__enter__()  # type: ignore[no-untyped-call]
    _stack.users += 1
    before = _current.get()
    _current.set(build)
    return before


def pop(before: Build | None) -> None:
    _current.set(before)
    _stack.users -= 1
    if _stack.users == 0:
        for mode in reversed(_stack.modes):
            mode.__exit__(None, None, None)
        _stack.modes = ()
