"""A loop of one's own where a rank does not come back, with a backend whose waits do not block: the other one goes on.

torchrun --nproc-per-node=2 late.py DIRECTORY
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from chimera_runtime import Pipeline
from chimera_runtime.errors import Misuse, PeerLost
from tests.e2e import strict  # noqa: F401 (registers the backend)

WIDTH, TIMEOUT = 4, 8.0


def build_stage(_stage: int, _num_stages: int) -> torch.nn.Module:
    return torch.nn.Linear(WIDTH, WIDTH)


def main() -> None:
    dist.init_process_group("strict")
    store, example = distributed_c10d._get_default_store(), (torch.ones(1, WIDTH), torch.zeros(1, WIDTH))
    pipe = Pipeline(sys.argv[1], build_stage, torch.nn.functional.mse_loss, example, timeout=TIMEOUT)
    outcome = pipe.step(micro_batches=[example] * pipe.micro_batches)
    assert outcome.loss > 0
    pipe.state_dict()
    for parameter in pipe.parameters():
        parameter.grad = None
    if dist.get_rank() == 1:
        store.wait(["the other rank has seen it"])
        return

    def update() -> None:
        """As in a loop that looks at its gradients: that waits for the device, and gives what is not to be used."""
        outcome = pipe.step(micro_batches=[example] * pipe.micro_batches)
        for parameter in pipe.parameters():
            float(parameter.grad.sum())
        assert outcome.loss > 0

    errors = []
    for call in (update, pipe.state_dict):
        try:
            call()
        except (PeerLost, Misuse) as error:
            errors.append(str(error))
    store.set("the other rank has seen it", "")
    print("\n".join(errors))


if __name__ == "__main__":
    main()
