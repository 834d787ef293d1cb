"""A model as it is: its modules, its tensors and their memory."""
