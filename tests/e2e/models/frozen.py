"""The stages of another model, which OF names, without training of those that FROZEN lists."""

import importlib
import os

_of = importlib.import_module(os.environ["OF"])
loss, dataset, optimizer = _of.loss, _of.dataset, _of.optimizer
validation = dataset


def build_stage(stage, num_stages):
    return _of.build_stage(stage, num_stages).requires_grad_(str(stage) not in os.environ["FROZEN"].split())
