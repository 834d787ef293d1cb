"""The implementation of :mod:`loadstone.vllm`; no public names."""
