"""Adapter of NVIDIA ModelOpt."""

from loadstone._adapters.sites import sites_of

sites_of("modelopt").require()
