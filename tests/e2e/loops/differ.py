"""Loops whose ranks differ in something that must be the same: an error on all of them that says in what.

    torchrun --nproc-per-node=2 differ.py DIRECTORY TIED CHECKPOINTS

Both ranks hold both stages of DIRECTORY. In TIED each rank holds a stage, and both share a parameter. Each case has a
pipeline of its own.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Checkpoints, Misuse, Pipeline
from chimera_runtime.errors import BadModel, RanksDiffer
from chimera_runtime.ranks import agreement

B, WIDTH, N, UPDATES = 2, 4, 4, 5


def stage(number: int, _stages: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Scaled(nn.Module):
    """Its scale is set by the first micro-batch that comes."""

    def __init__(self, number: int, _stages: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear, self.scale, self.is_set = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            self.is_set = True
            with torch.no_grad():
                self.scale.div_(x.std(0))
        return self.linear(x) * self.scale


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, B * N, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x, y


def sgd(pipe: Pipeline, **settings: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(pipe.parameters(), **{"lr": 0.1} | settings)


class Cases:
    """Each method is a case; it raises an error of the kind, with the words, that it is listed with."""

    def __init__(self, directory: str, tied: str, folder: str) -> None:
        self.directory, self.tied, self.folder = directory, tied, folder
        self.rank = dist.get_rank()
        self.is_odd = self.rank == 1
        self.raised_in = -1

    @contextmanager
    def pipe(self, directory: str = "", **options: Any) -> Iterator[Pipeline]:
        x, y = batch(0)
        pipe = Pipeline(
            directory or self.directory,
            options.pop("build", stage),
            options.pop("loss", loss),
            (x[:B], y[:B]),
            **options,
        )
        try:
            yield pipe
        finally:
            with suppress(RanksDiffer):
                pipe.close()

    def train(
        self, pipe: Pipeline, optimizer: torch.optim.Optimizer, after: Callable[[int], None] = lambda _: None
    ) -> None:
        for update in range(UPDATES):
            self.raised_in = update
            pipe.step(batch(update)).loss  # noqa: B018
            optimizer.step()
            optimizer.zero_grad()
            after(update)

    # ---- optimizers

    def a_scheduler_steps_on_one_rank(self) -> None:
        with self.pipe() as pipe:
            optimizer = sgd(pipe)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            self.train(pipe, optimizer, lambda update: scheduler.step() if self.is_odd or update < 2 else None)

    def weight_decay_differs(self) -> None:
        with self.pipe() as pipe:
            self.train(pipe, sgd(pipe, weight_decay=0.1 * self.rank))

    def a_tied_parameter_has_another_optimizer(self) -> None:
        with self.pipe(self.tied, tied=[[(0, "0.weight"), (1, "0.weight")]]) as pipe:
            self.train(pipe, (torch.optim.AdamW if self.is_odd else torch.optim.SGD)(pipe.parameters(), lr=0.1))

    def one_rank_skips_a_step_of_its_optimizer(self) -> None:
        with self.pipe(self.tied, tied=[[(0, "0.weight"), (1, "0.weight")]]) as pipe:
            optimizer = sgd(pipe)
            for update in range(UPDATES):
                pipe.step(batch(update)).loss  # noqa: B018
                if not (self.is_odd and update == 1):
                    optimizer.step()
                optimizer.zero_grad()

    def one_rank_steps_twice(self) -> None:
        with self.pipe(self.tied, tied=[[(0, "0.weight"), (1, "0.weight")]]) as pipe:
            optimizer = sgd(pipe)
            self.train(pipe, optimizer, lambda _: optimizer.step() if self.is_odd else None)

    def scalers_decide_apart(self) -> None:
        with self.pipe(self.tied, tied=[[(0, "0.weight"), (1, "0.weight")]]) as pipe:
            optimizer, scaler = sgd(pipe), torch.amp.GradScaler("cpu", init_scale=64.0)
            for update in range(UPDATES):
                pipe.step(batch(update), scaler=scaler).loss  # noqa: B018
                if self.is_odd and update == 1:
                    next(pipe.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    # ---- what step is given

    def one_rank_accumulates(self) -> None:
        with self.pipe() as pipe:
            pipe.step(batch(0), accumulate=self.is_odd).loss  # noqa: B018

    def each_reads_its_own(self) -> None:
        with self.pipe(self.tied, tied=[[(0, "0.weight"), (1, "0.weight")]]) as pipe:
            pipe.step(batch(self.rank)).loss  # noqa: B018

    def each_reads_its_own_micro_batches(self) -> None:
        x, y = batch(self.rank)
        with self.pipe(self.tied, tied=[[(0, "0.weight"), (1, "0.weight")]]) as pipe:
            pipe.step(lambda m: (x[m * B : m * B + B], y[m * B : m * B + B])).loss  # noqa: B018

    def one_rank_leaves_out_a_mini_batch_and_nobody_reads_the_loss(self) -> None:
        with self.pipe() as pipe:
            optimizer = sgd(pipe)
            for update in range(UPDATES):
                if not (self.is_odd and update == 1):
                    pipe.step(batch(update))
                    optimizer.step()
                    optimizer.zero_grad()

    def one_rank_leaves_out_a_mini_batch_of_its_loader(self) -> None:
        with self.pipe() as pipe:
            optimizer = sgd(pipe)
            for update, mini_batch in enumerate(pipe.loader([*zip(*batch(0), strict=True)] * UPDATES)):
                if not (self.is_odd and update == 1):
                    pipe.step(mini_batch).loss  # noqa: B018
                    optimizer.step()
                    optimizer.zero_grad()

    def loaders_have_other_seeds(self) -> None:
        with self.pipe() as pipe:
            for mini_batch in pipe.loader([*zip(*batch(0), strict=True)], shuffle=True, seed=self.rank):
                pipe.step(mini_batch).loss  # noqa: B018

    def each_evaluates_its_own(self) -> None:
        with self.pipe() as pipe:
            pipe.evaluate([batch(3), batch(4 + self.rank)])

    def one_rank_evaluates_other_mini_batches_of_its_loader(self) -> None:
        with self.pipe() as pipe:
            pipe.evaluate(pipe.loader([*zip(*batch(0), strict=True)], shuffle=True, seed=self.rank))

    def only_one_rank_reads_the_loss(self) -> None:
        """It leaves, and the other one says why."""
        with self.pipe() as pipe:
            for update in range(UPDATES):
                outcome = pipe.step(batch(update + 10 * self.rank))
                if not self.is_odd:
                    outcome.loss  # noqa: B018
                for parameter in pipe.parameters():
                    parameter.grad = None

    # ---- replicas

    def weights_of_a_replica_change_on_one_rank(self) -> None:
        def nudge(update: int) -> None:
            if update == 0 and self.is_odd:
                [*pipe.parameters()][-1].data[0] += 1e-3

        with self.pipe() as pipe:
            self.train(pipe, sgd(pipe), nudge)

    def replicas_that_differ_are_not_saved(self) -> None:
        with self.pipe() as pipe:
            checkpoints = Checkpoints(self.folder, pipe, sgd(pipe))
            if self.is_odd:
                next(pipe.parameters()).data[0] += 1e-3
            try:
                checkpoints.save()
            finally:
                assert not [*Path(self.folder).glob("*")]
                checkpoints.close()

    def replicas_that_differ_are_not_exported(self) -> None:
        with self.pipe() as pipe:
            if self.is_odd:
                next(pipe.parameters()).data[0] += 1e-3
            pipe.export_weights(Path(self.folder) / "weights.pt")

    # ---- arguments and modules

    def seeds_differ(self) -> None:
        with self.pipe(seed=self.rank):
            pass

    def layouts_differ(self) -> None:
        with self.pipe(layout=("pipeline", "replica")[self.rank]):
            pass

    def names_are_equal_on_ranks(self) -> None:
        tied = [[(0, "0.weight"), (1, "0.weight")]]  # may have one name
        with self.pipe(self.tied, tied=tied, name=lambda _stage, parameter: parameter):
            pass

    def names_depend_on_the_rank(self) -> None:
        with self.pipe(name=lambda stage, parameter: f"{self.rank}.{stage}.{parameter}"):
            pass

    def parameters_are_replaced(self) -> None:
        with self.pipe() as pipe:
            for module in pipe.stages.values():
                module.load_state_dict({n: p.clone() for n, p in module.state_dict().items()}, assign=True)
            self.train(pipe, sgd(pipe))

    def forwards_write_what_depends_on_their_micro_batches(self) -> None:
        with self.pipe(build=Scaled) as pipe:
            assert len(pipe.remarks) == 2, "both stages"
            self.train(pipe, sgd(pipe))

    def adapters_come_during_training(self) -> None:
        def inject(update: int) -> None:
            if update == 1:
                for module in pipe.stages.values():
                    module.append(nn.Linear(WIDTH, WIDTH))

        with self.pipe() as pipe:
            self.train(pipe, sgd(pipe), inject)

    def a_module_is_swapped(self) -> None:
        with self.pipe() as pipe:
            for module in pipe.stages.values():
                module[0] = nn.Linear(WIDTH, WIDTH)
            pipe.step(batch(0))

    def a_loss_has_no_graph(self) -> None:
        with self.pipe(loss=lambda output, target: loss(output.detach(), target)) as pipe:
            pipe.step(batch(0))

    # ---- what stays right

    def parts_that_a_rank_does_not_use_may_be_none(self) -> None:
        """Inputs and targets are used on other ranks, and optimizers there may have other settings."""
        with self.pipe(self.tied, tied=[[(0, "0.weight"), (1, "0.weight")]]) as pipe:
            shared = {"stages.0.0.weight"}
            groups = [[p for n, p in pipe.named_parameters() if (n in shared) is there] for there in (True, False)]
            optimizer = torch.optim.SGD(
                [{"params": groups[0], "lr": 0.2}, {"params": groups[1], "lr": 0.1 + self.rank}]
            )
            for update in range(2 * UPDATES):
                x, y = batch(update)
                pipe.step((None, y) if self.is_odd else (x, None)).loss  # noqa: B018
                optimizer.step()
                optimizer.zero_grad()
            pipe.check_replicas()
        raise AssertionError("all is right")


EXPECTED: dict[str, tuple[type[Exception], str]] = {
    "a_scheduler_steps_on_one_rank": (
        RanksDiffer,
        r"update 4: .* step stage 0 in different ways \(lr is .* on rank 0 ",
    ),
    "weight_decay_differs": (RanksDiffer, r"update 2: .* \(weight_decay is 0.0 on rank 0 and 0.1 on rank 1\)"),
    "a_tied_parameter_has_another_optimizer": (
        RanksDiffer,
        "step the tie of stages 0 and 1 in different ways .*optimizer is SGD on rank 0 and AdamW on rank 1",
    ),
    "one_rank_skips_a_step_of_its_optimizer": (
        RanksDiffer,
        r"update 3: ranks differ in the steps .*is 1 on rank 0 and 0 on rank 1",
    ),
    "one_rank_steps_twice": (RanksDiffer, "update 2: .*steps since the last update is 1 on rank 0 and 2 on rank 1"),
    "scalers_decide_apart": (RanksDiffer, "update 3: .*GradScaler is 64.0 on rank 0 and 32.0 on rank 1.*pipe.unscale_"),
    "one_rank_accumulates": (RanksDiffer, "accumulate is False on rank 0 and True on rank 1"),
    "each_reads_its_own": (RanksDiffer, "update 1: ranks of copy 0 are given different inputs .*different targets"),
    "each_reads_its_own_micro_batches": (RanksDiffer, "update 1: ranks of copy 0 are given different inputs"),
    "one_rank_leaves_out_a_mini_batch_and_nobody_reads_the_loss": (RanksDiffer, "update 2: .* different inputs"),
    "one_rank_leaves_out_a_mini_batch_of_its_loader": (RanksDiffer, "update 2: .*item is 8 on rank 0 and 16 on rank 1"),
    "loaders_have_other_seeds": (RanksDiffer, "update 1: .*seed is 0 on rank 0 and 1 on rank 1"),
    "each_evaluates_its_own": (RanksDiffer, "an evaluation: ranks of copy 0 are given different inputs .* targets"),
    "one_rank_evaluates_other_mini_batches_of_its_loader": (RanksDiffer, "an evaluation: .*seed is 0 on rank 0 and 1"),
    "only_one_rank_reads_the_loss": (RanksDiffer, "update 1: ranks of copy 0 are given different inputs"),
    "weights_of_a_replica_change_on_one_rank": (RanksDiffer, "update 3: the replicas of stage 1 have drifted apart"),
    "replicas_that_differ_are_not_saved": (RanksDiffer, "after update 0: the replicas of stage 0 have drifted apart"),
    "replicas_that_differ_are_not_exported": (RanksDiffer, "the replicas of stage 0 have drifted apart"),
    "forwards_write_what_depends_on_their_micro_batches": (
        RanksDiffer,
        r"update 3: the replicas of stage 0 have drifted apart \(a digest of stages.0.scale, which the forward writes, "
        "is .* on rank 0 and .* on rank 1.; .* keep in a buffer",
    ),
    "seeds_differ": (Misuse, "seed is 0 on rank 0 and 1 on rank 1: every rank makes the pipeline with the same"),
    "layouts_differ": (Misuse, "layout is pipeline on rank 0 and replica on rank 1"),
    "names_are_equal_on_ranks": (Misuse, "gives 0.bias to 0.bias of stage 0 and to 0.bias of stage 1: give each"),
    "names_depend_on_the_rank": (Misuse, "the name 0.0.0.weight on rank 0 and 1.0.0.weight on rank 1: let it depend"),
    "parameters_are_replaced": (Misuse, "0.weight of stage 0 is not a parameter that the pipeline was made with"),
    "adapters_come_during_training": (Misuse, "2.weight of stage 0 is not a parameter that the pipeline was made with"),
    "a_module_is_swapped": (Misuse, "0.weight of stage 0 is not a parameter that the pipeline was made with"),
    "a_loss_has_no_graph": (BadModel, "loss returned tensors that need no gradient"),
    "parts_that_a_rank_does_not_use_may_be_none": (AssertionError, "all is right"),
}


def main() -> None:
    torch.set_num_threads(1)
    agreement._PATIENCE = 0.5
    dist.init_process_group("gloo")
    cases = Cases(*sys.argv[1:])
    assert {name for name in vars(Cases) if "_" in name.strip("_")} == {*EXPECTED}
    for name, (kind, words) in EXPECTED.items():
        print(name, flush=True)
        with pytest.raises(kind, match=words):
            getattr(cases, name)()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
