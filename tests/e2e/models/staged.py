"""The stages of another file, under STAGED, on a model of a GPU: their messages and sums are staged.

After each update STAGED_NOTES/<rank>.txt has how often the main thread, and the thread that posts, have waited for the
GPU, and how many pieces of pinned memory there are.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

from chimera_runtime.ranks import world
from chimera_runtime.ranks.messages import Staging

sys.path.append(str(Path(__file__).resolve().parents[3]))

from tests.unit.runtime.gpu_model import ModelGpu

GPU = ModelGpu(("outgoing", "incoming"))

world.staging_of = lambda _device, _backend: Staging(GPU)

stages = import_module(os.environ["STAGED"])
build_stage, loss, dataset, optimizer = stages.build_stage, stages.loss, stages.dataset, stages.optimizer


def on_step(pipe, outcome):
    blocked, rooms = GPU.blocked, len(GPU.sizes)
    with Path(os.environ["STAGED_NOTES"], f"{os.environ['RANK']}.txt").open("a") as file:
        file.write(f"{blocked['MainThread']} {blocked['staging']} {rooms}\n")
