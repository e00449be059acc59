"""The paper's tables: what is claimed of each scheme, beside what it compiles to."""
