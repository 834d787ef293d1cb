"""loadstone: put a checkpoint into a model that holds no memory yet, and prove it.

>>> import loadstone
>>> with loadstone.skeleton():                      # parameters on meta, buffers real
...     model = MyModel(config)
>>> report = loadstone.load(model, "checkpoint/")   # plan, execute, audit

Importing this package imports no framework. What needs torch imports it when it is called; the
modules named after the libraries they serve (``loadstone.torch``, ``loadstone.transformers`` ...)
are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from loadstone._audit import Audit, audit
from loadstone._catalog import Catalog, TensorInfo, inspect
from loadstone._conversion import convert, save_recipes
from loadstone._core import Finding
from loadstone._errors import (
    AuditError,
    Error,
    FilledWarning,
    FormatError,
    LoadError,
    PlanError,
)
from loadstone._load import load
from loadstone._merge import merge
from loadstone._open import LazyTensor, OpenCheckpoint, load_file
from loadstone._open import open as open
from loadstone._output import ConvertReport
from loadstone._patch import patch
from loadstone._plan import Plan
from loadstone._planning import plan
from loadstone._quantization import Quantization
from loadstone._receipt import Receipt
from loadstone._remote import configure_remote
from loadstone._report import Provenance, Report, Source
from loadstone._safe_open import safe_open
from loadstone._skeleton import save_skeleton, skeleton
from loadstone._targets import PlannedTarget
from loadstone._version import BuildInfo, __version__, build_info

if TYPE_CHECKING:
    from loadstone import accelerate as accelerate
    from loadstone import bitsandbytes as bitsandbytes
    from loadstone import diffusers as diffusers
    from loadstone import llama_cpp as llama_cpp
    from loadstone import modelopt as modelopt
    from loadstone import peft as peft
    from loadstone import sglang as sglang
    from loadstone import torch as torch
    from loadstone import transformers as transformers
    from loadstone import vllm as vllm
    from loadstone._convert import dequantize
    from loadstone._quantize import Quantized, quantize

_ADAPTERS = (
    "torch",
    "transformers",
    "diffusers",
    "accelerate",
    "bitsandbytes",
    "llama_cpp",
    "modelopt",
    "peft",
    "sglang",
    "vllm",
)

# Not in __all__: `from loadstone import *` shadows no library and nothing of Python's own.
_NOT_STARRED = (*_ADAPTERS, "open")

__all__ = [
    "Audit",
    "AuditError",
    "BuildInfo",
    "Catalog",
    "ConvertReport",
    "Error",
    "FilledWarning",
    "Finding",
    "FormatError",
    "LazyTensor",
    "LoadError",
    "OpenCheckpoint",
    "Plan",
    "PlanError",
    "PlannedTarget",
    "Provenance",
    "Quantization",
    "Quantized",
    "Receipt",
    "Report",
    "Source",
    "TensorInfo",
    "__version__",
    "audit",
    "build_info",
    "configure_remote",
    "convert",
    "dequantize",
    "inspect",
    "load",
    "load_file",
    "merge",
    "patch",
    "plan",
    "quantize",
    "safe_open",
    "save_recipes",
    "save_skeleton",
    "skeleton",
]


def __getattr__(name: str) -> Any:
    if name in _ADAPTERS:
        return importlib.import_module(f"loadstone.{name}")
    if name == "dequantize":
        return importlib.import_module("loadstone._convert").dequantize
    if name in ("Quantized", "quantize"):
        return getattr(importlib.import_module("loadstone._quantize"), name)
    raise AttributeError(f"module 'loadstone' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_NOT_STARRED]
