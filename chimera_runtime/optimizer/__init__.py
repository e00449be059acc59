"""Optimizers over the parameters of a rank: sharded steps, and the state of optimizers and schedulers."""
