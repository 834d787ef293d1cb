"""Measurements: each in a fresh process, beside a peer or a limit taken in the same run."""
