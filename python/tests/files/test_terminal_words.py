"""Tests that errors, warnings and tables escape names from files before printing them."""

from __future__ import annotations

import json
import pickle
import struct
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run

import loadstone
import loadstone.torch
from loadstone._base.errors import new_error

# One unsafe text of each kind; tests/base/text_test.cpp covers all characters.
UNSAFE = {
    "escape sequence": "\x1b]0;PWNED\x07\x1b[2J",
    "line break": "\nloadstone: ok",
    "return": "\rloadstone: ok",
    "C1": "\x9b31m",
    "zero width": "\u200b",
    "right to left": "\u202e",
    "Arabic letter mark": "\u061c",
    "isolate": "\u2066",
    "joiner": "\u2060",
    "byte order mark": "\ufeff",
    "annotation": "\ufff9",
    "tag": "\U000e0041",
}


def raw_in(text: str, *, lines: bool = False) -> list[str]:
    """Return the control and invisible characters of a text; ``lines`` allows line breaks."""
    unsafe = [each for each in text if unicodedata.category(each) in ("Cc", "Cf", "Zl", "Zp")]
    return [each for each in unsafe if not (lines and each in "\n")]


def write(path: Path, name: str) -> Path:
    header = {name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    return path


class Named(torch.nn.Module):
    """A model with a parameter whose name is not a valid Python attribute."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._parameters[name] = torch.nn.Parameter(torch.empty(2, 2, device="meta"))


Door = Callable[[Path, str], object]
DOORS: dict[str, Door] = {
    "index": lambda p, n: loadstone.open(p)[n][9],
    "too many": lambda p, n: loadstone.open(p)[n][0, 0, 0],
    "float": lambda p, n: loadstone.open(p)[n][1.5],
    "mask": lambda p, n: loadstone.open(p)[n][torch.ones(5).bool()],
    "step": lambda p, n: loadstone.open(p)[n][::-1],
    "dtype": lambda p, n: loadstone.open(p)[n].tensor(dtype="int4" + n),
    "cast": lambda p, n: loadstone.open(p)[n].tensor(dtype="int8"),
    "device": lambda p, n: loadstone.open(p)[n].tensor(device=n),
    "no such name": lambda p, n: loadstone.open(p)["b" + n],
    "closed": lambda p, n: _closed(p)[n][0],
    "safe_open": lambda p, n: loadstone.safe_open(p, "pt").get_tensor("zz" + n),
    "get_slice": lambda p, n: loadstone.safe_open(p, "pt").get_slice(n)[9],
    "framework": lambda p, n: loadstone.safe_open(p, n),
    "path": lambda p, n: loadstone.inspect(p.with_name("none" + n)),
    "missing": lambda p, n: loadstone.load(Named("x" + n), p, unexpected="ignore"),
    "unexpected": lambda p, n: loadstone.load(Named("x"), p, missing="zeros", unexpected="error"),
    "warned": lambda p, n: _warned(lambda: loadstone.load(Named("x" + n), p, missing="zeros")),
    "shape": lambda p, n: loadstone.load(_wide(n), p),
    "load_model": lambda p, n: loadstone.torch.load_model(torch.nn.Linear(2, 2), p),
    "on meta": lambda p, n: loadstone.torch.load_model(Named(n), p),
    "device map": lambda p, n: loadstone.plan(Named(n), p, device_map={n: "cpu" + n}).require_ok(),
    "rules": lambda p, n: loadstone.plan(Named(n), p, rules=n),
    "quantize": lambda p, n: loadstone.convert(p, p.with_name("out"), quantize={n: "q"}),
    "target": lambda p, n: loadstone.convert(p, p.with_name(n.replace("/", "") + ".bin")),
    "gguf": lambda p, n: loadstone.convert(p, p.with_suffix(".gguf"), metadata={n: [n]}),
    "save": lambda p, n: loadstone.torch.save_file({n: torch.ones(2).to_sparse()}, "x"),
    "save shared": lambda p, n: _saved_shared(n),
    "audit": lambda p, n: loadstone.audit(Named(n)).require_real(),
    "made": lambda p, n: _raise(
        new_error("plan.options", n, [f"'{n}'"], path=n, found=n, tensor=n)
    ),
}
SHOWN: dict[str, Door] = {
    "Catalog": lambda p, n: loadstone.inspect(p),
    "open": lambda p, n: loadstone.open(p),
    "LazyTensor": lambda p, n: loadstone.open(p)[n],
    "Plan": lambda p, n: loadstone.plan(Named(n), p),
    "findings": lambda p, n: [
        each.message for each in loadstone.plan(Named("x" + n), p, missing="zeros").findings
    ],
    "Report": lambda p, n: loadstone.load(Named(n), p),
    "Audit": lambda p, n: loadstone.audit(Named(n)),
    "convert": lambda p, n: loadstone.convert(p, p.with_name("dry"), dry_run=True),
}
COMMANDS: list[list[str]] = [
    ["inspect", "--tensors"],
    ["inspect", "--json", "--tensors"],
    ["plan"],
    ["plan", "--json"],
    ["load"],
    ["load", "--json"],
    ["verify"],
    ["verify", "--json"],
    ["load", "--lora-ignore"],
    ["load", "--dtype"],
]


def _closed(path: Path) -> Any:
    opened = loadstone.open(path)
    opened.close()
    return opened


def _wide(name: str) -> torch.nn.Module:
    model = Named(name)
    model._parameters[name] = torch.nn.Parameter(torch.empty(3, 3, device="meta"))
    return model


def _warned(call: Callable[[], object]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert caught
    raise loadstone.Error("; ".join(str(each.message) for each in caught), "internal")


def _saved_shared(name: str) -> None:
    whole = torch.ones(4)
    loadstone.torch.save_file({name: whole, name + "2": whole}, "x")


def _raise(error: Exception) -> None:
    raise error


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("kind", UNSAFE)
def test_no_error_holds_them_raw(path: Path, kind: str) -> None:
    name = "a" + UNSAFE[kind]
    named = 0
    for door, call in DOORS.items():
        with pytest.raises(Exception) as raised:
            call(write(path, name), name)
            pytest.fail(door)
        for error in (raised.value, pickle.loads(pickle.dumps(raised.value))):
            text = str(error)
            assert raw_in(text, lines=True) == [], (door, ascii(text))
            # No line of the output begins with text from a file.
            assert "\nloadstone: ok" not in text, (door, ascii(text))
        named += "\\x" in str(raised.value)
    assert named > len(DOORS) // 2  # control: most errors contain the escaped name


@pytest.mark.parametrize("kind", UNSAFE)
def test_nothing_that_is_printed_holds_them_raw(path: Path, kind: str) -> None:
    name = "a" + UNSAFE[kind]
    for door, call in SHOWN.items():
        shown = call(write(path, name), name)
        for text in (str(shown), repr(shown)):
            assert raw_in(text, lines=True) == [], (door, ascii(text))


@pytest.mark.parametrize("kind", UNSAFE)
def test_the_command_prints_them_escaped(path: Path, kind: str) -> None:
    name = "a" + UNSAFE[kind]
    write(path, name)
    named = 0
    for arguments in COMMANDS:
        rest = [name] if arguments[-1] in ("--lora-ignore", "--dtype") else []
        done = run(*arguments[:1], path, *arguments[1:], *rest)
        text = done.stdout + done.stderr
        assert raw_in(text, lines=True) == [], (arguments, ascii(text))
        named += "\\x" in text or "\\u" in text
    assert named >= 4  # control


def test_json_of_the_command_holds_the_names_as_they_are(path: Path) -> None:
    """JSON contains the exact names, because programs read it."""
    for unsafe in UNSAFE.values():
        name = "a" + unsafe
        write(path, name)
        document = json.loads(run("inspect", path, "--tensors", "--json").stdout)
        assert name in str(document) or repr(name)[1:-1] in str(document)


def test_the_rule_is_one() -> None:
    """Control: errors contain harmless text unchanged."""
    for text in (
        "layers.0.weight",
        "\u00e9 \u6f22\u5b57 \U0001f9f2",
        "a\\x1b",
        "tab-less",
        "'quoted' \"twice\"",
    ):
        assert str(new_error("plan.options", text)) == f"{text} [plan.options]"
