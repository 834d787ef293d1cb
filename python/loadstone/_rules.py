"""Rules as a caller writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

Rules = Iterable[Mapping[str, Any]] | Mapping[str, str]


def rules_text(rules: Rules | None) -> str:
    """As the core reads them: a list of rules, or literal prefixes and what replaces them."""
    if not rules:
        return ""
    return json.dumps(dict(rules) if isinstance(rules, Mapping) else [dict(rule) for rule in rules])
