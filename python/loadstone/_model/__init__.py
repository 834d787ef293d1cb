"""Inspect a model: its modules, its tensors and their memory."""
