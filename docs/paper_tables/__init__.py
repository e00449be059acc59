"""The paper's tables: the claims about each scheme beside the compiled figures."""
