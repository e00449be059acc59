"""A model whose updates 3 to 5 fail where the host waits for the GPU."""

import torch
from torch import nn
from torch.nn import functional

WIDTH, FIRST, LAST = 64, 3, 5


def build_stage(stage, num_stages):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


loss = functional.mse_loss


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.full((WIDTH,), i / 64), torch.zeros(WIDTH)


def dataset():
    return Numbers()


class Watched(torch.optim.AdamW):
    """Lets torch raise an error at every wait from the end of an update to the end of another."""

    updates = 0

    def step(self, closure=None):
        super().step(closure)
        self.updates += 1
        watched = FIRST <= self.updates + 1 <= LAST
        torch.cuda.set_sync_debug_mode("error" if watched else "default")
        if self.updates == LAST:
            print(f"watched {LAST - FIRST + 1} updates", flush=True)


def optimizer(parameters):
    return Watched(parameters, lr=1e-3)
