"""A model file without its functions."""
