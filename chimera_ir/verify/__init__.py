"""The rules that must hold for every compiled program, one file per rule."""
