"""``python -m loadstone doctor``: facts for a bug report, and the canaries of the adapters."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadstone._adapters import canaries
from loadstone._adapters.sites import LIBRARIES, sites_of
from loadstone._base.adapters import adapters_with
from loadstone._base.terminal import printable
from loadstone._base.version import build_info

# Adapters without a canary, and the reason.
WITHOUT_CANARY = {
    library: adapter.no_canary for library, adapter in adapters_with("no_canary").items()
}
_WRONG = (canaries.DIFFERS, canaries.FAILED)


def main(arguments: list[str]) -> int:
    """Print the report; return 1 if it found a fault, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m loadstone doctor",
        allow_abbrev=False,
        description="Print what a bug report needs: versions, the machine, and for each library "
        "whether its release is supported and a tiny load equals the library's own.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument(
        "--again", action="store_true", help="run the tiny loads that were equal before, too"
    )
    options = parser.parse_args(arguments)
    with _silenced():
        found = _private(report(again=options.again))
    print(json.dumps(found, indent=1) if options.json else "\n".join(_lines(found)))
    return 0 if found["ok"] else 1


def report(*, again: bool) -> dict[str, Any]:
    libraries = [_library(each) for each in (*LIBRARIES, *WITHOUT_CANARY)]
    for each in libraries:  # after all imports, so that each result names all releases
        each["canary"] = dataclasses.asdict(_canary(each, again))
    return {
        "ok": not any(each["lacking"] or each["canary"]["result"] in _WRONG for each in libraries),
        "loadstone": dataclasses.asdict(build_info()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": {"name": _field("/proc/cpuinfo", "model name"), "count": _processor_count()},
        "memory": {
            name: int(_field("/proc/meminfo", field).split()[0]) * 1024
            for name, field in (("total", "MemTotal"), ("available", "MemAvailable"))
        },
        "disk": {
            "folder": tempfile.gettempdir(),
            "free": shutil.disk_usage(tempfile.gettempdir()).free,
        },
        **_torch(),
        "libraries": libraries,
    }


def _library(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": name,
        "version": "",
        "tested": "",
        "is_newer": False,
        "lacking": [],
    }
    if name == "llama_cpp":  # its table needs a folder
        return found
    sites = sites_of(name)
    found["tested"] = sites.tested
    if importlib.util.find_spec(name) is None:
        return found
    try:
        found["version"] = sites.version()
        found["is_newer"] = sites.is_untried()
        found["lacking"] = list(sites.lacking())
    except (Exception, SystemExit) as error:  # other libraries raise any class
        found["version"] = found["version"] or "?"
        found["lacking"] = [f"{name} ({type(error).__name__}: {error})"]
    return found


def _canary(library: dict[str, Any], again: bool) -> canaries.Outcome:
    name = library["name"]
    if name in WITHOUT_CANARY:
        return canaries.Outcome(canaries.NOT_RUN, WITHOUT_CANARY[name])
    if not library["version"] or library["lacking"]:
        reason = "unsupported release" if library["lacking"] else "not installed"
        return canaries.Outcome(canaries.NOT_RUN, reason)
    return canaries.run(name, again=again)


def _torch() -> dict[str, Any]:
    try:
        import torch

        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except Exception as error:  # e.g. a driver that does not match the build
        return {"torch": f"{type(error).__name__}: {error}", "gpus": []}
    return {
        "torch": torch.__version__,
        "gpus": [{"name": each.name, "memory": each.total_memory} for each in gpus],
    }


def _processor_count() -> int:
    return len(os.sched_getaffinity(0))


def _field(path: str, name: str) -> str:
    """Return a field of a file of /proc, or "0" if absent."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return "0"


def _private(value: Any) -> Any:
    """Remove secrets of URLs, and paths in the user's home."""
    if isinstance(value, dict):
        return {name: _private(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_private(each) for each in value]
    if not isinstance(value, str):
        return value
    home = re.escape(os.path.expanduser("~").rstrip("/") or "~")  # noqa: PTH111  (it never fails)
    return printable(re.sub(rf"{home}(/[^\s'\",:;)\]]*)?", "~/...", value))


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


# --- the text ------------------------------------------------------------------------------------


def _lines(found: dict[str, Any]) -> list[str]:
    build, memory = found["loadstone"], found["memory"]
    build_facts = [
        build["compiler"],
        build["build_type"],
        *map(" ".join, build["libraries"].items()),
    ]
    build_facts += [
        f"{name}: {'yes' if build[field] else 'no'}"
        for name, field in (("remote files", "has_remote"), ("SHA-256", "has_sha256"))
    ]
    gpus = [f"{each['name']} ({_size(each['memory'])})" for each in found["gpus"]]
    lines = [
        f"loadstone  {build['version']} ({', '.join(map(str.strip, build_facts))})",
        f"Python     {found['python']} on {found['platform']}",
        f"processor  {found['processor']['name']}, {found['processor']['count']} usable",
        f"memory     {_size(memory['available'])} of {_size(memory['total'])} available",
        f"disk       {_size(found['disk']['free'])} free for {found['disk']['folder']}",
        f"torch      {found['torch']}; GPUs: {', '.join(gpus) or 'none'}",
        "",
    ]
    for each in found["libraries"]:
        lines += _lines_of_library(each)
    return [*lines, "", "nothing is wrong" if found["ok"] else "something above is wrong"]


def _lines_of_library(library: dict[str, Any]) -> list[str]:
    name, canary = library["name"], library["canary"]
    tested = f"tested: {library['tested']}"
    if not library["version"]:
        reason = f"not installed ({tested})" if library["tested"] else canary["reason"]
        return [f"{name:14} {reason}"]
    state = "newer than tested" if library["is_newer"] else "supported"
    state = "UNSUPPORTED" if library["lacking"] else state
    lines = [f"{name:14} {library['version']}  {state} ({tested})"]
    lines += [f"{'':14} lacks {each}" for each in library["lacking"]]
    result = canary["result"].upper() if canary["result"] in _WRONG else canary["result"]
    again = "; found in an earlier run, --again repeats it" if canary["is_remembered"] else ""
    reason = f" ({canary['reason']})" if canary["reason"] else ""
    return [*lines, f"{'':14} tiny load, compared with the library's: {result}{reason}{again}"]


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
