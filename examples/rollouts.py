"""Trains a policy on rollouts, whose number changes from update to update, in a loop of one's own.

    chimera compile dapple D=2 N=1..8 --out rollouts.out
    torchrun --nproc-per-node=4 examples/rollouts.py rollouts.out

In each iteration every copy of the pipelines plays some episodes with the present weights, forwards alone, and trains
on what came of them. Episodes end when the policy is wrong, so copies have other numbers of items than each other, and
than in the iteration before. An update runs the program for as many micro-batches as a copy has, or several of them.
With `--alone` the same trains in one process. What is played is made up: the right action is in the observation.
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Pipeline

WIDTH, ACTIONS = 16, 4
ITEMS, STAGES, COPIES = 2, 2, 2
"""Items of a micro-batch, stages, and the copies of the pipelines that four ranks make."""
EPISODES, LONGEST = 3, 12

Rollouts = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
"""Observations (items, WIDTH); the actions that were taken, and their advantages."""


def build_stage(stage: int, num_stages: int) -> nn.Module:
    """A stage of the policy; it begins with the same weights wherever it is made."""
    torch.manual_seed(stage)
    outputs = ACTIONS if stage == num_stages - 1 else WIDTH
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs)).double()


def loss(scores: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The policy gradient, as a sum and a count: every item weighs the same, whatever copy has it."""
    actions, advantages = target
    chosen = torch.log_softmax(scores, 1).gather(1, actions[:, None])[:, 0]
    return -(advantages * chosen).sum(), len(actions)


def play(policy: Callable[[torch.Tensor], torch.Tensor], iteration: int, copy: int) -> Rollouts:
    """Plays the episodes of a copy, each until the policy takes a wrong action; a rest of a micro-batch is left out."""
    generator = torch.Generator().manual_seed(COPIES * iteration + copy)
    observations = torch.randn(EPISODES, LONGEST, WIDTH, generator=generator, dtype=torch.float64)
    noise = torch.rand(EPISODES, LONGEST, ACTIONS, generator=generator, dtype=torch.float64)
    scores = policy(observations.flatten(0, 1)).unflatten(0, (EPISODES, LONGEST))
    actions = (scores - (-noise.log()).log()).argmax(2)  # a draw by the policy's probabilities
    right = actions == observations[:, :, :ACTIONS].argmax(2)
    played = right.cumprod(1).roll(1, 1).bool()  # up to the first wrong action, which is still played
    played[:, 0] = True
    count = int(played.sum()) // ITEMS * ITEMS
    reward = right[played][:count].double()
    return observations[played][:count], (actions[played][:count], reward - 0.5)


def train(directory: str, iterations: int) -> list[tuple[int, float]]:
    """The items and the loss of each update, each rank with its stages."""
    dist.init_process_group("gloo")
    zeros = torch.zeros(ITEMS, WIDTH, dtype=torch.float64), (torch.zeros(ITEMS).long(), torch.zeros(ITEMS).double())
    with Pipeline(directory, build_stage, loss, zeros) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-2)

        def policy(observations: torch.Tensor) -> torch.Tensor:
            (scores,) = pipe.predict([(observations, None)])
            return scores

        seen = []
        for iteration in range(iterations):
            outcome = pipe.step(play(policy, iteration, pipe.copy))
            optimizer.step()
            optimizer.zero_grad()
            seen.append((int(outcome.weight), outcome.loss))
    return seen if dist.get_rank() == 0 else []


def train_alone(iterations: int) -> list[tuple[int, float]]:
    """Trains the same in one process, by autograd alone."""
    model = nn.Sequential(*(build_stage(stage, STAGES) for stage in range(STAGES)))
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=2e-2), []

    @torch.no_grad()
    def policy(observations: torch.Tensor) -> torch.Tensor:
        return model(observations)

    for iteration in range(iterations):
        rollouts = [play(policy, iteration, copy) for copy in range(COPIES)]
        sums, counts = zip(*(loss(model(observations), target) for observations, target in rollouts), strict=True)
        mean = sum(sums) / sum(counts)
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((sum(counts), mean.item()))
    return seen


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Train a policy on rollouts.")
    options.add_argument("directory", nargs="?", help="what chimera compile has written")
    options.add_argument("--alone", action="store_true", help="train in one process")
    options.add_argument("--iterations", type=int, default=40)
    asked = options.parse_args()
    made = train_alone(asked.iterations) if asked.alone else train(asked.directory, asked.iterations)
    for number, (items, value) in enumerate(made):
        print(f"iteration {number}: {items} items, loss {value:.12f}")
