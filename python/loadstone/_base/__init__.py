"""Helpers that all packages share: errors, text, dtypes, warnings. Independent of models."""
