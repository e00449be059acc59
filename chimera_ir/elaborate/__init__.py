"""Elaboration of a scheme to its plan: names, values, pipes, operations."""
