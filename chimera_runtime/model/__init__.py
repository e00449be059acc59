"""The user's model: its file, its layers, ties and names."""
