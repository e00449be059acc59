"""From a verified program to Python files."""
