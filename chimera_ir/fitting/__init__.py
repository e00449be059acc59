"""Schemes from orders: the formulas whose clocks give orders that are known at several sizes."""
