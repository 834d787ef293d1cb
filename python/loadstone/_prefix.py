"""Prefixes of wrappers: ``module.`` of DataParallel, ``_orig_mod.`` of compile."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from loadstone import _core
from loadstone._errors import make

DEFAULT_PREFIXES = ("module.", "_orig_mod.")


def stripping_rules(
    names: Collection[str], targets: Collection[str], prefixes: str | Iterable[str]
) -> tuple[list[dict[str, Any]], list[_core.Finding]]:
    """The rule that takes a prefix from all names of a checkpoint, and what is to say about it.

    A prefix goes only where every name has it (several after each other, too), and where no name is
    the model's as it is: of several the fewest that make most names the model's. Where some names
    have it, a finding gives the rule to use.

    Args:
        names: of the checkpoint's tensors.
        targets: of the model's tensors.
        prefixes: one, or several.

    Raises:
        Error: ``plan.options``: no text.
    """
    prefixes = [prefixes] if isinstance(prefixes, str) else list(prefixes)
    for each in prefixes:
        if not isinstance(each, str):
            raise make("plan.options", "no text", field="strip_prefix", found=repr(each))
    prefixes, known = [prefix for prefix in prefixes if prefix], frozenset(targets)

    def fitting(prefix: str) -> int:
        return sum(name[len(prefix) :] in known for name in names)

    chains = list(_chains(names, prefixes))
    if not chains or fitting("") > 0:
        return [], [] if chains else list(_partial(names, known, prefixes))
    best = max(chains, key=fitting)  # the shortest of them
    common = best if fitting(best) > 0 else chains[-1]
    message = f"every name of the checkpoint begins with '{common}', which is taken away"
    return [_rule(common)], [_core.Finding("info", "plan.prefix", "", [], message)]


def rules_text(rules: Iterable[Mapping[str, Any]]) -> str:
    """Rules as the core reads them."""
    listed = [dict(rule) for rule in rules]
    return json.dumps(listed) if listed else ""


def _chains(names: Collection[str], prefixes: list[str]) -> Iterator[str]:
    """Prefixes, and prefixes joined, that all names begin with; the shortest first."""
    common = ""
    while names:
        longer = (common + each for each in prefixes)
        found = next((each for each in longer if all(n.startswith(each) for n in names)), None)
        if found is None:
            return
        common = found
        yield common


def _rule(prefix: str) -> dict[str, Any]:
    return {"op": "rename", "sources": [re.escape(prefix) + "(.*)"], "targets": ["$1"]}


def _partial(
    names: Collection[str], targets: frozenset[str], prefixes: Iterable[str]
) -> Iterable[_core.Finding]:
    for prefix in prefixes:
        some = [name for name in names if name.startswith(prefix)]
        wanted = [name for name in some if name not in targets]
        wanted = [name for name in wanted if name.removeprefix(prefix) in targets]
        if wanted:
            message = (
                f"{len(some)} of {len(names)} names of the checkpoint begin with '{prefix}', so it "
                "is not taken away"
            )
            advice = f"Pass rules={json.dumps([_rule(prefix)])}."
            yield _core.Finding("warning", "plan.prefix", "", wanted[:8], message, advice)
