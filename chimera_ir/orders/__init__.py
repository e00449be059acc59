"""Orders of operations: the problem that a list schedule or a search solves, and solutions of it."""
