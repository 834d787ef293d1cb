"""loadstone: load a checkpoint into a model that has no memory yet, and prove it.

>>> import loadstone
>>> with loadstone.skeleton():                      # parameters on meta, buffers real
...     model = MyModel(config)
>>> report = loadstone.load(model, "checkpoint/")   # plan, execute, audit

Importing this package imports no framework: Python loads each public name, and each module named
after a library (``loadstone.torch``, ``loadstone.transformers`` ...), on first use. Type checkers
read ``__init__.pyi``.
"""

import importlib

from loadstone import _adapters as _adapters  # registers them
from loadstone import _core as _core
from loadstone._base.adapters import ADAPTERS as _ADAPTERS
from loadstone._base.collector import paused as _paused

# Each module defines these public names.
_DEFINED_IN = {
    "_adapters.patch": ("patch",),
    "_base.errors": (
        *("AuditError", "Error", "FilledWarning", "FormatError", "LoadError", "PlanError"),
    ),
    "_base.version": ("BuildInfo", "__version__", "build_info"),
    "_convert.convert": ("convert",),
    "_convert.dequantize": ("dequantize",),
    "_convert.merge": ("merge",),
    "_convert.output": ("ConvertReport",),
    "_convert.quantize": ("Quantized", "quantize"),
    "_convert.recipes": ("save_recipes",),
    "_core": ("Finding",),
    "_execute.audit": ("Audit", "audit"),
    "_execute.load": ("load",),
    "_execute.plan": ("Plan", "plan"),
    "_execute.report": ("Report",),
    "_files.catalog": ("Catalog", "TensorInfo", "inspect"),
    "_files.open": ("LazyTensor", "OpenCheckpoint", "load_file", "open"),
    "_files.receipt": ("Receipt",),
    "_files.remote": ("configure_remote",),
    "_files.safe_open": ("safe_open",),
    "_model.targets": ("PlannedTarget",),
    "_plan.provenance": ("Provenance", "Source"),
    "_plan.quantization": ("Quantization",),
    "_skeleton.skeleton": ("save_skeleton", "skeleton"),
}
_MODULES = {name: module for module, names in _DEFINED_IN.items() for name in names}

# `from loadstone import *` shadows no library and no built-in function.
__all__ = sorted(_MODULES.keys() - {"open"})


def __getattr__(name: str) -> object:
    if name in _ADAPTERS:
        try:
            return importlib.import_module(f"loadstone.{name}")
        except ModuleNotFoundError as error:
            message = f"loadstone.{name} needs the package {error.name!r}, which is not installed"
            raise AttributeError(message) from error
    if name not in _MODULES:
        raise AttributeError(f"module 'loadstone' has no attribute {name!r}")
    with _paused():  # torch has many objects, which a collection would look at
        value = getattr(importlib.import_module(f"loadstone.{_MODULES[name]}"), name)
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return [*_MODULES, *_ADAPTERS]
