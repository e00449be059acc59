"""Finds formulas of clocks, and so a scheme, that give the orders of operations that are known at several sizes."""
