"""Forwards alone: evaluation and inference."""
