"""NVIDIA ModelOpt's models, loaded packed."""
