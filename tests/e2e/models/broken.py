"""A model file that is no Python."""

def build_stage(:
