"""What stands behind :mod:`loadstone.vllm`."""
