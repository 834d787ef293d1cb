"""The implementation of ``loadstone.bitsandbytes``."""

from loadstone._adapters.sites import sites_of

sites_of("bitsandbytes").require()
