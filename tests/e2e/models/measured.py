"""A float64 model that writes down what every rank keeps while it trains: MEASURED/<rank>.json, in bytes.

A stage ends in a sum, of which nothing is saved: what it hands on is no part of what its backward needs. All stages are
equal, or with GROWING each saves more than the one before.
"""

import ctypes
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chimera_runtime.stage import stage as compute
from chimera_runtime.stage.saved_tensors import SavedTensors, memory_of

WIDTH = 32
ROWS = 8
FILE = Path(os.environ["MEASURED"], f"{os.environ['RANK']}.json")
MODULES = []
STAGES = []


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x):
        result = x + self.outer(torch.tanh(self.inner(x)))
        FIGURES.look()
        return result


class Alive(TorchDispatchMode):
    """All memory that an operation has touched and that is still there, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.known = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.known[reference.cdata] = reference, storage.nbytes()
        self.known = {key: found for key, found in self.known.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.known.values()))
        return result


class Peak(SavedTensors):
    """The memory of saved tensors, with the ``peak``: the largest sum of its sizes so far."""

    peak = 0

    def _pack(self, tensor):
        saved = super()._pack(tensor)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return saved


class Figures:
    """What this rank has kept at most."""

    def __init__(self) -> None:
        self.saved = Peak(lambda: (p for module in MODULES for p in module.parameters()))
        self.alive = Alive()
        self.m_a = {}
        self.kept = self.stashed = self.copies = 0
        self.halves = []

    def note(self, kind, micro, stage) -> None:
        """To be called after a half of a backward: what is saved then, and the gradients kept for second halves."""
        begun = [each.second_half.operands for stage in STAGES for each in stage._half_backwards.values()]
        bytes_now = [sum(self.saved.sizes.values()), sum(memory_of(begun).values())]
        self.halves.append([kind, micro, stage, *bytes_now])

    def look(self) -> None:
        """To be called when a forward has saved what it saves."""
        waiting = [each for stage in STAGES for each in stage._saved.values()]
        stashed = [each.arguments.inputs for each in waiting if isinstance(each, compute.SavedInput)]
        self.stashed = max(self.stashed, len(stashed))
        self.kept = max(self.kept, sum((memory_of(stashed) | self.saved.sizes).values()))
        self.copies = max(self.copies, sum(getattr(stage.weights, "copies", 1) for stage in STAGES))

    def write(self) -> None:
        figures = {
            "M_a": self.m_a,
            "saved": self.saved.peak,
            "kept": self.kept,
            "stashed": self.stashed,
            "copies": self.copies,
            "alive": self.alive.peak,
            "mapped": mapped_alone(),
            "halves": self.halves,
            "buffers": {
                stage.number: [sum(len(s.rooms) for s in slots) for slots in (stage.inputs, stage.gradients)]
                for stage in STAGES
            },
        }
        FILE.write_text(json.dumps(figures))


class Mallinfo(ctypes.Structure):
    """What the GNU C library's malloc tells of itself (malloc.h): the fourth figure is ``hblks``, of pieces mapped."""

    _fields_ = (("figures", ctypes.c_int * 10),)


def mapped_alone():
    """How many maps of its own malloc makes for 64 MiB, which the kernel has back when they are freed."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo"):
        return None
    library.mallinfo.restype, library.malloc.restype = Mallinfo, ctypes.c_void_p
    library.free.argtypes = (ctypes.c_void_p,)
    before = library.mallinfo().figures[3]
    taken = library.malloc(64 << 20)
    maps = library.mallinfo().figures[3] - before
    library.free(taken)
    return maps


FIGURES = Figures()


def build_stage(stage, num_stages):
    module = Block(WIDTH * (1 + stage) if "GROWING" in os.environ else WIDTH).double()
    alone = SavedTensors(module.parameters)
    with alone.counting():
        _result = module(torch.zeros(ROWS, WIDTH, dtype=torch.float64))
    FIGURES.m_a[stage] = sum(alone.sizes.values())
    MODULES.append(module)
    return module


def loss(output, target):
    return output.mean()


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        return torch.full((WIDTH,), i / 256, dtype=torch.float64), 0


def dataset():
    return Items()


class Writing(torch.optim.Adam):
    def step(self, closure=None):
        super().step(closure)
        FIGURES.write()


def optimizer(parameters):
    return Writing(parameters)


def reserve(stage, *arguments):
    STAGES.append(stage)
    RESERVE(stage, *arguments)


def noting(run, kind):
    def noted(stage, micro, *arguments):
        run(stage, micro, *arguments)
        FIGURES.note(kind, micro, stage.number)

    return noted


def looking(run):
    """What a forward keeps to be run again is there when it is over."""

    def looked(*arguments):
        outputs = run(*arguments)
        FIGURES.look()
        return outputs

    return looked


RESERVE, compute.Stage.reserve = compute.Stage.reserve, reserve
compute.Stage._forward_keeping_inputs = looking(compute.Stage._forward_keeping_inputs)
compute.Stage.backward_input = noting(compute.Stage.backward_input, "I")
compute.Stage.backward_weights = noting(compute.Stage.backward_weights, "W")
WATCHING = FIGURES.saved.counting()
WATCHING.__enter__()
FIGURES.alive.__enter__()
