"""Consequences of the table of kinds: waits, messages, lifetimes, the engine, and the steady state."""
