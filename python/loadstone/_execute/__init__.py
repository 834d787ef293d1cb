"""Loads: executes plans, gives models their tensors, reports and audits."""
