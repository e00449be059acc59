"""Micro-benchmarks of a model's stages and a cluster's links, run by torch and by the code of chimera_runtime."""
