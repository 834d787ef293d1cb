"""Plan the origin of every tensor of a model without reading data."""
