"""Builds tiny random models of diffusers' classes, and writes files in the original key names.

diffusers has a single-file converter for ``CASES`` and ``FURTHER_CASES``. Files of ``OWN_CASES``
use diffusers' names only. Models of ``TABLE_CASES`` have tables that no file contains.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers_further_rows import FURTHER_ROWS
from diffusers_layouts import Layout, State
from diffusers_rows import OWN_ROWS, ROWS, WIDE
from diffusers_table_rows import TABLE_ROWS, WEIGHT_NORM_ROWS
from safetensors.torch import save_file
from transformers_models import own_state, randomise_all

import loadstone
from loadstone._model.walk import walk

CONSTRUCTED = ("non_persistent_buffer", "attribute")  # kinds of tensors that no file contains


@dataclasses.dataclass(frozen=True)
class Case:
    """A class, a small configuration of it, and the layout of its files.

    Attributes:
        layout: maps to the original names; None if files only use diffusers' names.
    """

    name: str
    class_name: str
    changes: dict[str, Any]
    layout: Layout | None = None

    @property
    def cls(self) -> Any:
        import diffusers

        return getattr(diffusers, self.class_name)

    @property
    def is_wide(self) -> bool:
        """True if the model has the published size, because its converter requires that width."""
        return self.name in WIDE

    def construct(self, dtype: torch.dtype | None = None) -> Any:
        """Construct the model directly, in evaluation mode."""
        with default_dtype(dtype or torch.float32):
            model = self.cls(**copy.deepcopy(self.changes)).eval()
        return model.requires_grad_(True)

    def build(self, seed: int = 0, dtype: torch.dtype | None = None) -> Any:
        """Construct the model, and give all tensors that a file can contain random values."""
        return randomise_all(self.construct(dtype), seed)

    def original(self, model: Any, dtype: torch.dtype | None = None) -> State:
        """Return contiguous tensors in the original layout, with floats cast to ``dtype``."""
        assert self.layout is not None
        made = self.layout(state_of(model), dict(model.config))
        return {name: _as(tensor, dtype) for name, tensor in made.items()}

    def __repr__(self) -> str:
        return self.name


def state_of(model: Any) -> State:
    """Return the state dict with each tie once; on meta, ties cannot be recognised."""
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    return dict(model.state_dict()) if is_meta else own_state(model)


class default_dtype:  # noqa: N801
    """Changes torch's default float dtype in a context."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *_: Any) -> None:
        torch.set_default_dtype(self._before)


def _as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(wanted).contiguous()


def write_config(model: Any, folder: Path) -> str:
    """Write a folder with the model's config; return it for the option ``config``."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_config(folder)
    return str(folder)


def write_single_file(
    case: Case, model: Any, file: Path, dtype: torch.dtype | None = None
) -> tuple[str, str]:
    """Write a safetensors file in the original layout; return its path and its config's folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(case.original(model, dtype), file)
    return str(file), write_config(model, file.parent / "config")


def write_header_only(state: State, file: Path, dtype: str = "BF16") -> str:
    """Write a safetensors file with a complete header and a hole as data."""
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in state.items():
        end = at + 2 * tensor.numel()
        header[name] = {
            "dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, end],
        }  # fmt: skip
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + at)
    return str(file)


def library_converted(case: Case, state: State, model: Any) -> State:
    """Convert real tensors with diffusers' converter of the class."""
    from diffusers.loaders import single_file_model

    name = single_file_model._get_single_file_loadable_mapping_class(case.cls)
    convert = single_file_model.SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"]
    if set(state) == set(model.state_dict()):
        return dict(state)
    parameters = inspect.signature(convert).parameters
    taken = {"config": dict(model.config), "checkpoint": dict(state)}
    has_rest = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    given = {key: value for key, value in taken.items() if key in parameters or has_rest}
    return dict(convert(**given))


def differences(found: Any, expected: Any) -> list[str]:
    """Return a line per parameter, buffer and plain tensor that differs in any bit."""
    ours = {slot.name: slot for slot in walk(found)}
    theirs = {slot.name: slot for slot in walk(expected)}
    lines = [f"{name}: only in one of them" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in ours.keys() & theirs.keys():
        mine, other = ours[name].tensor, theirs[name].tensor
        if mine.is_meta:
            lines.append(f"{name}: on meta")
        elif (mine.dtype, mine.shape) != (other.dtype, other.shape):
            lines.append(f"{name}: {mine.dtype} {mine.shape}, not {other.dtype} {other.shape}")
        elif ours[name].kind != theirs[name].kind:
            lines.append(f"{name}: {ours[name].kind}, not {theirs[name].kind}")
        elif not torch.equal(_bytes(mine), _bytes(other)):
            lines.append(f"{name}: other values")
    return lines


@contextlib.contextmanager
def logged_lines() -> Iterator[list[str]]:
    """Collect the lines that diffusers logs about a single file."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("diffusers.loaders.single_file_model")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def refuse(*_: Any, **__: Any) -> Any:
    """Fail; tests replace the libraries' readers by this function."""
    raise AssertionError("a library reads weights itself")


def assert_same(found: Any, expected: Any) -> None:
    lines = differences(found, expected)
    assert not lines, "\n".join(lines[:20])
    assert loadstone.audit(found).ok


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous()
    return (flat.reshape(1) if flat.dim() == 0 else flat).view(torch.uint8)


CASES: list[Case] = [Case(*row) for row in ROWS]
FURTHER_CASES: list[Case] = [Case(*row) for row in FURTHER_ROWS]
OWN_CASES: list[Case] = [Case(*row) for row in OWN_ROWS]
TABLE_CASES: list[Case] = [Case(*row) for row in TABLE_ROWS]
WEIGHT_NORM_CASES: list[Case] = [Case(*row) for row in WEIGHT_NORM_ROWS]


def by_name(name: str) -> Case:
    every = [*CASES, *FURTHER_CASES, *OWN_CASES, *TABLE_CASES, *WEIGHT_NORM_CASES]
    return next(item for item in every if item.name == name)


def cast_copy(case: Case, model: Any, dtype: torch.dtype) -> Any:
    """Return the expected result of a load in ``dtype``; modules declared F32 stay F32."""
    expected = copy.deepcopy(model)
    keeps = set(case.cls._keep_in_fp32_modules or ())
    for slot in walk(expected):
        is_cast = slot.kind not in CONSTRUCTED and slot.tensor.is_floating_point()
        if is_cast and not keeps & set(slot.name.split(".")):
            slot.replace(slot.tensor.detach().to(dtype))
    return expected


@contextlib.contextmanager
def with_meta() -> Iterator[None]:
    """Put all tensors on meta, even the tables that a skeleton would compute."""
    with torch.device("meta"):
        yield
