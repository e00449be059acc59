"""What two revisions of the compiler print and write for the same inputs, compared."""
