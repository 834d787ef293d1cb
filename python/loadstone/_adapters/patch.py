"""Replace entry points of libraries while they are patched, and restore the same objects.

A wrapper is *installed* in a library for the whole process, and *active* in the contexts that asked
for it. An installed wrapper that is not active calls the library's own function.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import importlib.util
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from loadstone._adapters.sites import LIBRARIES, is_supported_or_warn
from loadstone._base.errors import new_error, unknown_word_error
from loadstone._base.warn import users_level, warn

_ABSENT = object()
_lock = threading.RLock()


@dataclass(eq=False, repr=False)
class Hook:
    """Replaces a function, method or attribute of a library while it has users.

    Args:
        wrap: takes the attribute's current value (for a class the raw descriptor, so that a
            ``classmethod`` object stays a ``classmethod``) and returns the replacement. It is
            called again when another hook on the same attribute is removed, and must have no side
            effects. See :func:`wrap_if_active`.

    Thread safety: any thread may call ``install`` and ``uninstall``; one lock guards all hooks.
    """

    owner: Any
    name: str
    wrap: Callable[[Any], Any]

    def install(self) -> None:
        with _lock:
            key = (id(self.owner), self.name)
            attribute = _patched.get(key) or _Attribute(self.owner, self.name)
            attribute.add(self)
            _patched[key] = attribute

    def uninstall(self) -> None:
        """Remove the wrapper; removing the last wrapper restores the library's own object."""
        with _lock:
            key = (id(self.owner), self.name)
            _patched[key].remove(self)
            if not _patched[key].hooks:
                del _patched[key]

    def __repr__(self) -> str:
        return f"Hook({getattr(self.owner, '__name__', self.owner)}.{self.name})"


class _Attribute:
    """One attribute of a library with its hooks, innermost first."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name
        self.hooks: list[Hook] = []
        getattr(owner, name)  # makes a module that imports on demand store the attribute
        self.own = vars(owner).get(name, _ABSENT)  # _ABSENT: inherited
        self.installed = self.own

    def add(self, hook: Hook) -> None:
        self._put(hook.wrap(self._or_inherited(vars(self.owner).get(self.name, _ABSENT))))
        self.hooks.append(hook)

    def remove(self, hook: Hook) -> None:
        """Remove a hook and wrap again, unless other code has replaced the attribute."""
        self.hooks.remove(hook)
        if vars(self.owner).get(self.name, _ABSENT) is not self.installed:
            return
        value = self.own
        for other in self.hooks:
            value = other.wrap(self._or_inherited(value))
        self._put(value)

    def _or_inherited(self, value: Any) -> Any:
        if value is not _ABSENT:
            return value
        bases = self.owner.__mro__[1:] if isinstance(self.owner, type) else (type(self.owner),)
        return next(vars(base)[self.name] for base in bases if self.name in vars(base))

    def _put(self, value: Any) -> None:
        if value is not _ABSENT:
            setattr(self.owner, self.name, value)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)
        self.installed = value


_patched: dict[tuple[int, str], _Attribute] = {}


class Hooks(list[Hook]):
    """Hooks that are installed together, while there are users.

    Args:
        library: the library that :func:`active` checks; "" if the hooks check something else.
        late: returns the hooks on modules that may be imported later, the same objects each time;
            called by :meth:`acquire` and :meth:`refresh`.

    Thread safety: ``acquire`` and ``release`` count under a lock; any thread may call them.
    """

    def __init__(
        self,
        hooks: Iterable[Hook] = (),
        library: str = "",
        late: Callable[[], Iterable[Hook]] = tuple,
    ) -> None:
        super().__init__(hooks)
        self.library = library
        self.late = late
        self._installed: list[Hook] = []
        self._users = 0

    def acquire(self) -> None:
        """Add a user; install all hooks that are not installed, or none if one fails."""
        with _lock:
            self._users += 1
            try:
                self.refresh()
            except BaseException:
                self.release()
                raise

    def refresh(self) -> None:
        """Install late hooks whose module has been imported; no effect without users."""
        with _lock:
            for hook in (*self, *self.late()) if self._users else ():
                if hook not in self._installed:
                    hook.install()
                    self._installed.append(hook)

    def release(self) -> None:
        """Remove a user; when the last user leaves, uninstall all hooks."""
        with _lock:
            if self._users == 0:
                raise RuntimeError("hooks were released more often than acquired")
            self._users -= 1
            while self._installed and self._users == 0:
                self._installed.pop().uninstall()


@dataclass(eq=False)
class _Entry:
    """An entry of a context's stack, which switches libraries on or off until it ends."""

    libraries: tuple[str, ...]
    on: bool
    owner: Any = None
    alive: bool = True


_entries: contextvars.ContextVar[tuple[_Entry, ...]] = contextvars.ContextVar(
    "loadstone_patch", default=()
)
_everywhere: Counter[str] = Counter()  # by library, the number of start() calls without stop()


def active(library: str) -> bool:
    """Return whether a library is patched in this context or process; thread-safe."""
    for entry in reversed(_entries.get()):
        if entry.alive and library in entry.libraries:
            return entry.on
    return _everywhere[library] > 0


def _begin(entry: _Entry) -> None:
    _entries.set((*(other for other in _entries.get() if other.alive), entry))


def _end(entry: _Entry) -> None:
    """End an entry, also in the copies of the context that asyncio tasks have made meanwhile."""
    entry.alive = False
    _entries.set(tuple(other for other in _entries.get() if other.alive))


@contextlib.contextmanager
def _entered(entry: _Entry) -> Iterator[None]:
    _begin(entry)
    try:
        yield
    finally:
        _end(entry)


@contextlib.contextmanager
def set_variable(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[Any]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@contextlib.contextmanager
def hooked(hooks: Hooks) -> Iterator[None]:
    """Install hooks and make their library active in this context alone, for one call."""
    hooks.acquire()
    try:
        with _entered(_Entry((hooks.library,) if hooks.library else (), on=True)):
            yield
    finally:
        hooks.release()


def suspended(*libraries: str) -> contextlib.AbstractContextManager[None]:
    """Restore the libraries' own functions in this context alone, to pass a call on to them."""
    return _entered(_Entry(libraries, on=False))


def wrap_if_active(library: str, replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return the ``wrap`` of a :class:`Hook` for a function, ``classmethod`` or ``staticmethod``.

    If ``library`` is active, the wrapper calls ``replacement`` with the library's own function and
    the call's arguments. Code that dynamo traces (``torch.compile``, ``torch.export``) gets the
    library's own function, because dynamo cannot trace a context variable and would break the
    graph.
    """

    def wrap(original: Any) -> Any:
        if isinstance(original, classmethod | staticmethod):
            return type(original)(wrap(original.__func__))
        from torch.compiler import is_dynamo_compiling  # every patched library has imported torch

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not active(library):
                return original(*args, **kwargs)
            return replacement(original, *args, **kwargs)

        return wrapper

    return wrap


def within(
    current: contextvars.ContextVar[Any], replacement: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a replacement that acts only inside a loader's call.

    Args:
        current: the state of the call, which the replacement gets as its first argument. It is
            ``None`` outside calls, where the library's own function runs.
    """

    def gated(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = current.get()
        if call is None:
            return original(*args, **kwargs)
        return replacement(call, original, *args, **kwargs)

    return gated


def with_hooks(library: str) -> Callable[..., Any]:
    """Return a replacement that runs the original with the hooks of a library, if supported."""

    def replacement(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if importlib.util.find_spec(library) is None or not is_supported_or_warn(library):
            return original(*args, **kwargs)
        with hooked(patches_for([library])[0]):
            return original(*args, **kwargs)

    return replacement


class patch(contextlib.ContextDecorator):  # noqa: N801  (used as a function is)
    """Make the libraries' own loaders run on loadstone.

    >>> with loadstone.patch("transformers", "accelerate"):
    ...     model = AutoModelForCausalLM.from_pretrained("folder")
    >>> patched = loadstone.patch("accelerate").start()    # the whole process, until patched.stop()

    As a context manager, it patches only the context that entered it: this thread, or under asyncio
    this task and the tasks that it starts inside. Other threads get the libraries' own behaviour.
    The context manager may be nested, entered again and shared by threads. When the last user
    leaves, every attribute of the libraries is the same object as before.

    A name that was imported earlier from the library's module (``from accelerate import
    load_checkpoint_in_model``) cannot be patched.

    Args:
        libraries: one or more of ``"transformers"``, ``"diffusers"``, ``"accelerate"``,
            ``"bitsandbytes"``, ``"modelopt"``, ``"peft"``.

    Raises:
        OptionError: ``plan.options``: a library is unknown or not installed.

    Thread safety: any threads may enter, leave, start and stop at the same time.
    """

    def __init__(self, *libraries: str) -> None:
        self.libraries = libraries
        self._hooks = patches_for(libraries)
        self._open: list[_Entry] = []
        self._started = False
        self._is_used = False

    def __enter__(self) -> patch:
        self._acquire()
        entry = _Entry(self.libraries, on=True, owner=self)
        with _lock:
            self._open.append(entry)
        _begin(entry)
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            here = [entry for entry in _entries.get() if entry.alive and entry.owner is self]
            entry = (here or self._open)[-1]  # `here` is empty if a different context entered
            self._open.remove(entry)
        _end(entry)
        self._release()

    def start(self) -> patch:
        """Patch for the whole process until :meth:`stop`. No effect if already started."""
        with _lock:
            if not self._started:
                self._acquire()
                _everywhere.update(self.libraries)
                self._started = True
        return self

    def stop(self) -> None:
        """End :meth:`start`. No effect if not started."""
        with _lock:
            if self._started:
                _everywhere.subtract(self.libraries)
                self._started = False
                self._release()

    def _acquire(self) -> None:
        self._is_used = True
        with contextlib.ExitStack() as undo:
            for hooks in self._hooks:
                hooks.acquire()
                undo.callback(hooks.release)
            undo.pop_all()

    def _release(self) -> None:
        for hooks in reversed(self._hooks):
            hooks.release()

    def __del__(self) -> None:
        if hasattr(self, "_hooks") and not self._is_used:
            message = f"{self!r} had no effect: use it in a with statement, or call its start()"
            warn(message, stacklevel=users_level())

    def __repr__(self) -> str:
        names = ", ".join(repr(name) for name in self.libraries)
        return f"loadstone.patch({names})"


def patches_for(libraries: Iterable[str]) -> list[Hooks]:
    """Return the hooks of each supported library; reject unknown libraries and absent ones."""
    names = list(dict.fromkeys(libraries))
    if not names:
        raise _refusal("no library was passed", "")
    for name in names:
        if name not in LIBRARIES:
            raise unknown_word_error("patch", "library", name, LIBRARIES)
        if importlib.util.find_spec(name) is None:
            raise _refusal("this library is not installed", name)
    supported = list(filter(is_supported_or_warn, names))
    with _lock:
        return [_library_hooks(name) for name in supported]


@functools.cache
def _library_hooks(name: str) -> Hooks:
    hooks: Hooks = importlib.import_module(f"loadstone.{name}").patches()
    return hooks


def _refusal(message: str, name: str) -> Exception:
    expected = ", ".join(LIBRARIES)
    return new_error("plan.options", message, field="patch", found=repr(name), expected=expected)
