"""The implementation of ``loadstone.modelopt``."""

from loadstone._sites import sites_of

sites_of("modelopt").require()
