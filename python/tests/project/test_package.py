"""Tests what importing the package does, and that its code avoids the banned calls."""

from __future__ import annotations

import ast
import importlib
import itertools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from forked import run_script
from models import Tiny, assert_same, randomise, save

import loadstone
from loadstone._base import errors
from loadstone._base.adapters import ADAPTERS

SUBMODULES = [
    "loadstone._execute.plan",
    "loadstone._execute.audit",
    "loadstone._execute.load",
    "loadstone._execute.execute",
]
SUBMODULES += ["loadstone._skeleton.skeleton", "loadstone.torch"]

EXCEPTIONS = {
    "usage": loadstone.OptionError,
    "plan.options": loadstone.OptionError,
    "plan.rules": loadstone.PlanError,
    "convert.lossy": loadstone.PlanError,
    "convert.locked": loadstone.LoadError,
    "convert.state": loadstone.LoadError,
    "convert.incomplete": loadstone.LoadError,
    "receipt.json": loadstone.FormatError,
}


def python(program: str) -> str:
    done = run_script(program, Path.cwd())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_framework():
    program = """
        import sys, loadstone
        print([m for m in ("torch", "numpy", "transformers", "diffusers") if m in sys.modules])
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "[]"


def test_files_are_read_and_made_without_torch(tmp_path):
    save(randomise(Tiny()), tmp_path / "m.safetensors")
    program = """
        import sys
        sys.modules["torch"] = None
        import loadstone
        names = list(loadstone.inspect("m.safetensors").tensors)
        with loadstone.open("m.safetensors") as opened:
            assert sorted(opened) == sorted(names)
        loadstone.convert("m.safetensors", "c.safetensors", dtype="bfloat16")
        loadstone.merge({"m.safetensors": 0.5, "c.safetensors": 0.5}, "d.safetensors")
        assert loadstone.safe_open("d.safetensors", "np").keys() == sorted(names)
        loadstone.Receipt, loadstone.configure_remote, loadstone.patch
        try:
            loadstone.load
        except ImportError as error:  # the control
            assert error.name == "torch"
            print("done")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("first", SUBMODULES)
def test_functions_stay_functions_whatever_is_imported_first(first):
    others = [name for name in SUBMODULES if name != first]
    order = "; ".join(f"import {name}" for name in [first, *others])
    names = ["plan", "load", "audit", "inspect", "skeleton", "save_skeleton"]
    check = f"assert all(callable(getattr(loadstone, n)) for n in {names})"
    python(f"import loadstone; {order}; {check}")


def test_everything_that_is_promised_is_there():
    for name in dir(loadstone):
        assert getattr(loadstone, name) is not None
    assert set(loadstone.__all__) < set(dir(loadstone))
    with pytest.raises(AttributeError, match="nonsense"):
        loadstone.nonsense  # noqa: B018


def test_every_adapter_is_an_attribute_of_a_fresh_import():
    folder = Path(loadstone.__file__).parent
    public = sorted(path.stem for path in folder.glob("[!_]*.py"))
    assert public == sorted(ADAPTERS)
    for name in public:
        wanted = f"import loadstone; print(loadstone.{name}.__name__)"
        assert python(wanted).strip() == f"loadstone.{name}"
        assert name in dir(loadstone)


def test_type_checkers_find_each_public_name_where_it_is():
    stub = ast.parse(Path(loadstone.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    found = {alias.name: node.module for node in imports for alias in node.names}
    assert found.keys() == {*dir(loadstone), "_core"}
    for name, module in found.items():
        there = getattr(importlib.import_module(module), name)
        assert getattr(loadstone, name) is there, name


def test_star_brings_no_library_and_no_builtin():
    names: dict[str, object] = {}
    exec("from loadstone import *", names)
    assert {"load", "Plan", "__version__"} <= names.keys()
    assert not {"open", "torch", "transformers", "llama_cpp"} & names.keys()


def refuse(*args, **kwargs):
    raise AssertionError("a library was asked to read or convert weights")


FORBIDDEN = [
    (torch, "load"),
    (torch, "from_file"),
    (safetensors, "safe_open"),
    (safetensors.torch, "load_file"),
    (safetensors.torch, "load"),
    (torch.Tensor, "copy_"),
    (torch.Tensor, "clone"),
    (torch.Tensor, "float"),
    (torch.nn.Module, "load_state_dict"),
]


def test_no_library_reads_or_converts_weights_in_a_load(tmp_path, monkeypatch):
    reference = randomise(Tiny())
    save(reference, tmp_path / "m.safetensors", torch.bfloat16)
    with loadstone.skeleton():
        model = Tiny()
    with monkeypatch.context() as patched:
        for owner, name in FORBIDDEN:
            patched.setattr(owner, name, refuse)
        with pytest.raises(AssertionError, match="was asked"):  # control: the patched clone raises
            torch.zeros(1).clone()
        loadstone.load(model, tmp_path / "m.safetensors")
    for name, tensor in reference.state_dict().items():
        expected = tensor.bfloat16().float()
        assert torch.equal(model.state_dict()[name], expected), name


def test_the_default_device_and_dtype_are_not_ours_to_follow(tmp_path):
    reference = randomise(Tiny())
    save(reference, tmp_path / "m.safetensors")
    with loadstone.skeleton():
        model = Tiny()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            loadstone.load(model, tmp_path / "m.safetensors")
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(model, reference)


def test_every_code_in_the_package_is_explained():
    """Error codes that the Python package raises are also in the core's table."""
    import re
    from pathlib import Path

    known = {code for code, _, _ in loadstone._core.codes()}
    areas = "|".join(sorted({code.partition(".")[0] for code in known if "." in code}))
    root = Path(loadstone.__file__).parent
    text = "\n".join(file.read_text() for file in sorted(root.rglob("*.py")))
    said = set(re.findall(rf'"((?:{areas})\.[a-z_]+)"', text))
    assert len(said) > 40
    assert said <= known, sorted(said - known)


def test_every_code_has_the_exception_of_its_area():
    codes = [code for code, _, _ in loadstone._core.codes()]
    assert {code.partition(".")[0] for code in codes} <= errors._AREAS.keys()
    assert errors._CODES.keys() <= set(codes)
    bare = [code for code in codes if errors.error_class(code) is loadstone.Error]
    assert bare == ["internal"]
    for code, expected in EXCEPTIONS.items():
        assert errors.error_class(code) is expected, code


def test_every_exception_is_public():
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    for cls in classes:
        if issubclass(cls, loadstone.Error):
            assert getattr(loadstone, cls.__name__) is cls


def test_pairs_of_imports_in_any_order():
    for first, second in itertools.permutations(["loadstone.torch", "loadstone._execute.plan"], 2):
        python(f"import {first}, {second}, loadstone; assert callable(loadstone.plan)")


def test_an_absent_library_is_an_absent_attribute():
    program = """
        import sys
        sys.modules["accelerate"] = None
        import loadstone
        assert not hasattr(loadstone, "accelerate") and hasattr(loadstone, "torch")
        try:
            loadstone.accelerate
        except AttributeError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = "loadstone.accelerate needs the package 'accelerate', which is not installed\n"
    assert done.stdout == said, done.stderr
