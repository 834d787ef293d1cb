"""Shared by all packages: errors, text, dtypes, warnings. Knows no model and no checkpoint."""
