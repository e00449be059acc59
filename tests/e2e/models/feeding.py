"""A model whose data are a stream, or fail in a data worker, as FEED says: "items", "stream", "raise" or "kill"."""

import os
import signal

import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

WHAT = os.environ.get("FEED", "items")
WIDTH, ITEMS = 4, 22


def item(number: int):
    generator = torch.Generator().manual_seed(number)
    return torch.rand(WIDTH, generator=generator) + torch.rand(()), torch.rand(WIDTH, generator=generator)


class Items:
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, number: int):
        if get_worker_info() is not None and number == 7:
            if WHAT == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if WHAT == "raise":
                raise ValueError("no such file")
        return item(number)


class Flow(IterableDataset):
    def __iter__(self):
        for number in range(ITEMS):
            yield item(number)


def build_stage(stage, num_stages):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))


def loss(output, target):
    return nn.functional.mse_loss(output, target)


def dataset():
    return Flow() if WHAT == "stream" else Items()


def collate(items):
    inputs, targets = zip(*items, strict=True)
    return torch.stack(inputs), torch.stack(targets)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
