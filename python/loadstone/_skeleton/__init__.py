"""Models built without memory, and values made as their constructors make them."""
