"""The compiled program: the facts in program.json, and the scripts next to it."""
