"""Convert and merge checkpoints file to file, and quantize tensors in memory."""
