"""The implementation of ``loadstone.bitsandbytes``."""

from loadstone._sites import sites_of

sites_of("bitsandbytes").require()
