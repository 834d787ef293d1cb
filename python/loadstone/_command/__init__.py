"""The command ``python -m loadstone``."""
