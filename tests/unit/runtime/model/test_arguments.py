"""What functions of a model file are given by name."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.errors import Misuse
from chimera_runtime.model.model import bound, label, takes_names, with_names

OFFERED = {"steps": 10, "seed": 3, "args": ["--wide"]}
FILE = Path("model.py")


def test_a_function_gets_by_name_what_it_asks_for_and_nothing_else() -> None:
    def plain(x: int) -> int:
        return x

    def asking(x: int, args: list[str], *, steps: int, depth: int = 2) -> tuple[Any, ...]:
        return x, args, steps, depth

    assert bound(plain, 1, OFFERED, FILE) is plain
    assert bound(asking, 1, OFFERED, FILE)(5) == (5, ["--wide"], 10, 2)
    assert bound(lambda steps, seed: (steps, seed), 2, OFFERED, FILE)("own", "words") == ("own", "words")
    assert bound(partial(torch.optim.SGD, lr=1.0), 1, OFFERED, FILE)([nn.Parameter(torch.ones(1))]).defaults["lr"] == 1


def test_what_there_is_not_is_refused_by_its_name() -> None:
    def asking(x: int, depth: int, seed: int) -> int:
        return x + depth + seed

    with pytest.raises(Misuse, match=r"model.py: asking takes depth, .* by name it may take steps, seed, args"):
        bound(asking, 1, OFFERED, FILE)


def test_an_optimizer_that_asks_for_names_gets_them_also_for_copies_with_the_same_attributes() -> None:
    def optimizer(named_parameters: Any) -> list[str]:
        return [name for name, _ in named_parameters]

    assert takes_names(optimizer)
    assert not takes_names(torch.optim.SGD)
    module = nn.Linear(3, 4)
    label({"mine": module.weight, "h.2.bias": module.bias})
    copies = [nn.Parameter(p.data) for p in module.parameters()]
    for copy, parameter in zip(copies, module.parameters(), strict=True):
        copy.__dict__.update(parameter.__dict__)
    assert with_names(optimizer)(copies) == ["mine", "h.2.bias"]
