"""A Llama config small enough to quantize."""

from __future__ import annotations

LLAMA = {"general.architecture": "none"}
