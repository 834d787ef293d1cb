"""Predict whether transformers opens a folder: its own ``from_pretrained``, on meta.

The library resolves files, builds the model, applies its quantizer and its conversions, and reports
missing and unexpected names. Only the reads of weights are replaced, by tensors on meta. Values of
quantized weights follow the rules in ``check_rules.json``, which were measured.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadstone._adapters.check import EngineCheck, Problem, conclude, rules
from loadstone._adapters.patch import Hook, Hooks, hooked, set_variable, suspended, within
from loadstone._adapters.sites.transformers import SITES
from loadstone._base.dtypes import torch_dtype
from loadstone._base.errors import FormatError
from loadstone._base.torch_modes import wrap_always
from loadstone._files.catalog import Catalog, inspect

_LIBRARY = "transformers: from_pretrained on meta"
_TABLE = "check_rules.json, measured in docs/opens-where.md"
_DEQUANTIZED = "with CompressedTensorsConfig(dequantize=True)"
_CONVERT = "loadstone convert {} OUT --dequantize"
_METHODS = ("compressed-tensors", "bitsandbytes", "modelopt")
_STATE = ".quant_state.bitsandbytes__"  # JSON that bitsandbytes stores as a tensor of bytes
_FLOATS = ("F64", "F32", "BF16", "F16")


@dataclass
class Answer:
    """The library's own report.

    Attributes:
        model: the model on meta; ``None`` if the library failed before the load.
        info: the library's ``LoadStateDictInfo``.
        error: the exception that the library raised.
    """

    model: Any = None
    info: Any = None
    error: Exception | None = None


_ANSWER: ContextVar[Any] = ContextVar("loadstone_transformers_check", default=None)


def check(path: Path) -> EngineCheck:
    """See :func:`loadstone.check`."""
    if importlib.util.find_spec("transformers") is None:
        return _unknown("", "transformers is not installed", "install transformers")
    version = SITES.version()
    if not SITES.is_since("5.1") or SITES.lacking():
        reason = f"loadstone cannot ask transformers {version}"
        return _unknown(version, reason, f"install a tested release: {SITES.tested}")
    if not path.exists():
        inspect(path)  # raises the error for a missing path, or resolves a hub id
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        reason = "loadstone asks transformers only about folders with safetensors files"
        return _unknown(version, reason, "convert the checkpoint to safetensors")
    problems = list(_problems(path))
    notes = ["tokenizer files were not checked"]
    if _method_of(path) == "compressed-tensors":
        notes.append(
            f"the verdict is for an opening {_DEQUANTIZED}; without it, transformers rounds scales "
            "to the model's dtype"
        )
    return conclude("transformers", version, _LIBRARY, problems, notes)


def _unknown(version: str, reason: str, action: str) -> EngineCheck:
    return conclude("transformers", version, "loadstone", [_cannot_tell(reason, action)])


def _cannot_tell(reason: str, action: str, names: tuple[str, ...] = ()) -> Problem:
    return Problem("unknown", reason, action, _TABLE, names)


def _problems(path: Path) -> Iterator[Problem]:
    answers = {"": ask(path)}
    if _method_of(path) == "compressed-tensors":
        answers[_DEQUANTIZED] = ask(path, dequantize=True)
    for how, answer in answers.items():
        yield from _reported(answer, how, path)
    try:
        catalog = inspect(path, allow_links=True)
    except FormatError as error:
        reason = f"loadstone rejects the files: {error}"
        yield _cannot_tell(reason, f"run `loadstone explain {error.code}`")
        return
    if all(answer.error is None for answer in answers.values()):
        yield from _wrong_values(path, catalog, list(answers.values())[-1])


def ask(path: Path, *, dequantize: bool = False) -> Answer:
    """Run the library's ``from_pretrained`` on meta, and return its report."""
    import transformers

    answer = Answer()
    given: dict[str, Any] = {"dtype": "auto", "device_map": {"": "meta"}, "local_files_only": True}
    if dequantize:
        given["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    with (
        _silenced(),
        suspended("transformers"),
        hooked(_hooks()),
        set_variable(_ANSWER, answer),
    ):
        try:
            config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
            names = getattr(config, "architectures", None) or []
            cls = getattr(transformers, names[0], None) if len(names) == 1 else None
            if cls is None:
                message = f"config.json does not name one class of transformers: {names}"
                raise NotImplementedError(message)
            cls.from_pretrained(path, **given)
        except Exception as error:  # libraries raise any class
            answer.error = error
    return answer


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Suppress the library's log, warnings and progress bars, for all threads of the process."""
    from transformers.utils import logging as library

    logging: Any = library  # has functions without annotations
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL + 1)
    logging.disable_progress_bar()
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


def _hooks() -> Hooks:
    from transformers import core_model_loading, modeling_utils

    functions: list[tuple[Any, str, Any]] = [
        (core_model_loading, "spawn_materialize", _spawn_materialize),
        (modeling_utils, "log_state_dict_report", _log_state_dict_report),
    ]
    return Hooks(
        Hook(owner, name, wrap_always(within(_ANSWER, replacement)))
        for owner, name, replacement in functions
    )


def _spawn_materialize(
    answer: Answer,
    original: Any,
    pool: Any,
    tensor: Any,
    device: Any = None,
    dtype: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return a tensor on meta instead of a read, except for bitsandbytes' small states."""
    import torch

    shape, stored = tensor.get_shape(), torch_dtype(tensor.get_dtype())
    if stored is torch.uint8 and len(shape) == 1 and shape[0] < 4096:
        return lambda: tensor[...]
    return lambda: torch.empty(shape, dtype=dtype or stored, device="meta")


def _log_state_dict_report(
    answer: Answer, original: Any, model: Any, *args: Any, loading_info: Any, **kwargs: Any
) -> Any:
    answer.model, answer.info = model, loading_info
    return original(model, *args, loading_info=loading_info, **kwargs)


def _method_of(path: Path) -> str:
    """Return the quantization method that config.json declares; empty if it declares none."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return str((config.get("quantization_config") or {}).get("quant_method", ""))
    except (OSError, ValueError, AttributeError):  # the library reports a malformed config
        return ""


def _reported(answer: Answer, how: str, path: Path) -> Iterator[Problem]:
    """Yield the problems that the library reported."""
    suffix = f" {how}" if how else ""
    info = answer.info
    failed = dict(info.conversion_errors) if info is not None else {}
    mismatched = sorted(str(each[0]) for each in info.mismatched_keys) if info is not None else []
    if failed:
        text = " ".join(map(str, failed.values()))
        on_meta = "meta" in text.lower().replace("metadata", "")
        reason = f"transformers cannot convert these tensors{suffix}"
        yield _library("unknown" if on_meta else "does not open", reason, tuple(failed), path)
    if mismatched:
        reason = f"the shapes of these tensors differ from the model's{suffix}"
        yield _library("does not open", reason, tuple(mismatched), path)
    if answer.error is not None and not failed and not mismatched:
        error = answer.error
        message = str(error).strip().partition("\n")[0]
        reason = f"transformers raises {type(error).__name__}{suffix}: {message}"
        is_machine = isinstance(error, ImportError | NotImplementedError) or "meta" in message
        method = _method_of(path)
        is_known = not is_machine and (not method or method in _METHODS)
        yield _library("does not open" if is_known else "unknown", reason, (), path)
    if info is not None and info.missing_keys:
        reason = f"transformers does not find these tensors, and initialises them{suffix}"
        yield _library("opens wrong", reason, tuple(sorted(info.missing_keys)), path)
    if info is not None and info.unexpected_keys:
        reason = f"the model has no place for these tensors, which transformers drops{suffix}"
        yield _library("unknown", reason, tuple(sorted(info.unexpected_keys)), path)


def _library(verdict: Any, reason: str, names: tuple[str, ...], path: Path) -> Problem:
    action = "compare names and shapes with config.json; `loadstone inspect` lists the tensors"
    command = ""
    if _method_of(path):
        action = "open the folder with loadstone.transformers, or dequantize it"
        command = _CONVERT.format(path)
    return Problem(verdict, reason, action, _LIBRARY, names, command)


def _wrong_values(path: Path, catalog: Catalog, answer: Answer) -> Iterator[Problem]:
    """Yield reasons why the model's values may differ from the file's."""
    rows = catalog._core.quantized()
    method = _method_of(path)
    yield from _rounded(catalog, rows, answer.model)
    if not rows and not method:
        return
    if not rows:
        reason = f"config.json declares {method}, but loadstone finds no quantized tensors"
        yield _cannot_tell(reason, "remove quantization_config from config.json")
    elif method in ("", "modelopt"):
        reason = "transformers has no quantizer for this folder, and uses the codes as values"
        names = tuple(row[0] for row in rows)
        yield Problem("opens wrong", reason, "dequantize it", _TABLE, names, _CONVERT.format(path))
    elif method not in _METHODS:
        yield _cannot_tell(f"we have not measured openings of {method}", "compare the values")
    else:
        yield from _unmeasured(method, catalog, rows, answer.model)


def _rounded(catalog: Catalog, rows: list[Any], model: Any) -> Iterator[Problem]:
    """Yield the float tensors that the model's dtypes do not represent exactly."""
    import torch

    components = set(catalog._core.companions())
    components.update(name for row in rows for name in row[3].values())
    targets = model.state_dict()
    floats = {tensor.dtype for tensor in targets.values() if tensor.is_floating_point()}
    names = []
    for name, encoding in catalog.encodings().items():
        if encoding not in _FLOATS or name in components:
            continue
        found = {targets[name].dtype} if name in targets else floats
        if any(torch.promote_types(torch_dtype(encoding), each) != each for each in found):
            names.append(name)
    if names:
        reason = "config.json declares a dtype that rounds the values of these tensors"
        yield _cannot_tell(reason, "pass dtype= with the dtype of the file", tuple(names))


def _unmeasured(method: str, catalog: Catalog, rows: list[Any], model: Any) -> Iterator[Problem]:
    """Yield the differences from the openings that we have measured."""
    import torch

    rule = rules()["transformers"]
    measured = {name: rule["releases"][name] for name in ("transformers", method)}
    installed = {name: importlib.metadata.version(name) for name in measured}
    if measured != installed:
        reason = f"we measured openings with {measured}, but {installed} is installed"
        yield _cannot_tell(reason, "run tools/opens_where.py")
    encodings = {row[1] for row in rows}
    if len(encodings) > 1:
        reason = f"the folder mixes encodings: {', '.join(sorted(encodings))}"
        yield _cannot_tell(reason, "compare the values")
        return
    opening = rule["openings"].get(f"{encodings.pop()} {method}")
    if opening is None or any(row[2] is None for row in rows):
        yield _cannot_tell("we have not measured this encoding in this style", "compare the values")
        return
    experts = [name for name in catalog.encodings() if ".experts." in name]
    outcome = opening["experts" if experts else "dense"]
    if outcome != "right":
        verdict: Any = "does not open" if outcome.startswith("`") else "opens wrong"
        reason = f"transformers reads this encoding of experts with this outcome: {outcome}"
        action = "open the folder with loadstone.transformers"
        yield Problem(verdict, reason, action, _TABLE, tuple(experts))
    dtypes = catalog.encodings()
    odd = [
        row[0]
        for row in rows
        if {part: dtypes[name] for part, name in row[3].items()} != opening["components"]
    ]
    if odd:
        reason = f"the components differ from those that we measured: {opening['components']}"
        yield _cannot_tell(reason, "compare the values", tuple(odd))
    yield from _other_layers(rows, catalog, model, rule["expert_models"])
    if model.dtype is not torch.bfloat16:
        yield _cannot_tell("we measured only models in bfloat16", "compare the values")


def _other_layers(
    rows: list[Any], catalog: Catalog, model: Any, expert_models: list[str]
) -> Iterator[Problem]:
    """Yield quantized tensors that are not layers of the kinds that we measured."""
    import torch

    modules = dict(model.named_modules())
    names = {row[0] for row in rows}
    dense = {name for name in names if ".experts." not in name}
    kinds = ("Linear", "Linear4bit", "Linear8bitLt")

    def is_measured(module: Any) -> bool:  # bitsandbytes' layers name the class they replaced
        replaced = getattr(module, "source_cls", None) or torch.nn.Linear
        return type(module).__name__ in kinds and replaced is torch.nn.Linear

    odd = [name for name in sorted(dense) if not is_measured(modules.get(name[: -len(".weight")]))]
    library = {
        f"{name}.weight" for name, module in modules.items() if type(module).__name__ in kinds[1:]
    }
    if library:
        odd += sorted(library ^ dense)
    if names != dense and model.config.model_type not in expert_models:
        odd += sorted(names - dense)
    plain = {
        name
        for name in catalog.encodings()
        if ".experts." in name and name.endswith(".weight") and name not in names
    }
    if odd or plain:
        reason = "we have not measured layers of this kind, or a part of a layer's experts"
        yield _cannot_tell(reason, "compare the values", tuple(dict.fromkeys([*odd, *plain])))
