"""Checkpoints: headers, tensors read one by one, receipts."""
