"""Passes from a plan to a program: lanes, messages, buffers, gradient synchronisation."""
