"""The check: the ranks against one process, and the stages against the model of `reference()`."""
