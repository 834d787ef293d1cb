"""Benchmarks that run each case in a fresh process and compare it with a library or a limit."""
