"""Policies for tensors that the checkpoint lacks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from loadstone import _core
from loadstone._errors import make

POLICIES = _core.MISSING_POLICIES
_SPELLINGS = {"initialize": "initialise"}


def missing_policies(
    missing: str | Mapping[str, str], names: list[str]
) -> tuple[str, list[tuple[str, str]]]:
    """The policy for all, and those for single targets. The first pattern that matches wins."""
    if isinstance(missing, str):
        missing = _SPELLINGS.get(missing, missing)
    else:
        missing = {name: _SPELLINGS.get(str(how), how) for name, how in missing.items()}
    chosen = {missing} if isinstance(missing, str) else set(map(str, missing.values()))
    for policy in chosen - set(POLICIES):
        known = ", ".join(POLICIES)
        raise make("plan.options", "no such policy", field="missing", found=policy, expected=known)
    if isinstance(missing, str):
        return missing, []
    try:
        patterns = [(re.compile(pattern), policy) for pattern, policy in missing.items()]
    except (re.error, TypeError) as reason:
        found = str(getattr(reason, "pattern", None) or list(missing))
        raise make("plan.options", f"no pattern: {reason}", field="missing", found=found) from None
    matched = ((name, next((p for r, p in patterns if r.fullmatch(name)), None)) for name in names)
    return "error", [(name, policy) for name, policy in matched if policy is not None]


def runs_initialisers(default: str, policies: list[tuple[str, str]]) -> bool:
    """Whether an initialiser may run."""
    return "initialise" in (default, *(policy for _, policy in policies))
