"""NVIDIA ModelOpt's models, loaded packed."""

from loadstone._sites import sites_of

sites_of("modelopt").require()
