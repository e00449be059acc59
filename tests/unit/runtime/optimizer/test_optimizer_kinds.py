"""Kinds of optimizers and schedulers: by their names, and by the class of torch that they are derived from."""

import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from chimera_runtime.optimizer.optimizer_kinds import Kind, is_same_kind, kind_of


class Mine(torch.optim.AdamW):
    pass


class Bare(torch.optim.Optimizer):
    pass


class Steps(LRScheduler):
    def get_lr(self) -> list[float]:
        return [0.1 for _ in self.optimizer.param_groups]


def test_a_kind_names_the_class_and_that_of_torch() -> None:
    parameter = nn.Parameter(torch.ones(1))
    adam = Mine([parameter])
    assert kind_of(adam) == Kind("Mine", "AdamW")
    assert str(kind_of(adam)) == "Mine (AdamW)"
    assert kind_of(Bare([parameter], {})) == Kind("Bare", "")
    assert str(kind_of(ConstantLR(adam))) == "ConstantLR"
    assert kind_of(Steps(adam)) == Kind("Steps", "")
    assert kind_of(object()) == Kind("object", "")


def test_kinds_go_together_by_either_name_and_with_one_that_is_not_known() -> None:
    assert is_same_kind(Kind("Mine", "AdamW"), Kind("AdamW", "AdamW"))
    assert is_same_kind(Kind("Bare", ""), Kind("Bare", ""))
    assert is_same_kind(None, Kind("Bare", ""))
    assert not is_same_kind(Kind("Bare", ""), Kind("Other", ""))
    assert not is_same_kind(Kind("AdamW", "AdamW"), Kind("Adam", "Adam"))
