"""Mistakes that programs with pipelines have made, each on two ranks: gloo lets them pass, NCCL hangs or races.

    torchrun --nproc-per-node=2 old_bugs.py gloo|strict NAME [NAME ..]

A rank says that a case is right if what it has at its end is what it should have. `BUGS` says where each mistake was
seen. Where the speed of the other rank decides whether gloo passes, a sleep is there so that it does.
"""

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

SIZE = 64


def require(came: torch.Tensor, value: float) -> None:
    """Passes if all numbers are a value."""
    assert torch.all(came == value), f"{came} in place of {value}"


def communicator(messages: bool = True, made: bool = True) -> dist.ProcessGroup:
    """A communicator of both ranks, by default one that has carried a message."""
    group = dist.new_group([0, 1], backend=sys.argv[1])
    assert isinstance(group, dist.ProcessGroup)
    token = torch.zeros(1)
    if made and not messages:
        dist.all_reduce(token, group=group)
    elif made and dist.get_rank() == 0:
        dist.send(token, 1, group)
    elif made:
        dist.recv(token, 0, group)
    return group


def sends_first(rank: int) -> None:
    """Both ranks post a send, then a receive, in one communicator."""
    group = communicator()
    mine, came = torch.full((SIZE,), float(rank)), torch.empty(SIZE)
    works = dist.isend(mine, 1 - rank, group), dist.irecv(came, 1 - rank, group)
    for work in works:
        work.wait()
    require(came, 1 - rank)


def tags_mixed_up(rank: int) -> None:
    """The messages are received in another order than they are sent, and have tags."""
    group = communicator()
    first, second = torch.full((SIZE,), 1.0), torch.full((SIZE,), 2.0)
    if rank == 0:
        works = dist.isend(first, 1, group, tag=1), dist.isend(second, 1, group, tag=2)
    else:
        first, second = torch.empty(SIZE), torch.empty(SIZE)
        works = dist.irecv(second, 0, group, tag=2), dist.irecv(first, 0, group, tag=1)
    for work in works:
        work.wait()
    require(first, 1)
    require(second, 2)


def receives_deferred(rank: int) -> None:
    """A V schedule: rank 0 has stages 0 and 3, rank 1 stages 1 and 2. Each receive is posted where it is needed.

    Rank 0 is one micro-batch ahead, as 1F1B has it. A stage adds 1, and micro-batch m begins with 10 m.
    """
    group, sends, outputs = communicator(), [], []
    came = torch.empty(SIZE)
    for micro in range(4):
        if rank == 0 and micro < 3:
            sends.append(dist.isend(torch.full((SIZE,), 10.0 * micro + 1), 1, group, tag=micro))
        if rank == 0 and micro > 0:
            dist.irecv(came, 1, group, tag=10 + micro - 1).wait()
            outputs.append(came + 1)
        if rank == 1 and micro < 3:
            dist.irecv(came, 0, group, tag=micro).wait()
            sends.append(dist.isend(came + 2, 0, group, tag=10 + micro))
    for work in sends:
        work.wait()
    for micro, output in enumerate(outputs):
        require(output, 10 * micro + 4)


def sums_crossed(rank: int) -> None:
    """Two sums in two communicators, which the ranks launch in another order."""
    groups = communicator(messages=False), communicator(messages=False)
    sums = torch.full((SIZE,), 1.0), torch.full((SIZE,), 2.0)
    works = [dist.all_reduce(sums[k], group=groups[k], async_op=True) for k in ((0, 1) if rank == 0 else (1, 0))]
    for work in works:
        work.wait()
    require(sums[0], 2)
    require(sums[1], 4)


def sent_buffer_reused(rank: int) -> None:
    """A gradient is sent from the buffer into which the next activations are received, before that is over."""
    down, up = communicator(), communicator()
    if rank == 0:
        gradient = torch.empty(SIZE)
        works = [dist.irecv(gradient, 1, up), dist.isend(torch.full((SIZE,), 1.0), 1, down)]
        time.sleep(2.0)
        works.append(dist.isend(torch.full((SIZE,), 5.0), 1, down))
        for work in works:
            work.wait()
        require(gradient, 2)
        return
    buffer = torch.empty(SIZE)
    dist.irecv(buffer, 0, down).wait()
    buffer.mul_(2)
    time.sleep(0.1)
    works = [dist.isend(buffer, 0, up), dist.irecv(buffer, 0, down)]
    for work in works:
        work.wait()
    require(buffer, 5)


def received_buffer_reused(rank: int) -> None:
    """The next activations are received into the buffer that the backward of those before has still to read."""
    down = communicator()
    if rank == 0:
        works = [dist.isend(torch.full((SIZE, 1), 1.0), 1, down)]
        time.sleep(2.0)
        works.append(dist.isend(torch.full((SIZE, 1), 5.0), 1, down))
        for work in works:
            work.wait()
        return
    weight, buffer = torch.ones(1, SIZE, requires_grad=True), torch.empty(SIZE, 1)
    dist.irecv(buffer, 0, down).wait()
    output = weight @ buffer
    next_one = dist.irecv(buffer, 0, down)
    output.sum().backward()
    require(weight.grad, 1)
    next_one.wait()
    require(buffer, 5)


def made_by_first_message(rank: int) -> None:
    """The first message of each of two communicators makes it, and the ranks begin with different ones."""
    groups = communicator(made=False), communicator(made=False)
    mine, came = torch.full((SIZE,), float(rank)), torch.empty(SIZE)
    send = dist.isend(mine, 1 - rank, groups[rank])
    dist.irecv(came, 1 - rank, groups[1 - rank]).wait()
    send.wait()
    require(came, 1 - rank)


def posted_ahead(rank: int) -> None:
    """Three receives are posted ahead, the second of which waits for what is computed meanwhile."""
    down, up = communicator(), communicator()
    numbers = [torch.full((SIZE,), float(k)) for k in range(3)] if rank == 0 else [torch.empty(SIZE) for _ in range(3)]
    answer = torch.empty(SIZE)
    if rank == 0:
        works = [dist.isend(numbers[0], 1, down)]
        dist.irecv(answer, 1, up).wait()
        works += [dist.isend(numbers[k], 1, down) for k in (1, 2)]
    else:
        works = [dist.irecv(number, 0, down) for number in numbers]
        works.pop(0).wait()
        works.append(dist.isend(numbers[0] + 7, 0, up))
    for work in works:
        work.wait()
    for k, number in enumerate(numbers):
        require(number, k)
    if rank == 0:
        require(answer, 7)


def read_too_early(rank: int) -> None:
    """What was received is copied to the host without blocking it, and read at once."""
    group = communicator()
    if rank == 0:
        dist.send(torch.full((SIZE,), 3.0), 1, group)
        return
    came, on_host = torch.empty(SIZE), torch.zeros(SIZE)
    dist.recv(came, 0, group)
    on_host.copy_(2 * came, non_blocking=True)
    require(torch.tensor(on_host.numpy().tolist()), 6)


def staging_reused(rank: int) -> None:
    """The host fills the memory that it copies from without blocking again, before the first copy is over."""
    group = communicator()
    first, second = torch.empty(SIZE), torch.empty(SIZE)
    if rank == 1:
        for tensor, value in ((first, 1), (second, 5)):
            dist.recv(tensor, 0, group)
            require(tensor, value)
        return
    staged = torch.empty(SIZE)
    array = staged.numpy()
    for tensor, value in ((first, 1), (second, 5)):
        array[:] = value
        tensor.copy_(staged, non_blocking=True)
    works = [dist.isend(tensor, 1, group) for tensor in (first, second)]
    for work in works:
        work.wait()


def sent_memory_given_back(rank: int) -> None:
    """The memory of an output is given back while it is sent: only the graph of gradients is still needed of it."""
    group = communicator()
    if rank == 1:
        came = torch.empty(SIZE)
        dist.recv(came, 0, group)
        require(came, 2)
        return
    weight = torch.ones(SIZE, requires_grad=True)
    output = 2 * weight
    time.sleep(2.0)
    work = dist.isend(output, 1, group)
    output.data = torch.empty(1)
    (3 * weight).sum().backward()
    work.wait()


BUGS: dict[Callable[[int], None], str] = {
    sends_first: "NVIDIA/nccl#479, pytorch/pytorch#172668",
    tags_mixed_up: "pytorch/pytorch#94819, #125079",
    receives_deferred: "pytorch/pytorch#172668, #178815: receives of an interleaved or V schedule put off to their use",
    sums_crossed: "NVIDIA/nccl#195, NVIDIA/Megatron-LM#107",
    sent_buffer_reused: "deepspeedai/DeepSpeed#2800: RecvActivation before SendGrad",
    received_buffer_reused: "deepspeedai/DeepSpeed#2800: one buffer too few",
    made_by_first_message: "pytorch/pytorch#108378",
    posted_ahead: "NVIDIA/nccl#783: two streams need not progress independently; with CUDA_DEVICE_MAX_CONNECTIONS=1",
    read_too_early: "pytorch/pytorch#127612, sgl-project/sglang#16493",
    staging_reused: "1bit-MONSTER/1bit-MONSTER#2436, pytorch/tutorials#3261",
    sent_memory_given_back: "NVIDIA/Megatron-LM#4047",
}


def main() -> None:
    """Runs some of them, one after the other."""
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    importlib.import_module("tests.e2e.strict")
    backend, *names = sys.argv[1:]
    dist.init_process_group(backend)
    for name in names:
        try:
            {bug.__name__: bug for bug in BUGS}[name](dist.get_rank())
        except RuntimeError:
            time.sleep(1.0)  # for the other rank to give up as well, before it sees that the connections are closed
            raise
        print(f"{name} is right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
