"""Open checkpoints: headers, tensors read one by one, receipts."""
