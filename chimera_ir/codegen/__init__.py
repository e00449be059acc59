"""Generation of Python files from a verified program."""
