"""What stands behind ``loadstone.bitsandbytes``."""
