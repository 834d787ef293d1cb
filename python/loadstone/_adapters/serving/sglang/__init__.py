"""The implementation of :mod:`loadstone.sglang`; no public names."""
