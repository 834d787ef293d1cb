"""File to file: conversions, merges, and tensors quantized in memory."""
