"""`--check`: the loops against one process, and the stages against the whole model."""
