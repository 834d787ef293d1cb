"""Configs that record what llama.cpp's converter reads from them: see `gguf_rules.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Record:
    """The fields of a config that the converter reads, and the comparisons with their numbers."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.comparisons: set[tuple[str, str, Any, bool]] = set()


class _Compared:
    path: str
    record: Record

    def _compare(self, name: str, other: Any, outcome: Any) -> Any:
        if not isinstance(other, _Compared) and isinstance(other, int | float):
            self.record.comparisons.add((self.path, name, other, outcome))
        return outcome


def _number_class(base: Any) -> Any:
    class Number(_Compared, base):  # type: ignore[misc]
        """A number of a config, which records comparisons with literals."""

        __hash__ = base.__hash__

        def __eq__(self, other: object) -> Any:
            return self._compare("==", other, base.__eq__(self, other))

        def __ne__(self, other: object) -> Any:
            return not self == other

        def __lt__(self, other: Any) -> Any:
            return self._compare("<", other, base.__lt__(self, other))

        def __gt__(self, other: Any) -> Any:
            return self._compare(">", other, base.__gt__(self, other))

        def __le__(self, other: Any) -> Any:
            return self._compare("<=", other, base.__le__(self, other))

        def __ge__(self, other: Any) -> Any:
            return self._compare(">=", other, base.__ge__(self, other))

        def __bool__(self) -> bool:
            return self.__eq__(0) is False

    return Number


_NUMBERS = {int: _number_class(int), float: _number_class(float)}


class Text(str):
    """A string of a config, or a model card, which records the parts that it is searched for."""

    path: str
    record: Record

    @classmethod
    def of(cls, value: str, path: str, record: Record) -> Text:
        text = cls(value)
        text.path, text.record = path, record
        return text

    def __str__(self) -> str:
        return self

    def lower(self) -> str:
        return Text.of(super().lower(), self.path, self.record)

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        outcome = super().__eq__(other)
        if type(other) is str and self.path == "digest":
            self.record.comparisons.add((self.path, "==", other, outcome))
        return outcome

    def __contains__(self, part: str) -> bool:  # type: ignore[override]
        outcome = part.lower() in super().lower()
        self.record.comparisons.add((self.path, "in", part.lower(), outcome))
        return outcome


class Config(dict[str, Any]):
    """A config that records which of its fields are read, and whether it is copied."""

    def __init__(self, fields: dict[str, Any], record: Record, prefix: str = "") -> None:
        super().__init__(fields)
        self.record = record
        self.prefix = prefix
        self.written: set[str] = set()

    def _note(self, key: str) -> str:
        path = f"{self.prefix}{key}"
        if key not in self.written:
            self.record.read.add(path)
        return path

    def _value(self, key: str, value: Any) -> Any:
        path = self._note(key)
        if type(value) is dict:
            value = Config(value, self.record, f"{path}.")
            super().__setitem__(key, value)
        elif type(value) in _NUMBERS and key not in self.written:
            value = _NUMBERS[type(value)](value)
            value.path, value.record = path, self.record
        elif type(value) is str and key not in self.written:
            value = Text.of(value, path, self.record)
        return value

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return self._value(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return self._value(key, super().__getitem__(key)) if super().__contains__(key) else default

    def __contains__(self, key: object) -> bool:
        self._note(str(key))
        return super().__contains__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.written.add(key)
        super().__setitem__(key, value)

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError("the converter reads all fields of the config")

    keys = items = values = __iter__  # type: ignore[assignment]
