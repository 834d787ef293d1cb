"""The options of ``--model-loader-extra-config``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from loadstone._errors import make
from loadstone._machine import byte_count

_FIELD = "model_loader_extra_config"


@dataclasses.dataclass(frozen=True)
class Options:
    """How weights are read.

    Attributes:
        threads: readers; 0: one per core, at most four.
        staging_bytes_max: of tensors that are read and not taken yet, at most, but for one tensor.
        dequantize: quantized weights reach vLLM as numbers of the model's dtype.
        missing: ``"error"`` or ``"warn"``: what parameters without values are.
    """

    threads: int = 0
    staging_bytes_max: int = 64 << 20
    dequantize: bool = False
    missing: str = "error"

    @classmethod
    def of(cls, given: Any) -> Options:
        """The options that vLLM was given.

        Raises:
            PlanError: ``plan.options``, which names what is unknown or no value of its option.
        """
        if not isinstance(given, Mapping):
            raise _refused("options are an object", type(given).__name__, "{...}")
        for name in given:
            if name not in _VALUES:
                raise _refused("no such option", repr(name), ", ".join(_VALUES))
        values = dict(given)
        if "staging_bytes_max" in values:
            values["staging_bytes_max"] = byte_count(values["staging_bytes_max"])
        for name, value in values.items():
            wanted, is_valid = _VALUES[name]
            if not is_valid(value):
                raise _refused(f"no value of {name}", repr(value), wanted)
        return cls(**values)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "threads": ("a number above 0", _is_count),
    "staging_bytes_max": ("a size above 0", _is_count),
    "dequantize": ("true or false", lambda value: isinstance(value, bool)),
    "missing": ("'error' or 'warn'", lambda value: value in ("error", "warn")),
}


def _refused(message: str, found: str, expected: str) -> Exception:
    return make("plan.options", message, field=_FIELD, found=found, expected=expected)
