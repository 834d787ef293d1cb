"""The options of ``--model-loader-extra-config``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from loadstone import _core
from loadstone._base.errors import make, unknown
from loadstone._base.machine import byte_count
from loadstone._convert.output import STYLES

_FIELD = "model_loader_extra_config"


@dataclasses.dataclass(frozen=True)
class Changes:
    """A conversion on the way to the model: the one that would be made offline.

    Attributes:
        quantize: an encoding for the weights of decoder layers, or several by patterns of names,
            as of :func:`loadstone.convert`.
        style: of names and configs: ``"modelopt"`` or ``"compressed-tensors"``, which servers have
            layers for that scale what they compute with by themselves.
        include, exclude: patterns of names to quantize too, or not at all.
        lora: adapters that are merged, each with a factor.
    """

    quantize: str | Mapping[str, str] = ""
    style: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    lora: str | Mapping[str, float] = ()  # type: ignore[assignment]  # none

    def __bool__(self) -> bool:
        return bool(self.quantize or self.lora)

    @classmethod
    def of_overrides(cls, overrides: Mapping[str, Any]) -> Changes:
        """Those that ``--hf-overrides`` names: ``loadstone_quantize``, ``loadstone_style`` ...

        Raises:
            PlanError: ``plan.options``, which names what is unknown or no value of its option.
        """
        given = {
            name.removeprefix(_PREFIX): value
            for name, value in overrides.items()
            if name.startswith(_PREFIX)
        }
        values = _checked(given, _OF_OVERRIDES)
        _require(values, "quantize", _HOW_TO_QUANTIZE)
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class Options:
    """How weights are read.

    Attributes:
        threads: readers; 0: few at first, and more while that makes it faster.
        staging_bytes_max: for what is on its way from the files to the model, at most.
        dequantize: quantized weights reach the server as numbers of the model's dtype.
        weights: where they are, if not beside the model's config: a file or a folder.
        missing: ``"error"`` or ``"warn"``: what parameters without values are.
        receipt: a folder for the receipt of each rank.
        digest: of receipts: ``"xxh3-128"``, or ``"sha256-tree"``, which is proof against tampering.
        allow_links: follow symbolic links that leave the folder.
        deferred: the code for the model is given tensors that are not read yet; else each is
            read whole before, for code that changes them where they stand.
        changes: by ``quantize``, ``style``, ``include``, ``exclude`` and ``lora``.
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
    changes: Changes = Changes()

    @classmethod
    def of(cls, given: Any) -> Options:
        """The options that the server was given.

        Raises:
            PlanError: ``plan.options``, which names what is unknown, no value of its option, or
                without effect.
        """
        if not isinstance(given, Mapping):
            raise _refused("options are an object", type(given).__name__, "{...}")
        values = _checked(given, _VALUES)
        _require(values, "quantize", _HOW_TO_QUANTIZE)
        _require(values, "receipt", ("digest",))
        if "staging_bytes_max" in values:
            values["staging_bytes_max"] = byte_count(
                values["staging_bytes_max"], "staging_bytes_max"
            )
        changes = {name: values.pop(name) for name in _OF_CHANGES if name in values}
        if changes and values.get("dequantize"):
            message = "dequantize goes with no other change"
            raise _refused(message, ", ".join(changes), "one of them")
        if changes and values.get("receipt"):
            message = "a receipt is of what stands in files: convert the folder with --receipt"
            raise _refused(message, ", ".join(changes), "one of them")
        return cls(**values, changes=Changes(**changes))


def _checked(
    given: Mapping[str, Any], known: Mapping[str, tuple[str, Callable[[Any], bool]]]
) -> dict[str, Any]:
    values = {}
    for name, value in given.items():
        if name not in known:
            raise unknown(_FIELD, "option", name, known)
        wanted, is_valid = known[name]
        if value in ("", [], {}) or not is_valid(value):
            raise _refused(f"no value of {name}", repr(value), wanted)
        is_list = name in ("include", "exclude")
        values[name] = tuple([value] if isinstance(value, str) else value) if is_list else value
    return values


def _require(values: Mapping[str, Any], other: str, names: Iterable[str]) -> None:
    """Raises if options have no effect, as the one that they belong to is not given."""
    idle = [name for name in names if name in values]
    if idle and other not in values:
        raise _refused(f"no effect without {other}", ", ".join(idle), f"{other} too")


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and Path(value).exists()


def _are_patterns(value: Any) -> bool:
    return isinstance(value, str | list) and all(isinstance(each, str) for each in value)


def _is_text_or_map_to(value: Any, *types: type) -> bool:
    is_map = isinstance(value, dict) and all(type(each) in types for each in value.values())
    return is_map or isinstance(value, str)


_DIGESTS = ("xxh3-128", "sha256-tree")
_PREFIX = "loadstone_"
_HOW_TO_QUANTIZE = ("style", "include", "exclude")
_OF_OVERRIDES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "quantize": (
        "an encoding, or {pattern: encoding}",
        lambda value: _is_text_or_map_to(value, str),
    ),
    "style": (" or ".join(STYLES), lambda value: value in STYLES),
    "include": ("patterns", _are_patterns),
    "exclude": ("patterns", _are_patterns),
}
_OF_CHANGES = _OF_OVERRIDES | {
    "lora": ("a folder, or {folder: factor}", lambda value: _is_text_or_map_to(value, int, float))
}
_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "threads": ("a number above 0", lambda value: type(value) is int and value > 0),
    "staging_bytes_max": (
        "a size above 0",
        lambda value: byte_count(value, "staging_bytes_max") > 0,
    ),
    "dequantize": ("true or false", _is_flag),
    "weights": ("a file or a folder that is there", _is_path),
    "missing": ("'error' or 'warn'", lambda value: value in ("error", "warn")),
    "receipt": ("a folder", lambda value: isinstance(value, str)),
    "digest": ("'xxh3-128' or 'sha256-tree'", lambda value: value in _DIGESTS),
    "allow_links": ("true or false", _is_flag),
    "deferred": ("true or false", _is_flag),
} | _OF_CHANGES


def _refused(message: str, found: str, expected: str) -> Exception:
    return make("plan.options", message, field=_FIELD, found=found, expected=expected)
