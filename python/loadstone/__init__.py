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

from loadstone._adapters.patch import patch
from loadstone._base.errors import (
    AuditError,
    Error,
    FilledWarning,
    FormatError,
    LoadError,
    PlanError,
)
from loadstone._base.version import BuildInfo, __version__, build_info
from loadstone._convert.convert import convert, save_recipes
from loadstone._convert.merge import merge
from loadstone._core import Finding
from loadstone._execute.audit import Audit, audit
from loadstone._execute.load import load
from loadstone._execute.plan import Plan, plan
from loadstone._execute.report import Report
from loadstone._files.catalog import Catalog, TensorInfo, inspect
from loadstone._files.open import LazyTensor, OpenCheckpoint, load_file
from loadstone._files.open import open as open
from loadstone._files.output import ConvertReport
from loadstone._files.receipt import Receipt
from loadstone._files.remote import configure_remote
from loadstone._files.safe_open import safe_open
from loadstone._model.targets import PlannedTarget
from loadstone._plan.provenance import Provenance, Source
from loadstone._plan.quantization import Quantization
from loadstone._skeleton.skeleton import save_skeleton, skeleton

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
    from loadstone._convert.dequantize import dequantize
    from loadstone._convert.quantize import Quantized, quantize

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
        return importlib.import_module("loadstone._convert.dequantize").dequantize
    if name in ("Quantized", "quantize"):
        return getattr(importlib.import_module("loadstone._convert.quantize"), name)
    raise AttributeError(f"module 'loadstone' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_NOT_STARRED]
