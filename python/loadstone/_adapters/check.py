"""Predict whether other programs open a checkpoint, from its headers and configs.

``_adapters/LIBRARY/check.py`` asks one engine's own library, and ``check_rules.json`` has the rules
that are data.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from loadstone._base.adapters import adapters_with, resolve
from loadstone._base.errors import unknown_word_error
from loadstone._base.keywords import names_keywords

Verdict = Literal["opens right", "opens wrong", "does not open", "unknown"]
ENGINES = ("transformers", "vllm", "sglang", "llama.cpp", "diffusers", "comfyui", "mlx")
# Verdicts from worst to best; the worst problem of a checkpoint decides.
_WORST_FIRST: tuple[Verdict, ...] = ("does not open", "opens wrong", "unknown")


@dataclass(frozen=True)
class Problem:
    """A reason why an engine may not open a checkpoint with its values.

    Attributes:
        verdict: the verdict for a checkpoint that has only this problem.
        names: the tensors, keys or files; empty if the problem concerns the whole checkpoint.
        reason: the problem, in one sentence.
        action: what to do next.
        command: a command that mends the checkpoint, with ``OUT`` for its output; may be empty.
        source: the rule or library that decided.
    """

    verdict: Verdict
    reason: str
    action: str
    source: str
    names: tuple[str, ...] = ()
    command: str = ""


@dataclass(frozen=True)
class EngineCheck:
    """The verdict for one engine.

    Attributes:
        version: the engine's release that the verdict is about; empty if the engine was not asked.
        decided_by: the rule or library that decided.
        notes: facts that do not change the verdict.
    """

    engine: str
    version: str
    verdict: Verdict
    decided_by: str
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """True if the engine opens the checkpoint with the values of its files."""
        return self.verdict == "opens right"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def conclude(
    engine: str,
    version: str,
    decided_by: str,
    problems: Sequence[Problem],
    notes: Sequence[str] = (),
) -> EngineCheck:
    """Return the verdict of the worst problem, or "opens right" without problems."""
    found = sorted(problems, key=lambda problem: _WORST_FIRST.index(problem.verdict))
    verdict: Verdict = found[0].verdict if found else "opens right"
    source = found[0].source if found else decided_by
    return EngineCheck(engine, version, verdict, source, tuple(found), tuple(notes))


@functools.cache
def rules() -> dict[str, Any]:
    """Return the rules that are data, each with its source."""
    text = Path(__file__).with_name("check_rules.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@names_keywords
def check(path: str | os.PathLike[str], engine: str) -> EngineCheck:
    """Predict whether an engine opens a checkpoint with the values of its files.

    Reads headers, configs and small tensors with quantization states. Runs no code from the
    checkpoint's folder.

    >>> loadstone.check("out/", "transformers").verdict
    'opens right'

    Args:
        path: a folder or a file.
        engine: ``"transformers"``, ``"vllm"``, ``"sglang"``, ``"llama.cpp"``, ``"diffusers"``,
            ``"comfyui"`` or ``"mlx"``. Only ``transformers`` and ``llama.cpp`` have rules; the
            verdict for the other engines is ``"unknown"``.

    Raises:
        OptionError: the engine is unknown.
        LoadError: the path does not exist.
    """
    if engine not in ENGINES:
        raise unknown_word_error("check", "engine", engine, ENGINES)
    adapter = adapters_with("check").get(engine.replace(".", "_"))
    if adapter is None:
        reason = f"loadstone has no rules for {engine}"
        action = f"open the checkpoint with {engine}, and compare its outputs"
        return conclude(engine, "", "loadstone", [Problem("unknown", reason, action, "loadstone")])
    result: EngineCheck = resolve(adapter.check)(Path(path))
    return result
