"""Costs of a model's stages and a cluster's links: measured, counted or written by hand (section 3.4)."""
