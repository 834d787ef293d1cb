"""Plans the origin of every tensor of a model; reads no data."""
