"""Modules that look back over the slices of a micro-batch, each with a carry of another form."""

import math
from typing import Any

import torch
from torch import nn

WIDTH = 4


def attended(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last positions to all positions so far."""
    behind = keys.size(1) - queries.size(1)
    scores = queries @ keys.transpose(1, 2) / math.sqrt(queries.size(2))
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(behind)
    return scores.masked_fill(~visible, -math.inf).softmax(-1) @ values


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def attend(self, x: torch.Tensor, start: int, carry: Any) -> tuple[torch.Tensor, Any]:
        raise NotImplementedError

    def forward(self, x: torch.Tensor, carry: Any = None, start: int = 0) -> tuple[torch.Tensor, Any]:
        places = torch.arange(start, start + x.size(1), dtype=x.dtype, device=x.device)
        y, carry = self.attend(x + 0.1 * places[:, None], start, carry)
        return x + self.out(y).tanh(), carry


class Listing(_Attending):
    """Its carry is a list with the keys and values of each slice so far; those of earlier slices pass unchanged."""

    def attend(self, x: torch.Tensor, start: int, carry: Any) -> tuple[torch.Tensor, Any]:
        queries, *now = self.project(x).chunk(3, 2)
        left = [*(carry or []), {"k": now[0], "v": now[1]}]
        assert sum(of_slice["k"].size(1) for of_slice in left) == start + x.size(1)
        keys, values = (torch.cat([of_slice[name] for of_slice in left], 1) for name in "kv")
        return attended(queries, keys, values), left


class Joining(_Attending):
    """Its carry is one tensor of all keys and one of all values."""

    def attend(self, x: torch.Tensor, start: int, carry: Any) -> tuple[torch.Tensor, Any]:
        queries, *now = self.project(x).chunk(3, 2)
        keys, values = now if carry is None else (torch.cat(pair, 1) for pair in zip(carry, now, strict=True))
        return attended(queries, keys, values), (keys, values)


class Recurring(_Attending):
    """Its carry is a state, a number that needs no gradient, and a tensor that no later slice uses."""

    def attend(self, x: torch.Tensor, start: int, carry: Any) -> tuple[torch.Tensor, Any]:
        state, seen, _ = (x.new_zeros(x.size(0), WIDTH), torch.zeros(()), None) if carry is None else carry
        decay, inputs, gates = self.project(x).chunk(3, 2)
        outputs = []
        for place in range(x.size(1)):
            state = state * decay[:, place].sigmoid() + inputs[:, place]
            outputs.append(state * gates[:, place].sigmoid())
        assert seen == start
        return torch.stack(outputs, 1), (state, seen + x.size(1), inputs)


CARRYING = (Listing, Joining, Recurring)


class Dropping(Listing):
    """Draws random numbers for each slice."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def attend(self, x: torch.Tensor, start: int, carry: Any) -> tuple[torch.Tensor, Any]:
        y, carry = super().attend(x, start, carry)
        return self.drop(y), carry
