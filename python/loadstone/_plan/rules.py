"""Read the rules and recipes that a caller passes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from loadstone import _core
from loadstone._base.arguments import wrong_kind
from loadstone._base.text import read_text


@dataclass(frozen=True)
class RulesText:
    """Rules or recipes as JSON, which can be passed to another process."""

    text: str


def is_json(rules: Any) -> bool:
    """Return whether a string is JSON, not the path of a file or the name of a library."""
    return isinstance(rules, str) and rules.lstrip()[:1] in ("[", "{") and not is_file(rules)


def is_file(rules: str) -> bool:
    """Return whether a string is the path of a file; False if it is too long for a path."""
    return os.path.exists(rules)  # noqa: PTH110  (Path.exists() raises for such a text)


Rules = Iterable[Mapping[str, Any]] | Mapping[str, str] | str | os.PathLike[str] | RulesText


def rules_text(rules: Rules | None) -> str:
    """Return rules or recipes as JSON; see ``rules`` of :func:`loadstone.plan`."""
    if isinstance(rules, RulesText):
        return rules.text
    if is_json(rules):
        return str(rules)
    if isinstance(rules, str | os.PathLike):
        return read_text(rules)
    if not rules:
        return ""
    if not isinstance(rules, Iterable):
        raise wrong_kind("rules", rules, "rules, a mapping of names, or the path of a file")
    return json.dumps(dict(rules) if isinstance(rules, Mapping) else [dict(rule) for rule in rules])


def rules_or_recipes(
    rules: Rules | None, catalog: _core.Catalog
) -> tuple[str, _core.Recipes | None]:
    """Return rules as JSON, and recipes for this catalog; at most one of the two is set."""
    text = rules_text(rules)
    if not text or _core.is_rules_json(text):
        return text, None
    return "", _core.Recipes.from_json(catalog, text)
