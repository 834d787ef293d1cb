"""Where every tensor of a model will come from; reads no data."""
