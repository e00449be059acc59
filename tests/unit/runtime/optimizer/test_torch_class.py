"""Kinds of optimizers and schedulers: by their names, and by the class of torch that they are derived from."""

import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from chimera_runtime.optimizer.optimizer_state import TorchClass, class_of


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
    assert class_of(adam) == TorchClass("Mine", "AdamW")
    assert str(class_of(adam)) == "Mine (AdamW)"
    assert class_of(Bare([parameter], {})) == TorchClass("Bare", "")
    assert str(class_of(ConstantLR(adam))) == "ConstantLR"
    assert class_of(Steps(adam)) == TorchClass("Steps", "")
    assert class_of(object()) == TorchClass("object", "")


def test_kinds_go_together_by_either_name_and_with_one_that_is_not_known() -> None:
    assert TorchClass("AdamW", "AdamW").can_read(TorchClass("Mine", "AdamW"))
    assert TorchClass("Bare", "").can_read(TorchClass("Bare", ""))
    assert TorchClass("Bare", "").can_read(None)
    assert not TorchClass("Other", "").can_read(TorchClass("Bare", ""))
    assert not TorchClass("Adam", "Adam").can_read(TorchClass("AdamW", "AdamW"))
