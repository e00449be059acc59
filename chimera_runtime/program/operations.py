"""Kinds of operations: the methods of a stage by which a script runs them."""

OPERATIONS = {
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weights",
    "recompute": "recompute",
}
"""The method that runs an operation, by the letter of its kind."""

PAIRED = "pair"
"""The name of a forward and a backward that run as one, among the letters, and their method."""
