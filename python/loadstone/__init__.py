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

# Public names by the module that defines them.
_DEFINED_IN = {
    "_adapters.check": ("EngineCheck", "Problem", "check"),
    "_adapters.patch": ("patch",),
    "_base.errors": (
        *("AuditError", "DeniedError", "Error", "FileError", "FilledWarning", "FormatError"),
        *("LoadError", "MissingFileError", "MissingShardError", "MissingTensorError"),
        *("NoMemoryError", "OptionError", "PlanError", "TensorIndexError"),
    ),
    "_base.version": ("BuildInfo", "__version__", "build_info"),
    "_convert.convert": ("convert",),
    "_convert.dequantize": ("dequantize",),
    "_convert.merge": ("merge",),
    "_convert.output": ("ConvertReport",),
    "_convert.quantize": ("Quantized", "quantize"),
    "_convert.recipes": ("save_recipes",),
    "_convert.verify": ("VerifyReport", "verify"),
    "_core": ("Finding",),
    "_execute.audit": ("Audit", "audit"),
    "_execute.load": ("load",),
    "_execute.plan": ("Plan", "plan"),
    "_execute.report": ("Report",),
    "_files.catalog": ("Catalog", "EncodingTotal", "TensorInfo", "inspect"),
    "_files.open": ("LazyTensor", "OpenCheckpoint", "load_file", "open"),
    "_files.receipt": ("Receipt",),
    "_files.remote": ("configure_remote",),
    "_files.safe_open": ("safe_open",),
    "_model.targets": ("PlannedTarget",),
    "_plan.provenance": ("Provenance", "Source"),
    "_plan.quantization": ("Quantization",),
    "_plan.recipes": ("LibraryRecipes",),
    "_skeleton.skeleton": ("save_skeleton", "skeleton"),
}
_MODULES = {name: module for module, names in _DEFINED_IN.items() for name in names}

# Without `open`, so that `from loadstone import *` shadows no built-in function and no library.
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
    with _paused():  # importing torch makes many objects, which a collection would visit
        value = getattr(importlib.import_module(f"loadstone.{_MODULES[name]}"), name)
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return [*_MODULES, *_ADAPTERS]
