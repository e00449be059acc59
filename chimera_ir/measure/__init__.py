"""Micro-benchmarks, run by torch: what a model's stages and a cluster's links cost.

What imports torch here, imports the runtime that is generated beside every train.py as well, so that what is measured
is what runs; `samples`, `fit` and `machine` do without.
"""
