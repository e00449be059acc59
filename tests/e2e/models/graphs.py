"""Stages of a graph, which take several values and hand on tensors that only some stages use.

Variables say what is asked for. SOURCES and SINKS name the groups that get an input and a target, if several do; LOSSES
says that each sink has a loss of its own, COUNTS that each loss is a sum and a count. FROZEN lists stages that are not
trained, LAST those that feed no other, TIED those that share weights, EDGES the edges of the model in one process.
PLAIN stages hand on one tensor. Items are of WIDTH numbers, or with SEQUENCE of a sequence of these, in which stages
look back. TOKENS lists stages that get an argument of their own beside, so that others may be None; LACKING says that a
micro-batch may have no input for one of several sources.
"""

import os

import torch
from torch import nn

from chimera_runtime import CountedLoss

ITEMS = 96
SOURCES, SINKS = os.environ.get("SOURCES", "").split(), os.environ.get("SINKS", "").split()
FROZEN, LAST = os.environ.get("FROZEN", "").split(), os.environ["LAST"].split()
PLAIN, SEQUENCE = "PLAIN" in os.environ, [*map(int, os.environ.get("SEQUENCE", "").split())]
TOKENS = os.environ.get("TOKENS", "").split()
WIDTH = int(os.environ.get("WIDTH", "4"))


class Part(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.stage = stage
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, *values, pixels=None, waves=None):
        return self.output(self.joined(*values, pixels, waves))

    def joined(self, *values):
        total = 0.0
        for place, value in enumerate(values, start=1):
            if isinstance(value, dict):
                total = total + place * value["main"] * value["rows"].sign()
                if self.stage % 2:  # others get this tensor, and use it not
                    total = total + value["spare"].sin()
            elif value is not None:
                total = total + place * value
        return total

    def output(self, total):
        y = self.drop(torch.tanh(self.linear(total)))
        if self.training and not PLAIN:
            self.seen += 1
        if PLAIN or str(self.stage) in LAST:
            return y
        return {"main": y, "spare": 2 * y + 1, "rows": torch.ones_like(y[..., :1]).long()}


class Reading(Part):
    def forward(self, *values, pixels=None, waves=None, tokens):
        return self.output(self.joined(*values, pixels, waves, tokens))


class Carrying(Part):
    """Adds up what came before in the sequence."""

    def forward(self, *values, pixels=None, waves=None, carry=None):
        total = self.joined(*values, pixels, waves).cumsum(1) / 4
        total = total if carry is None else total + carry
        return self.output(total), total[:, -1:]


class CarryingReading(Carrying):
    def forward(self, *values, pixels=None, waves=None, tokens, carry=None):
        return super().forward(*values, tokens, pixels=pixels, waves=waves, carry=carry)


def build_stage(stage, num_stages):
    kinds = (Reading, CarryingReading) if str(stage) in TOKENS else (Part, Carrying)
    return kinds[bool(SEQUENCE)](stage).double().requires_grad_(str(stage) not in FROZEN)


def tied(num_stages):
    ends = [(int(stage), "linear.weight") for stage in os.environ.get("TIED", "").split()]
    return [ends] if ends else []


def error(output, target):
    squares = (output - target).square()
    return (squares.sum(), squares.numel()) if "COUNTS" in os.environ else squares.mean()


def distance(output, target):
    return (output - target).abs().mean()


def summed(output, target):
    return (output - target).square()[target > 0].sum()


def positive(target):
    return (target > 0).sum()


class Whole(nn.Module):
    """The whole model in one module, which walks the EDGES."""

    def __init__(self, edges):
        super().__init__()
        self.edges = edges
        self.parts = nn.ModuleList([build_stage(s, 0) for s in range(1 + max(target for _, target, _ in edges))])

    def forward(self, x):
        outputs, sources = [], iter(SOURCES)
        for stage, part in enumerate(self.parts):
            fed = [(outputs[source], name) for source, target, name in self.edges if target == stage]
            values = [value for value, name in fed if not name] if fed else [x[next(sources)] if SOURCES else x]
            outputs.append(part(*values, **{name: value for value, name in fed if name}))
        last = [outputs[int(stage)] for stage in LAST]
        return dict(zip(SINKS, last, strict=True)) if SINKS else last[0]


def name(stage, parameter):
    return f"parts.{stage}.{parameter}"


if "EDGES" in os.environ:

    def reference():
        edges = [(*edge.split("-"), "")[:3] for edge in os.environ["EDGES"].split()]
        return Whole([(int(source), int(target), name) for source, target, name in edges])


counted = CountedLoss(summed, positive)
losses = (counted, counted) if "COUNTS" in os.environ else (error, distance)
loss = dict(zip(SINKS, losses, strict=False)) if "LOSSES" in os.environ else error


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return ITEMS

    def __getitem__(self, item):
        generator = torch.Generator().manual_seed(item)

        def made(names):
            tensors = [torch.randn(*SEQUENCE, WIDTH, generator=generator, dtype=torch.float64) for _ in names or [""]]
            return dict(zip(names, tensors, strict=True)) if names else tensors[0]

        return (made(SOURCES), made(SINKS), {"tokens": made([])}) if TOKENS else (made(SOURCES), made(SINKS))


def collated(items):
    """A micro-batch: its first number decides which source it lacks, if any."""
    inputs, targets, *named = torch.utils.data.default_collate(items)
    drawn = int(abs(inputs[SOURCES[0]].flatten()[0]) * 1000) % (len(SOURCES) + 1)
    if drawn < len(SOURCES):
        inputs[SOURCES[drawn]] = None
    return inputs, targets, *named


collate = collated if "LACKING" in os.environ else None
dataset = validation = Items


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)
