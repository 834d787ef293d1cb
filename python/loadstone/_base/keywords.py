"""Misspelled keywords: refused with the nearest name, in place of being ignored."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from loadstone import _core
from loadstone._base.errors import unknown

_P = ParamSpec("_P")
_R = TypeVar("_R")

# The likeness, by `difflib`, of a keyword that is taken for a misspelled one.
LIKENESS_MIN = 0.85


def names_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that names all its keywords: its TypeError names the nearest one."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in known:
                near = _core.did_you_mean(name, known)
                message = f"{function.__name__}() got an unexpected keyword argument {name!r}{near}"
                raise TypeError(message)
        return function(*args, **kwargs)

    return call


def refuse_misspelled(
    given: Iterable[str], ours: Iterable[str], functions: Iterable[Any], config: Any = None
) -> None:
    """Refuse keywords that nobody takes and that are nearly one that somebody takes.

    All others pass: libraries hand keywords on to configs, models and components.

    Args:
        ours: names of loadstone's own keywords.
        functions: of the library; keywords are their parameters, and names that their code looks
            up in ``**kwargs``.
        config: a class or an object; its attributes may be keywords.

    Raises:
        Error: ``plan.options``, which names the nearest keyword.
    """
    known = set(ours).union(*map(_taken_by, functions))
    if config is not None:
        known.update(dir(config), _parameters(config) if isinstance(config, type) else ())
    for name in given:
        if name not in known and (near := difflib.get_close_matches(name, known, 1, LIKENESS_MIN)):
            raise unknown(name, "argument", name, near)


def _taken_by(function: Any) -> set[str]:
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    words = [each for each in code.co_consts if isinstance(each, str)] if code is not None else []
    return {*_parameters(function), *filter(str.isidentifier, words)}


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a class that is not written in Python
        return []
