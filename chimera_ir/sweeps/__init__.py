"""Reports of one text at many sizes, as a table."""
