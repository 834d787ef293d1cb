"""Tests that the key of cached recipes changes with edits of their code, and that code without
source has no key."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
from forked import run_script

pytest.importorskip("transformers")
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers_models import by_name, write_checkpoint

from loadstone._adapters.transformers import code_key
from loadstone._adapters.transformers.code_key import CodeKey, UndescribedError

OPERATION = """
from transformers.core_model_loading import ConversionOps
import key_helper
class Op(ConversionOps):
    size = 2
    def __init__(self, **held):
        self.__dict__.update(held)
    def convert(self, input_dict, **kwargs):
        import key_lazy
        return key_lazy.swapped(key_helper.halves(input_dict))
"""
FILES = {
    "key_operation.py": OPERATION,
    "key_helper.py": "from key_pack.deep import halves\n",
    "key_lazy.py": "def swapped(value): return value\n",
    "key_pack/__init__.py": "",
    "key_pack/deep.py": "def halves(value): return value\n",
    "key_stranger.py": "def nothing(): return 1\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget()


def forget():
    for name in [each for each in sys.modules if each.startswith("key_")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def operation(**held):
    return importlib.import_module("key_operation").Op(**held)


def key_of(*operations, patterns="a", known=()):
    code = CodeKey(known)
    made = WeightConverter(
        source_patterns=[patterns], target_patterns=["b"], operations=list(operations)
    )
    return "\n".join([code.describe(made), *code.digests()])


@pytest.mark.parametrize("name", FILES)
def test_an_edit_of_a_file_that_the_operation_uses_is_another_key(name, folder):
    before = key_of(operation())
    assert key_of(operation()) == before
    forget()
    with (folder / name).open("a") as file:
        file.write("\n# edited\n")
    assert (key_of(operation()) != before) == (name != "key_stranger.py")  # control


def test_an_edit_of_an_installed_library_that_keeps_size_and_time(folder, monkeypatch):
    site = folder / "site-packages"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    file = (folder / "key_operation.py").rename(site / "key_operation.py")
    before = key_of(operation())
    assert key_of(operation()) == before
    forget()
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_text(OPERATION.replace("size = 2", "size = 3"))
    os.utime(file, ns=times)
    assert key_of(operation()) != before


def test_code_of_modules_is_not_asked_for_what_they_lack():
    """The key must not import modules lazily, because they may not be installed."""
    module, lazy = types.ModuleType("outer"), types.ModuleType("lazy")
    lazy.__getattr__ = pytest.fail
    module.lazy, module.code = lazy, CodeKey()
    assert code_key._modules_of_globals(module) >= {"lazy", CodeKey.__module__}


class Settings:
    def __init__(self, **held):
        self.__dict__.update(held)


def module_function():
    return 1


DESCRIBED = {
    "numbers": (1, 2),
    "texts": ("a", "b"),
    "dtypes": (torch.float16, torch.bfloat16),
    "lists": ([1, [2]], [1, [3]]),
    "dictionaries": ({"a": 1}, {"a": 2}),
    "sets": ({"a", "b"}, {"a", "c"}),
    "long patterns": (re.compile("a" * 300 + "b"), re.compile("a" * 300 + "c")),
    "flags of patterns": (re.compile("a"), re.compile("a", re.IGNORECASE)),
    "objects": (Settings(a=1), Settings(a=2)),
    "nested objects": (Settings(a=Settings(b=1)), Settings(a=Settings(b=2))),
    "functions": (module_function, by_name),
    "classes": (Settings, Path),
    "partials": (
        functools.partial(module_function, 1),
        functools.partial(module_function, 2),
    ),
}


@pytest.mark.parametrize("kind", DESCRIBED)
def test_what_an_operation_holds_is_in_the_key(kind, folder):
    first, second = DESCRIBED[kind]
    if kind == "classes":
        second = WeightConverter
    assert key_of(operation(held=first)) == key_of(operation(held=first))
    assert key_of(operation(held=first)) != key_of(operation(held=second))


def _closure():
    held = []
    return lambda: held


def _loop():
    held = []
    held.append(held)
    return held


def _of_no_file():
    """Return an operation whose class has no source file, as in notebooks and ``python -c``."""
    names: dict[str, object] = {"__name__": "__main__", "ConversionOps": ConversionOps}
    main = types.ModuleType("__main__")
    before, sys.modules["__main__"] = sys.modules["__main__"], main
    try:
        exec("class Op(ConversionOps):\n    def convert(self, x): return x", names)
        return key_of(names["Op"]())  # type: ignore[operator]
    finally:
        sys.modules["__main__"] = before


def _patched():
    """Return an operation from a file, with a method that has no source file."""
    module = types.ModuleType("key_no_file")
    exec("def convert(self, x): return x", module.__dict__)
    op = operation()
    type(op).convert = module.convert
    return key_of(op)


UNDESCRIBED = {
    "a closure": lambda: key_of(operation(held=_closure())),
    "a tensor": lambda: key_of(operation(held=torch.ones(2))),
    "a module": lambda: key_of(operation(held=torch.nn.Linear(1, 1))),
    "a generator of numbers": lambda: key_of(operation(held=torch.Generator())),
    "an iterator": lambda: key_of(operation(held=iter([1]))),
    "one inside a list": lambda: key_of(operation(held=[1, _closure()])),
    "itself": lambda: key_of(operation(held=_loop())),
    "a class in no file": _of_no_file,
    "a method in no file": _patched,
}


@pytest.mark.parametrize("kind", UNDESCRIBED)
def test_what_cannot_be_described_has_no_key(kind, folder):
    with pytest.raises(UndescribedError):
        UNDESCRIBED[kind]()
    forget()
    assert key_of(operation(held=1))  # control


def test_what_the_key_has_anyhow_is_a_word(folder):
    model = torch.nn.Linear(1, 1)
    assert '"model"' in key_of(operation(held=model), known=[(model, "model")])


def test_a_method_put_into_a_class_and_a_changed_attribute_are_another_key(folder):
    op = operation()
    before = key_of(op)
    type(op).size = 3
    changed = key_of(op)
    type(op).size = 2
    assert key_of(op) == before != changed
    type(op).convert = module_function
    assert key_of(op) != before


def test_a_copy_of_an_operation_leaves_the_key(folder):
    """When the tracer copies an operation, Python adds the names of slots to the class."""
    op = operation()
    before = key_of(op)
    copy.deepcopy(op)
    assert "__slotnames__" in vars(type(op))
    assert key_of(op) == before


SCRIPT = """
import sys, torch, loadstone.transformers
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
class Flip(ConversionOps):
    def convert(self, input_dict, *args, **kwargs):
        (value,), = input_dict.values()
        rows = value.chunk(2, dim=0)
        return {"lm_head.weight": torch.cat([ROWS], dim=0)}
    @property
    def reverse_op(self):
        return Flip()
name = "lm_head.weight"
made = WeightConverter(source_patterns=[name], target_patterns=[name], operations=[Flip()])
register_checkpoint_conversion_mapping("llama", [made], overwrite=True)
model = loadstone.transformers.from_pretrained(AutoModelForCausalLM, sys.argv[1])
torch.save(model.lm_head.weight.detach(), sys.argv[2])
"""

OF_A_FILE = """
import os, runpy, sys
os.environ["XDG_CACHE_HOME"] = {0!r}
sys.argv = ["script.py", {1!r}, {2!r}]
runpy.run_path("script.py", run_name="__main__")
"""


@pytest.mark.parametrize("is_file", [False, True])
def test_an_edited_operation_is_run_anew(is_file, tmp_path):
    source = write_checkpoint(by_name("llama"), tmp_path / "model", "public")
    cache, target = tmp_path / "cache", tmp_path / "found.pt"
    found = []
    for rows in ("rows[0], rows[1]", "rows[1], rows[0]"):
        text = textwrap.dedent(SCRIPT).replace("ROWS", rows)
        if is_file:
            (tmp_path / "script.py").write_text(text)
            done = run_script(OF_A_FILE.format(*map(str, (cache, source, target))), tmp_path)
            assert done.returncode == 0, done.stderr
        else:
            environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
            command = [sys.executable, "-c", text, source, target]
            subprocess.run(command, env=environment, check=True, timeout=300)
        found.append(torch.load(target))
        target.unlink()
    assert torch.equal(found[1], torch.cat(list(reversed(found[0].chunk(2)))))
    assert not torch.equal(found[0], found[1])
    kept = list((tmp_path / "cache").rglob("*.json"))
    assert len(kept) == (2 if is_file else 0)
