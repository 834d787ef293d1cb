"""Measurements, each in a fresh process, with a peer or a limit measured in the same run."""
