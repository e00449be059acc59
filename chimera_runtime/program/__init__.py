"""The compiled program: its facts, as the files next to the scripts have them."""
