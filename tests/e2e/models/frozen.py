"""The stages of `zoo`, of which those that FROZEN lists are not trained."""

import os

import zoo
from zoo import dataset, loss, optimizer

__all__ = ["build_stage", "dataset", "loss", "optimizer"]


def build_stage(stage, num_stages):
    return zoo.build_stage(stage, num_stages).requires_grad_(str(stage) not in os.environ["FROZEN"].split())
