"""The options of ``--model-loader-extra-config``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from loadstone import _core
from loadstone._base.errors import new_error, unknown_word_error
from loadstone._base.machine import byte_count
from loadstone._convert.output import STYLES

_FIELD = "model_loader_extra_config"


@dataclasses.dataclass(frozen=True)
class ConversionOptions:
    """The options of a conversion in memory, whose result is equal to an offline conversion's.

    Attributes:
        quantize: an encoding for the decoder layers' weights, or encodings by name pattern, as in
            :func:`loadstone.convert`.
        style: ``"modelopt"`` or ``"compressed-tensors"``, which determines names and configs.
            Servers have layers with dynamic activation scales for both styles.
        include, exclude: patterns of additional and of excluded names.
        lora: adapters to merge, each with a factor.
    """

    quantize: str | Mapping[str, str] = ""
    style: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    lora: str | Mapping[str, float] = ()  # type: ignore[assignment]  # none

    def __bool__(self) -> bool:
        return bool(self.quantize or self.lora)

    @classmethod
    def from_overrides(cls, overrides: Mapping[str, Any]) -> ConversionOptions:
        """Read ``--hf-overrides`` (``loadstone_quantize``, ...); raises ``plan.options``."""
        options = {
            name.removeprefix(_PREFIX): value
            for name, value in overrides.items()
            if name.startswith(_PREFIX)
        }
        values = _check(options, _OVERRIDE_OPTIONS)
        _require(values, "quantize", _HOW_TO_QUANTIZE)
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options for reading weights.

    Attributes:
        threads: number of readers; 0 starts with few and adds more while that is faster.
        staging_bytes_max: limit on the bytes between the files and the model.
        dequantize: give the server values of the model's dtype instead of quantized weights.
        weights: a file or a folder; by default the folder of the model's config.
        missing: ``"error"`` or ``"warn"``, for parameters without values.
        receipt: a folder for the receipt of each rank.
        digest: digest of receipts: ``"xxh3-128"``, or the tamper-proof ``"sha256-tree"``.
        allow_links: follow symbolic links that leave the folder.
        deferred: give model code unread tensors. Otherwise each tensor is read first, for code that
            changes tensors in place.
        changes: the conversion, from ``quantize``, ``style``, ``include``, ``exclude`` and
            ``lora``.
    """

    threads: int = 0
    staging_bytes_max: int = _core.STAGING_BYTES_MAX
    dequantize: bool = False
    weights: str = ""
    missing: str = "error"
    receipt: str = ""
    digest: str = "xxh3-128"
    allow_links: bool = False
    deferred: bool = True
    changes: ConversionOptions = ConversionOptions()

    @classmethod
    def from_mapping(cls, options: Any) -> Options:
        """Parse the server's options; raises ``plan.options``, also for options without effect."""
        if not isinstance(options, Mapping):
            raise _refused("the options must be a JSON object", type(options).__name__, "{...}")
        values = _check(options, _VALUES)
        _require(values, "quantize", _HOW_TO_QUANTIZE)
        _require(values, "receipt", ("digest",))
        if "staging_bytes_max" in values:
            values["staging_bytes_max"] = byte_count(
                values["staging_bytes_max"], "staging_bytes_max"
            )
        changes = {name: values.pop(name) for name in _CHANGE_OPTIONS if name in values}
        if changes and values.get("dequantize"):
            message = "dequantize cannot be combined with other changes"
            raise _refused(message, ", ".join(changes), "one of them")
        if changes and values.get("receipt"):
            message = (
                "loadstone cannot write a receipt of weights that it converts while serving: "
                "convert the folder first, with --receipt"
            )
            raise _refused(message, ", ".join(changes), "one of them")
        return cls(**values, changes=ConversionOptions(**changes))


def _check(
    options: Mapping[str, Any], known: Mapping[str, tuple[str, Callable[[Any], bool]]]
) -> dict[str, Any]:
    values = {}
    for name, value in options.items():
        if name not in known:
            raise unknown_word_error(_FIELD, "option", name, known)
        wanted, is_valid = known[name]
        if value in ("", [], {}) or not is_valid(value):
            raise _refused(f"invalid value of {name}", repr(value), wanted)
        is_list = name in ("include", "exclude")
        values[name] = tuple([value] if isinstance(value, str) else value) if is_list else value
    return values


def _require(values: Mapping[str, Any], other: str, names: Iterable[str]) -> None:
    """Raise if options have no effect because the option that they modify is missing."""
    idle = [name for name in names if name in values]
    if idle and other not in values:
        raise _refused(f"requires {other}", ", ".join(idle), f"{other} too")


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and Path(value).exists()


def _are_patterns(value: Any) -> bool:
    return isinstance(value, str | list) and all(isinstance(item, str) for item in value)


def _is_text_or_map_to(value: Any, *types: type) -> bool:
    is_map = isinstance(value, dict) and all(type(item) in types for item in value.values())
    return is_map or isinstance(value, str)


_DIGESTS = ("xxh3-128", "sha256-tree")
_PREFIX = "loadstone_"
_HOW_TO_QUANTIZE = ("style", "include", "exclude")
_OVERRIDE_OPTIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "quantize": (
        "an encoding, or {pattern: encoding}",
        lambda value: _is_text_or_map_to(value, str),
    ),
    "style": (" or ".join(STYLES), lambda value: value in STYLES),
    "include": ("patterns", _are_patterns),
    "exclude": ("patterns", _are_patterns),
}
_CHANGE_OPTIONS = _OVERRIDE_OPTIONS | {
    "lora": ("a folder, or {folder: factor}", lambda value: _is_text_or_map_to(value, int, float))
}
_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "threads": ("a number greater than 0", lambda value: type(value) is int and value > 0),
    "staging_bytes_max": (
        "a size greater than 0",
        lambda value: byte_count(value, "staging_bytes_max") > 0,
    ),
    "dequantize": ("true or false", _is_flag),
    "weights": ("an existing file or folder", _is_path),
    "missing": ("'error' or 'warn'", lambda value: value in ("error", "warn")),
    "receipt": ("a folder", lambda value: isinstance(value, str)),
    "digest": ("'xxh3-128' or 'sha256-tree'", lambda value: value in _DIGESTS),
    "allow_links": ("true or false", _is_flag),
    "deferred": ("true or false", _is_flag),
} | _CHANGE_OPTIONS


def _refused(message: str, found: str, expected: str) -> Exception:
    return new_error("plan.options", message, field=_FIELD, found=found, expected=expected)
