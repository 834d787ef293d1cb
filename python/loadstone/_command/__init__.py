"""``python -m loadstone``."""
