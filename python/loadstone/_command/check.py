"""``python -m loadstone check``: print whether other programs open a checkpoint."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from loadstone._adapters.check import ENGINES, EngineCheck, check
from loadstone._base.errors import listed, unknown_word_error
from loadstone._base.terminal import printable
from loadstone._command.doctor import silenced


def main(arguments: list[str]) -> int:
    """Print one verdict per engine; return 0 if every engine opens the checkpoint right, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m loadstone check",
        allow_abbrev=False,
        description="Predict from headers and configs whether other programs open a checkpoint "
        "with the values of its files.",
    )
    parser.add_argument("path", metavar="PATH", help="a folder or a GGUF file")
    parser.add_argument(
        "--for",
        dest="engines",
        metavar="ENGINE[,...]",
        required=True,
        help=f"one or more of {', '.join(ENGINES)}",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args(arguments)
    engines = list(dict.fromkeys(options.engines.split(",")))
    for engine in engines:
        if engine not in ENGINES:
            raise unknown_word_error("--for", "engine", engine, ENGINES)
    with silenced():
        results = [check(options.path, engine) for engine in engines]
    is_ok = all(result.ok for result in results)
    if options.json:
        print(json.dumps({"ok": is_ok, "engines": [asdict(each) for each in results]}, indent=1))
    else:
        print("\n".join(line for result in results for line in _lines(result)))
    return 0 if is_ok else 1


def _lines(result: EngineCheck) -> list[str]:
    engine = f"{result.engine} {result.version}".strip()
    lines = [f"{engine}: {result.verdict} (decided by {result.decided_by})"]
    for problem in result.problems:
        names = f": {listed(problem.names, 4, repr, more=' ...')}" if problem.names else ""
        lines.append(f"  {problem.verdict}: {printable(problem.reason)}{printable(names)}")
        lines.append(f"    {problem.action}")
        if problem.command:
            lines.append(f"    {printable(problem.command)}")
    return lines + [f"  note: {note}" for note in result.notes]
