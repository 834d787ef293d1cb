"""Tests that ``loadstone doctor`` finds a wrong canary load and a patched function that is gone."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_script

from loadstone._adapters import canaries, sites
from loadstone._adapters.sites import LIBRARIES, sites_of
from loadstone._command import command, doctor

CANARY = "loadstone._adapters.accelerate.canary"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examine one fast library only, with a cache folder for the test."""
    monkeypatch.setattr(doctor, "LIBRARIES", ("accelerate",))
    monkeypatch.setattr(doctor, "WITHOUT_CANARY", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def examined(capsys: pytest.CaptureFixture[str], *options: str, status: int) -> dict[str, Any]:
    assert command.main(["doctor", "--json", *options]) == status
    printed = capsys.readouterr()
    assert printed.err == ""
    found: dict[str, Any] = json.loads(printed.out)
    assert found["ok"] == (status == 0)
    (found["library"],) = found["libraries"]
    return found


def spoil(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Change the values that loadstone loads into the canary model."""
    module = importlib.import_module(CANARY)
    make = module.canaries

    def changed(folder: Path) -> Iterator[canaries.Canary]:
        (made,) = make(folder)

        def ours() -> Any:
            model = made.own()
            change(model)
            return model

        yield canaries.Canary(made.own, ours, is_audited=False, name="changed")

    monkeypatch.setattr(module, "canaries", changed)


def add_one_ulp(model: Any) -> None:
    weight = model[0].weight.data
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(1e4, dtype=weight.dtype))


CHANGES = {
    "different bytes": add_one_ulp,
    "torch.float64 (32,) on cpu, the library has torch.float16": lambda model: model[0].double(),
    "only in loadstone's model": lambda model: model.register_buffer("more", torch.ones(1)),
    "only in the library's model": lambda model: model[1].register_buffer("running_var", None),
}


def test_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    found = examined(capsys, status=0)
    assert found["library"]["version"] == sites_of("accelerate").version()
    assert found["library"]["lacking"] == []
    assert found["library"]["canary"] == {"result": "equal", "reason": "", "is_remembered": False}
    assert found["python"] == sys.version.split()[0]
    assert found["torch"] == torch.__version__
    assert found["loadstone"]["version"] == importlib.import_module("loadstone").__version__
    assert 0 < found["memory"]["available"] < found["memory"]["total"]
    assert found["disk"]["free"] > 0
    assert found["processor"]["count"] > 0


@pytest.mark.parametrize("words", CHANGES)
def test_a_canary_that_differs(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, CHANGES[words])
    for _ in range(2):  # twice, because a difference must not be cached
        canary = examined(capsys, status=1)["library"]["canary"]
        assert canary["result"] == "differs"
        assert canary["reason"].startswith("changed: ")
        assert words in canary["reason"]
        assert not canary["is_remembered"]
    assert command.main(["doctor"]) == 1
    assert words in capsys.readouterr().out


def test_a_load_that_the_audit_does_not_prove(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the patch has no effect, the doctor compares the library with itself; the audit fails."""
    module = importlib.import_module(CANARY)
    make = module.canaries

    def unpatched(folder: Path) -> Iterator[canaries.Canary]:
        (made,) = make(folder)
        yield canaries.Canary(made.own, made.own)

    monkeypatch.setattr(module, "canaries", unpatched)
    canary = examined(capsys, status=1)["library"]["canary"]
    assert (canary["result"], canary["reason"]) == ("differs", "the audit does not pass")


def test_a_load_that_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/users/somebody")

    def fail(folder: Path) -> Any:
        raise ValueError("no /users/somebody/private/x at https://me:word@host/x?token=abc")

    monkeypatch.setattr(importlib.import_module(CANARY), "canaries", fail)
    canary = examined(capsys, status=1)["library"]["canary"]
    assert canary["result"] == "failed"
    assert canary["reason"].startswith("ValueError: no ~/... at https://")
    for secret in ("somebody", "private", "word", "abc"):
        assert secret not in canary["reason"]


SECRETS = {
    "403 for hf_abcdefGHIJKLmnop0123456789qrst": "403 for ***",
    "hf_oauth_abcdefghij0123456789": "***",
    "{'authorization': 'Bearer eyJh.bG-ci_Oi'}": "{'authorization': 'Bearer ***'}",
    "HF_TOKEN=abcdef, retry": "HF_TOKEN=***, retry",
    "cannot reach https://me:word@host:80/x": "cannot reach https://host:80/x",
    "hf_hub_download() got no token: see hf_xet": None,  # controls: these texts stay as they are
    "SyntaxError: unexpected token }": None,
}


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_in_errors_of_other_libraries_are_masked(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> str:
        raise RuntimeError(text)

    monkeypatch.setattr(sites_of("accelerate"), "version", fail)
    library = examined(capsys, status=1)["library"]
    assert library["lacking"] == [f"accelerate (RuntimeError: {SECRETS[text] or text})"]
    assert command.main(["doctor"]) == 1
    assert (SECRETS[text] or text) in capsys.readouterr().out


NOISY = """
import ctypes, os, sys
from loadstone._adapters import canaries
from loadstone._command import command, doctor

def run(name, again):
    os.write(1, b"descriptor")
    ctypes.CDLL(None).printf(b"buffer of C")
    os.system("echo process; echo process >&2")
    sys.__stdout__.write("stream")
    return canaries.Outcome(canaries.EQUAL)

canaries.run = run
doctor.LIBRARIES, doctor.WITHOUT_CANARY = ("accelerate",), {}
"""


@pytest.mark.parametrize("is_control", [False, True])
def test_a_library_that_writes_to_the_standard_output(is_control: bool, tmp_path: Path) -> None:
    program = NOISY
    if is_control:
        program += "import contextlib\ndoctor._discarded = contextlib.nullcontext\n"
    done = run_script(program + "assert command.main(['doctor', '--json']) == 0", tmp_path)
    assert done.returncode == 0, done.stderr
    noises = [word for word in ("descriptor", "buffer of C", "process") if word in done.stdout]
    if is_control:
        assert len(noises) == 3 and "process" in done.stderr
    else:
        assert json.loads(done.stdout)["ok"] and not done.stderr


def test_a_site_that_is_lacking(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = sites_of("accelerate")
    gone = sites.Site("accelerate", "of_another_release")
    monkeypatch.setattr(table, "table", (*table.table, gone))
    table.reset()
    try:
        library = examined(capsys, status=1)["library"]
        assert library["lacking"] == [str(gone)]
        assert library["canary"]["result"] == "not run"
        assert library["canary"]["reason"] == "unsupported release"
        assert command.main(["doctor"]) == 1
        assert f"lacks {gone}" in capsys.readouterr().out
    finally:
        table.reset()


def test_a_library_that_cannot_be_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> str:
        raise RuntimeError("its driver is too old")

    monkeypatch.setattr(sites_of("accelerate"), "version", fail)
    library = examined(capsys, status=1)["library"]
    assert library["lacking"] == ["accelerate (RuntimeError: its driver is too old)"]


def test_it_runs_once_for_a_release(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not examined(capsys, status=0)["library"]["canary"]["is_remembered"]
    assert examined(capsys, status=0)["library"]["canary"]["is_remembered"]
    assert not examined(capsys, "--again", status=0)["library"]["canary"]["is_remembered"]
    monkeypatch.setattr(importlib.import_module("accelerate"), "__version__", "1.15.99")
    assert not examined(capsys, status=0)["library"]["canary"]["is_remembered"]
    monkeypatch.setattr(canaries, "__version__", "99.0")
    assert not examined(capsys, status=0)["library"]["canary"]["is_remembered"]
    assert examined(capsys, status=0)["library"]["canary"]["is_remembered"]


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert not examined(capsys, status=0)["library"]["canary"]["is_remembered"]


def test_adapters_without_a_canary_are_named_with_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "LIBRARIES", ())
    assert command.main(["doctor", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["libraries"]}
    assert found.keys() == {"vllm", "sglang", "llama_cpp"}
    for name, each in found.items():
        assert each["canary"]["result"] == "not run"
        assert each["canary"]["reason"]
        assert not each["lacking"] or importlib.util.find_spec(name) is not None


def test_unknown_options_are_wrong_usage() -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["doctor", "--nonsense"])
    assert ended.value.code == 2


def test_every_library_has_a_canary_that_is_equal(tmp_path: Path) -> None:
    """The doctor runs in a separate process, so that the test sees whatever libraries print."""
    program = "import os; os.environ['XDG_CACHE_HOME'] = 'cache'\n"
    program += "from loadstone._command.command import main\n"
    program += "assert main(['doctor', '--json']) == 0"
    done = run_script(program, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {each["name"]: each["canary"] for each in json.loads(done.stdout)["libraries"]}
    for name in LIBRARIES:
        assert results[name]["result"] == "equal", results[name]
    for name in ("bitsandbytes", "modelopt", "peft"):
        assert results[name]["reason"], name


def test_the_report_of_make_newest_names_rows_that_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools"))
    newest = importlib.import_module("versions_newest")
    table = sites_of("accelerate")
    row = "accelerate.gone(x)"
    for gone, expected in (((), []), ((row,), [f"changed row of `accelerate`: `{row}`"])):
        monkeypatch.setattr(table, "lacking", lambda gone=gone: gone)
        status = command.main(["doctor", "--json"])
        done = subprocess.CompletedProcess([], status, capsys.readouterr().out, "")
        monkeypatch.setattr(newest, "run", lambda *_, done=done: done)
        assert newest.examined(Path()) == ({"accelerate": table.version()}, expected)
