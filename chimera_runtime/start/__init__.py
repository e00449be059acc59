"""Before the first update: the traced forward, and the assembly of a rank."""
