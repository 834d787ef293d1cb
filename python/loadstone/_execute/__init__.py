"""Loads: carries a plan out, gives the model its tensors, reports and audits."""
