"""Reject misspelled keywords, which libraries would ignore, and suggest the nearest keyword."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

from loadstone import _core
from loadstone._base.errors import unknown_word_error

_P = ParamSpec("_P")
_R = TypeVar("_R")

# `difflib` ratio above which a keyword counts as misspelled. (The core's edit distance would
# suggest "patch_size" for "block_size".) A model's own code may accept fields of other models'
# configs in transformers. The edit distance would reject 11 % of these fields; this ratio rejects
# 2 %.
LIKENESS_MIN = 0.85


def names_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make the TypeError for an unknown keyword suggest the nearest keyword."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in known:
                near = _core.did_you_mean(name, known)
                message = (
                    f"{function.__qualname__}() got an unexpected keyword argument {name!r}{near}"
                )
                raise TypeError(message)
        return function(*args, **kwargs)

    return call


def refuse_misspelled(
    names: Iterable[str],
    ours: Iterable[str],
    takers: Iterable[Any],
    config: Any = None,
    fields: Callable[[], Iterable[str]] = tuple,
) -> None:
    """Reject keywords that nothing accepts but that are similar to an accepted keyword.

    All other keywords pass, because libraries hand them on to configs, models and components.

    Args:
        ours: loadstone's own keywords of the function that is called.
        takers: functions and classes of the library; they accept their parameters, and names that
            their code looks up in ``**kwargs``.
        config: a class or an object whose attributes may be keywords.
        fields: returns further accepted keywords; called only before a rejection.

    Raises:
        OptionError: ``plan.options``, which names the nearest keyword.
    """
    own_keywords = list(ours)
    known = set(own_keywords).union(*map(_accepted_keywords, takers))
    if config is not None:
        known.update(dir(config), _parameters(config) if isinstance(config, type) else ())
    for name in names:
        is_numbered = re.sub(r"_?\d+$", "", name) in known  # tokenizer_2
        near = [] if name in known or is_numbered else _nearest(name, own_keywords, known)
        if near and name not in fields():
            raise unknown_word_error(name, "argument", name, near)


def _nearest(name: str, own_keywords: list[str], known: Iterable[str]) -> list[str]:
    """Return the nearest keywords; loadstone's own match regardless of case."""
    if name.lower() in own_keywords:
        return [name.lower()]
    near = difflib.get_close_matches(name, known, 1, LIKENESS_MIN)
    return near or (own_keywords if _core.did_you_mean(name, own_keywords) else [])


def _accepted_keywords(taker: Any) -> set[str]:
    if isinstance(taker, type):
        return set().union(*map(_accepted_keywords, _constructors(taker)))
    function = inspect.unwrap(getattr(taker, "__func__", taker))
    code = getattr(function, "__code__", None)
    constants = () if code is None else code.co_consts
    words = (value for value in constants if isinstance(value, str) and value.isidentifier())
    return {*_parameters(function), *words}


def _constructors(cls: type) -> Iterator[Any]:
    """Yield the constructors of a class and of its bases, as long as they pass on ``**kwargs``."""
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        constructor = inspect.unwrap(vars(base)["__init__"])
        yield constructor
        kinds = {parameter.kind for parameter in _parameters(constructor).values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a class that is not written in Python
        return {}
