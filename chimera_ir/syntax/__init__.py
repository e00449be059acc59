"""The scheme language: from text to tree, and back."""
