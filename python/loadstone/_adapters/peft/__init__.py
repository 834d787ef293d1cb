"""Adapter of PEFT."""

from loadstone._adapters.sites import sites_of

sites_of("peft").require()
