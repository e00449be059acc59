"""Checkpoints: their content and their files."""
