"""Updates: with a flush or as a stream; their steps, the accumulation of gradients, and their outcomes."""
