"""Choose the library's quantizer or loadstone's codecs for a quantized checkpoint.

The library makes its quantizer from ``quantization_config`` alone, before it knows the files.
Without a quantizer the model is an ordinary one, and codecs dequantize its weights in the load.
"""

from __future__ import annotations

from typing import Any

from transformers.quantizers import auto

from loadstone._adapters import quantized
from loadstone._base.warn import warn
from loadstone._files.catalog import Catalog

# Methods that codecs handle, because the library's quantizers round scales to the model's dtype,
# compute wrong values for experts or fail on experts (docs/opens-where.md), and need a package for
# plain arithmetic.
_DEQUANTIZED = ("compressed-tensors",)


class StrippedQuantizationConfig:
    """A ``quantization_config`` that loadstone removed from the model's config.

    ``method`` is its ``quant_method``, ``"unknown"``, or empty without a config. ``reason`` is the
    error with which the library failed to make its own quantizer.
    """

    def __init__(self, method: str = "", reason: Exception | None = None) -> None:
        self.method = method
        self.reason = reason

    def check(self, catalog: Catalog) -> None:
        """Warn if codecs replace a quantizer that failed, or if no tensor is quantized.

        Raise the library's own error if its quantizer failed and no codec decodes a tensor.
        """
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
                f"the config declares quantized weights ({self.method!r}), but no tensor has a "
                "known encoding: loadstone reads all of them as plain tensors"
            )


def choose_quantizer(
    original: Any,
    dequantize: bool | None,
    config: Any,
    quantization_config: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, StrippedQuantizationConfig]:
    """Return the result of ``get_hf_quantizer``, and the config that was removed.

    ``dequantize=False`` leaves the checkpoint to the library. With ``None``, codecs dequantize it
    only if the library has no quantizer, or one that fails or computes wrong values.
    """
    stored_config = _quantization_config_of(config)
    if stored_config is None or dequantize is False:
        return original(config, quantization_config, *args, **kwargs), StrippedQuantizationConfig()
    method = method_of(stored_config)
    is_alike = quantization_config is not None and method_of(quantization_config) == method
    asks_library = is_alike and not getattr(quantization_config, "dequantize", False)
    is_known = method in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    if dequantize or not is_known or (method in _DEQUANTIZED and not asks_library):
        strip(config)
        requested = None if is_alike else quantization_config
        stripped = StrippedQuantizationConfig(method or "unknown")
        return original(config, requested, *args, **kwargs), stripped
    try:
        return original(config, quantization_config, *args, **kwargs), StrippedQuantizationConfig()
    except Exception as reason:  # a missing package or device
        if quantization_config is not None:
            raise
        strip(config)
        return original(config, None, *args, **kwargs), StrippedQuantizationConfig(method, reason)


def strip(config: Any) -> None:
    """Remove every ``quantization_config``, which makes the model an ordinary one."""
    vars(config).pop("quantization_config", None)
    for name in getattr(config, "sub_configs", None) or ():
        sub_config = getattr(config, name, None)
        if sub_config is not None:
            strip(sub_config)


def _warn(message: str) -> None:
    warn(message, UserWarning, stacklevel=4)


def _quantization_config_of(config: Any) -> Any:
    text_config = config.get_text_config(decoder=True)
    stored_config = getattr(config, "quantization_config", None)
    return stored_config or getattr(text_config, "quantization_config", None) or None


def method_of(quantization_config: Any) -> str:
    is_dict = isinstance(quantization_config, dict)
    members = quantization_config if is_dict else vars(quantization_config)
    for member, bits in (("load_in_4bit", "4bit"), ("load_in_8bit", "8bit")):
        if members.get(member) or members.get(f"_{member}"):
            return f"bitsandbytes_{bits}"
    method = members.get("quant_method") or ""
    return str(getattr(method, "value", method))
