"""Recipes kept in the user's cache folder, under a digest of all that they follow from."""

from __future__ import annotations

from loadstone._catalog import Catalog
from loadstone._transformers import rules
from loadstone._transformers.rules import Derived, Question


def derive(catalog: Catalog, question: Question) -> Derived:
    """As :func:`rules.derive`, from the cache where it is there."""
    return rules.derive(catalog, question)
