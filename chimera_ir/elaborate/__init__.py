"""From a scheme to its plan: names, values, pipes, operations."""
