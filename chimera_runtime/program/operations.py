"""Tables of the kinds of operations: the method of a stage that runs each kind, and the values that it makes."""

OPERATIONS = {
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weights",
    "recompute": "recompute",
    "offload": "offload",
    "reload": "reload",
    "offload_operands": "offload_operands",
    "reload_operands": "reload_operands",
}
"""The method that runs an operation, by the letter of its kind."""

_MOVES = ("offload", "reload", "offload_operands", "reload_operands")
MOVES = {letter: OPERATIONS[letter] for letter in _MOVES}
"""The method that launches each move between device and host, by its letter; the method ``wait_<name>`` waits for it.
"""

MAKES = {"F": ("y",), "B": ("dx",), "I": ("dx",)}
"""The values that an operation makes for other stages, by the letter of its kind; others make none."""

PAIRED = "pair"
"""Name, in place of a letter, of a forward and a backward that run as one operation; also the name of their method."""
