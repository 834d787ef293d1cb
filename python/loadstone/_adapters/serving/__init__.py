"""Shared code for servers that load through their own models' code; no public names."""
