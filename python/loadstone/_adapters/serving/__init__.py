"""What servers have in common that load by their own models' code; no public names."""
