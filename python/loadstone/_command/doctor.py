"""``python -m loadstone doctor``: print facts for a bug report, and run the adapters' canaries."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

from loadstone._adapters import canaries
from loadstone._adapters.sites import LIBRARIES, sites_of
from loadstone._base import machine
from loadstone._base.adapters import adapters_with
from loadstone._base.terminal import printable
from loadstone._base.version import build_info

# The reason why an adapter has no canary, by library.
WITHOUT_CANARY = {
    library: adapter.no_canary for library, adapter in adapters_with("no_canary").items()
}
_WRONG = (canaries.DIFFERS, canaries.FAILED)

# Secrets in the errors of other libraries: hub tokens, headers, queries. The group is kept.
_SECRETS = re.compile(
    r"\bhf_(?:[a-z]+_)?[A-Za-z0-9]{10,}"
    r"|(\b(?i:bearer)\s+|(?i:token|password|secret|api_?key)=)[^\s'\",;)\]}]+"
)


def main(arguments: list[str]) -> int:
    """Print the report; return 1 if it contains a fault, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m loadstone doctor",
        allow_abbrev=False,
        description="Print the facts for a bug report: versions, the machine, and for each library "
        "whether its release is supported and a tiny load equals the library's own.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument(
        "--again",
        action="store_true",
        help="also run the tiny loads that were equal in an earlier run",
    )
    options = parser.parse_args(arguments)
    with silenced():
        facts = _redact_secrets(report(again=options.again))
    print(json.dumps(facts, indent=1) if options.json else "\n".join(_lines(facts)))
    return 0 if facts["ok"] else 1


def report(*, again: bool) -> dict[str, Any]:
    libraries = [_check_library(name) for name in (*LIBRARIES, *WITHOUT_CANARY)]
    for library in libraries:  # after all imports, so that each canary can name all releases
        library["canary"] = dataclasses.asdict(_run_canary(library, again))
    return {
        "ok": not any(
            library["lacking"] or library["canary"]["result"] in _WRONG for library in libraries
        ),
        "loadstone": dataclasses.asdict(build_info()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": {
            "name": machine.read_proc_field("/proc/cpuinfo", "model name"),
            "count": len(os.sched_getaffinity(0)),
        },
        "memory": {
            name: machine.read_proc_bytes("/proc/meminfo", field)
            for name, field in (("total", "MemTotal"), ("available", "MemAvailable"))
        },
        "disk": {
            "folder": tempfile.gettempdir(),
            "free": shutil.disk_usage(tempfile.gettempdir()).free,
        },
        **_find_gpus(),
        "libraries": libraries,
    }


def _check_library(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": name,
        "version": "",
        "tested": "",
        "is_newer": False,
        "lacking": [],
    }
    if name == "llama_cpp":  # its table of functions needs the converter's folder
        return facts
    sites = sites_of(name)
    facts["tested"] = sites.tested
    if importlib.util.find_spec(name) is None:
        return facts
    try:
        facts["version"] = sites.version()
        facts["is_newer"] = sites.is_untried()
        facts["lacking"] = list(sites.lacking())
    except (Exception, SystemExit) as error:  # other libraries may raise any class
        facts["version"] = facts["version"] or "?"
        facts["lacking"] = [f"{name} ({type(error).__name__}: {error})"]
    return facts


def _run_canary(library: dict[str, Any], again: bool) -> canaries.Outcome:
    name = library["name"]
    if name in WITHOUT_CANARY:
        return canaries.Outcome(canaries.NOT_RUN, WITHOUT_CANARY[name])
    if not library["version"] or library["lacking"]:
        reason = "unsupported release" if library["lacking"] else "not installed"
        return canaries.Outcome(canaries.NOT_RUN, reason)
    return canaries.run(name, again=again)


def _find_gpus() -> dict[str, Any]:
    try:
        import torch

        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except Exception as error:  # e.g. a driver that does not match torch's build
        return {"torch": f"{type(error).__name__}: {error}", "gpus": []}
    return {
        "torch": torch.__version__,
        "gpus": [{"name": gpu.name, "memory": gpu.total_memory} for gpu in gpus],
    }


def _redact_secrets(value: Any) -> Any:
    """Remove tokens, secrets in URLs, and paths in the user's home folder."""
    if isinstance(value, dict):
        return {name: _redact_secrets(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_redact_secrets(item) for item in value]
    if not isinstance(value, str):
        return value
    home = re.escape(os.path.expanduser("~").rstrip("/") or "~")  # noqa: PTH111  (it never fails)
    text = _SECRETS.sub(lambda match: f"{match[1] or ''}***", value)
    return printable(re.sub(rf"{home}(/[^\s'\",:;)\]]*)?", "~/...", text))


@contextlib.contextmanager
def _discarded(descriptor: int) -> Iterator[None]:
    """Discard all output to a file descriptor, even by C code and other processes."""
    try:
        kept = os.dup(descriptor)
    except OSError:  # the shell closed the descriptor
        yield
        return
    try:
        _flush()
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), descriptor)
        yield
    finally:
        _flush()
        os.dup2(kept, descriptor)
        os.close(kept)


def _flush() -> None:
    """Flush the output buffers of Python and of C."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    ctypes.CDLL(None).fflush(None)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    with (
        _discarded(1),
        _discarded(2),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


# --- the text ------------------------------------------------------------------------------------


def _lines(facts: dict[str, Any]) -> list[str]:
    build, memory = facts["loadstone"], facts["memory"]
    build_facts = [
        build["compiler"],
        build["build_type"],
        *map(" ".join, build["libraries"].items()),
    ]
    build_facts += [
        f"{name}: {'yes' if build[field] else 'no'}"
        for name, field in (("remote files", "has_remote"), ("SHA-256", "has_sha256"))
    ]
    gpus = [f"{gpu['name']} ({_size(gpu['memory'])})" for gpu in facts["gpus"]]
    lines = [
        f"loadstone  {build['version']} ({', '.join(map(str.strip, build_facts))})",
        f"Python     {facts['python']} on {facts['platform']}",
        f"processor  {facts['processor']['name']}, {facts['processor']['count']} usable",
        f"memory     {_size(memory['available'])} of {_size(memory['total'])} available",
        f"disk       {_size(facts['disk']['free'])} free for {facts['disk']['folder']}",
        f"torch      {facts['torch']}; GPUs: {', '.join(gpus) or 'none'}",
        "",
    ]
    for library in facts["libraries"]:
        lines += _lines_of_library(library)
    return [*lines, "", "no problem was found" if facts["ok"] else "a problem was found, see above"]


def _lines_of_library(library: dict[str, Any]) -> list[str]:
    name, canary = library["name"], library["canary"]
    tested = f"tested: {library['tested']}"
    if not library["version"]:
        reason = f"not installed ({tested})" if library["tested"] else canary["reason"]
        return [f"{name:14} {reason}"]
    state = "newer than tested" if library["is_newer"] else "supported"
    state = "UNSUPPORTED" if library["lacking"] else state
    lines = [f"{name:14} {library['version']}  {state} ({tested})"]
    lines += [f"{'':14} lacks {site}" for site in library["lacking"]]
    result = canary["result"].upper() if canary["result"] in _WRONG else canary["result"]
    again = "; result of an earlier run, --again repeats it" if canary["is_remembered"] else ""
    reason = f" ({canary['reason']})" if canary["reason"] else ""
    return [*lines, f"{'':14} tiny load, compared with the library's: {result}{reason}{again}"]


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
