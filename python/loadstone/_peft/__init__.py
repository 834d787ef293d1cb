"""The inside of ``loadstone.peft``."""

from loadstone._sites import sites_of

sites_of("peft").require()
