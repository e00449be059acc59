"""Opened before anything else: standard streams, the process that started this one, and whole files."""
