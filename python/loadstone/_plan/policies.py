"""Policies for tensors that the checkpoint lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadstone import _core
from loadstone._base.arguments import wrong_kind
from loadstone._base.errors import new_error, unknown_word_error

_SPELLINGS = {"initialize": "initialise"}


def missing_policies(missing: str | Mapping[str, str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the default policy, and pairs (pattern for whole names, policy)."""
    if isinstance(missing, str):
        return _require_policy(missing), []
    if not isinstance(missing, Mapping):
        raise wrong_kind("missing", missing, "a policy, or a mapping of patterns to policies")
    for pattern in missing:
        if not isinstance(pattern, str):
            raise new_error(
                "plan.options", "a pattern must be a string", field="missing", found=repr(pattern)
            )
    return "error", [(pattern, _require_policy(policy)) for pattern, policy in missing.items()]


def policies_of(
    names: Sequence[str], missing: str | Mapping[str, str], missing_of: Mapping[str, str]
) -> dict[str, str]:
    """Return the policy of each target; ``missing_of`` has policies of single targets."""
    default, patterns = missing_policies(missing)
    matches = _core.first_matches([pattern for pattern, _ in patterns], names, "missing")
    chosen = (patterns[index][1] if index >= 0 else default for index in matches)
    return {name: missing_of.get(name, policy) for name, policy in zip(names, chosen, strict=True)}


def _require_policy(policy: object) -> str:
    name = _SPELLINGS.get(str(policy), str(policy))
    if name not in _core.MISSING_POLICIES:
        raise unknown_word_error("missing", "policy", name, _core.MISSING_POLICIES)
    return name
