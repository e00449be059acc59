"""``make gpu``: the steps that a machine with GPUs is tried with, and the report that it leaves."""
