"""Micro-benchmarks of a model's stages and a cluster's links, run by torch.

Modules that import torch also import chimera_runtime, so that the measured code is the code that runs. `samples`,
`fit`, `network` and `machine` need no torch.
"""
