"""Chooses the library's quantizer or loadstone's codecs for a quantized checkpoint.

The library makes its quantizer from ``quantization_config`` alone, before it knows the files.
Without a quantizer the model is an ordinary one, and codecs dequantize its weights in the load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers.quantizers import auto

from loadstone._adapters.transformers import quantized
from loadstone._base.terminal import warn
from loadstone._files.catalog import Catalog

# The library's quantizers for these round scales to the model's dtype, compute wrong values for
# experts or fail on them (docs/opens-where.md), and need a package for plain arithmetic.
_DEQUANTIZED = ("compressed-tensors",)


class StrippedQuantizationConfig:
    """A ``quantization_config`` that loadstone took off the model's config.

    ``method`` is its ``quant_method``, ``"unknown"``, or empty without a config. ``reason`` is why
    the library cannot make its own quantizer.
    """

    def __init__(self, method: str = "", reason: Exception | None = None) -> None:
        self.method = method
        self.reason = reason

    def check(self, catalog: Catalog) -> None:
        """Warn of surprises; raise the library's own error if no codec decodes anything either."""
        if not self.method:
            return
        is_decodable = quantized.is_decodable(catalog)
        if self.reason is not None:
            if not is_decodable:
                raise self.reason
            text = str(self.reason).strip().partition("\n")[0]
            _warn(
                f"the library's quantizer for {self.method!r} cannot work here ({text}): the "
                "weights are dequantized instead"
            )
        elif not is_decodable and not catalog._core.quantized():
            _warn(
                f"the config says that the checkpoint is quantized ({self.method!r}), and no "
                "tensor is in an encoding that is known: all are read as they are"
            )


def chosen(
    original: Any, wish: bool | None, config: Any, quantization_config: Any, *args: Any, **rest: Any
) -> tuple[Any, StrippedQuantizationConfig]:
    """Return the result of ``get_hf_quantizer``, and the config that was taken off.

    ``wish`` is to dequantize, or to leave it to the library; ``None`` chooses correct values.
    """
    stored = _section(config)
    if stored is None or wish is False:
        return original(config, quantization_config, *args, **rest), StrippedQuantizationConfig()
    method = method_of(stored)
    is_alike = quantization_config is not None and method_of(quantization_config) == method
    asks_library = is_alike and not getattr(quantization_config, "dequantize", False)
    is_known = method in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    if wish or not is_known or (method in _DEQUANTIZED and not asks_library):
        take_off(config)
        given = None if is_alike else quantization_config
        stripped = StrippedQuantizationConfig(method or "unknown")
        return original(config, given, *args, **rest), stripped
    try:
        return original(config, quantization_config, *args, **rest), StrippedQuantizationConfig()
    except Exception as reason:  # a missing package or device
        if quantization_config is not None:
            raise
        take_off(config)
        return original(config, None, *args, **rest), StrippedQuantizationConfig(method, reason)


def take_off(config: Any) -> None:
    """Remove every ``quantization_config``, which makes the model an ordinary one."""
    for each in _parts(config):
        vars(each).pop("quantization_config", None)


def _warn(message: str) -> None:
    warn(message, UserWarning, stacklevel=4)


def _section(config: Any) -> Any:
    of_text = config.get_text_config(decoder=True)
    found = getattr(config, "quantization_config", None)
    return found or getattr(of_text, "quantization_config", None) or None


def method_of(section: Any) -> str:
    members = section if isinstance(section, dict) else vars(section)
    for member, bits in (("load_in_4bit", "4bit"), ("load_in_8bit", "8bit")):
        if members.get(member) or members.get(f"_{member}"):
            return f"bitsandbytes_{bits}"
    method = members.get("quant_method") or ""
    return str(getattr(method, "value", method))


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts(part)
