"""The libraries: a folder each, and how they are patched."""
