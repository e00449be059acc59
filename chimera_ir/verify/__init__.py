"""What must hold of every compiled program, one file per rule."""
