"""``python -m loadstone``: the C++ command, plus four features that need Python.

``convert FOLDER NAME.gguf`` first runs llama.cpp's converter for names, layouts and metadata
(:mod:`loadstone.llama_cpp`), and passes them to the C++ command as ``--rules`` and ``--metadata``.
``verify FOLDER NAME.gguf --converter DIR`` does the same, to compare the file with its conversion.
``export-rules`` asks a Python library for its conversions, ``check`` asks libraries whether they
open a checkpoint, and ``doctor`` checks the libraries and the machine.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from loadstone._adapters.llama_cpp import model_folder
from loadstone._base import adapters
from loadstone._base.errors import Error, new_error

# The command's exit statuses, see docs/cli.md.
_USAGE = 2
_INTERRUPTED = 130

# Commands that the C++ program lacks. The values are references, because importing these modules
# imports frameworks.
_PYTHON_COMMANDS = {
    "check": "loadstone._command.check:main",
    "doctor": "loadstone._command.doctor:main",
    "export-rules": "loadstone._command.export_rules:main",
}


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] in _PYTHON_COMMANDS:
        return _run_own(*arguments)
    with tempfile.TemporaryDirectory(prefix="loadstone-") as folder:
        try:
            command = [_command(), *_prepare_in_process(arguments, Path(folder))]
        except Error as error:
            print(f"loadstone: {error}", file=sys.stderr)
            return _USAGE
        except KeyboardInterrupt:
            return _INTERRUPTED
        return _run_command(command)


def _run_command(command: list[str]) -> int:
    """Run the C++ command, which handles signals and cleans up, and return its exit status."""
    process: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def pass_on(number: int, _: object) -> None:
        # A terminal sends Ctrl-C to both processes, and a second SIGINT would prevent the cleanup.
        # SIGTERM stops the command too, and has no effect after SIGINT.
        if number == signal.SIGINT:
            number = signal.SIGTERM
        if process is None:
            received.append(number)
        else:
            process.send_signal(number)

    # The command inherits signals that are ignored, but not handlers.
    handled = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, pass_on) for number in handled}
    try:
        process = subprocess.Popen(command)
        for number in received:
            process.send_signal(number)
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_own(name: str, *arguments: str) -> int:
    try:
        return int(adapters.resolve(_PYTHON_COMMANDS[name])(list(arguments)))
    except Error as error:
        print(f"loadstone: {error}", file=sys.stderr)
        return _USAGE
    except KeyboardInterrupt:
        return _INTERRUPTED


def prepare(arguments: list[str], folder: Path) -> list[str]:
    """Return the C++ command's arguments; write the files that they name to ``folder``."""
    source = _traced_source(arguments)
    if source is None:
        return arguments
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--converter")
    parser.add_argument("--trust-code", action="store_true")
    parser.add_argument("--dtype")  # passed to the converter, which chooses each tensor's dtype
    ours, rest = parser.parse_known_args(arguments)
    traced = model_folder.trace(
        source,
        converter=ours.converter,
        dtype=ours.dtype,
        trust_code=ours.trust_code,
        allow_links="--allow-links" in rest,
    )
    for finding in traced.findings:
        print(f"{finding.severity}: {finding.message} [{finding.code}]", file=sys.stderr)
    recipes, metadata = traced.save(folder / "model")
    decoding = ["--dequantize"] if traced.decodes and "--dequantize" not in rest else []
    return [*rest, *decoding, f"--rules={recipes}", f"--metadata={metadata}"]


def _prepare_in_process(arguments: list[str], folder: Path) -> list[str]:
    """Run prepare() in a separate process, because the converter's imports would stay in memory."""
    if _traced_source(arguments) is None:
        return arguments
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(prepare, arguments, folder).result()


def _traced_source(arguments: list[str]) -> str | None:
    """Return SOURCE if llama.cpp's converter is to run; ``None`` if it is not."""
    if not arguments or arguments[0] not in ("convert", "verify"):
        return None
    options = {argument.partition("=")[0] for argument in arguments}
    # verify compares two checkpoints as they are unless the user asks for the conversion.
    is_asked = arguments[0] == "convert" or "--converter" in options
    if is_asked and options.isdisjoint(("--rules", "--metadata")):
        # Options with values may come first, so look for SOURCE and TARGET next to each other.
        for source, target in itertools.pairwise(arguments[1:]):
            if model_folder.is_for_converter(source, target):
                return source
    if "--converter" in options:
        message = (
            "--converter needs the folder of a language model, directly followed by NAME.gguf, and "
            "cannot be combined with --rules and --metadata"
        )
        raise new_error("usage", message)
    return None


def _command() -> str:
    """Return the path of the command installed with the package, or else the first in PATH."""
    name = "loadstone"
    installed = Path(sysconfig.get_path("scripts"), name)
    path = str(installed) if os.access(installed, os.X_OK) else shutil.which(name)
    if path is None:
        raise new_error("io.not_found", "the command is not installed", path=str(installed))
    return path
