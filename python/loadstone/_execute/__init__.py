"""Execute plans, give models their tensors, report and audit."""
