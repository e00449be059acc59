"""The compiled program: its facts, which are in files next to the scripts."""
