"""Benchmarks: each run is a fresh process, compared with another library or a limit."""
