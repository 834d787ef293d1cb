"""Build models without memory, and make values as their constructors make them."""
