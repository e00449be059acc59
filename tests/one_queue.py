"""A device with a single hardware queue, played: what becomes of a program with CUDA_DEVICE_MAX_CONNECTIONS=1.

All that a worker posts and computes goes into one queue, and begins in the order in which it was put there. A message
begins when the one before it in its communicator is over, a sum when the one before it on the device is; what stands
behind it waits. A message of several tensors is as many operations:

worker 0:                       its queue:
  recv m0 s1->s0 from w1          recv m0      begins at once
                                  recv m0'     begins when worker 1 has sent the first tensor
  F m1 s0                         F m1         begins behind that: if worker 1 needs its result to send m0, never

Shares nothing with tests/e2e/strict.py, which runs programs by these rules.
"""

from itertools import accumulate, pairwise

from chimera_ir.flow.engine import play
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import AllReduce, Recv, Send, WaitAllReduce, WaitRecv, WaitSend
from chimera_ir.verify.messages import awaited


def finishes(program: Program, tensors: int) -> bool:
    """Whether a program without errors by any rule finishes so, where each message has so many tensors.

    Then it does so with any number of queues, however streams are spread over them: what two of them wait for in a
    queue that they share, they wait for here.
    """
    begins = [*accumulate((len(lane) for lane in program.lanes), initial=0)]
    lines = [line for lane in program.lanes for line in lane]
    starts: dict[int, range] = {}
    events = len(lines)
    for event, line in enumerate(lines):
        if isinstance(line, Send | Recv | AllReduce):
            starts[event] = range(events, events + (1 if isinstance(line, AllReduce) else tensors))
            events = starts[event].stop
    before: list[tuple[int, ...]] = [()] * events
    over: dict[int, tuple[int, ...]] = {}
    for event, posts in enumerate(awaited(program)):
        if isinstance(lines[event], WaitSend | WaitRecv | WaitAllReduce):
            before[event] = tuple(starts[post][-1] for post in posts)
            over |= dict.fromkeys(posts, before[event])
            for post in posts:
                before[starts[post][0]] = (post,)
                for part, start in enumerate(starts[post][1:]):
                    before[start] = tuple(starts[other][part] for other in posts)
    queues: list[list[int]] = []
    for begin, lane in zip(begins, program.lanes, strict=False):
        queue: list[int] = []
        streams: dict[object, list[int]] = {}
        for event, line in enumerate(lane, begin):
            if isinstance(line, Send | Recv | AllReduce):
                queue += starts[event]
                streams.setdefault(_stream(line), []).append(event)
            elif not isinstance(line, WaitSend | WaitRecv | WaitAllReduce):
                before[event] = tuple(queue[-1:])
        for stream in streams.values():
            for previous, event in pairwise(stream):
                before[starts[event][0]] += over[previous]
        queues.append(queue)
    lanes = [range(begin, begin + len(lane)) for begin, lane in zip(begins, program.lanes, strict=False)]
    played = play([*lanes, *queues], before)
    return all(place == len(lane) for place, lane in zip(played.places, [*lanes, *queues], strict=True))


def _stream(line: Send | Recv | AllReduce) -> object:
    """What operations of a worker share that run one after the other."""
    match line:
        case Send(to=peer):
            return Send, peer
        case Recv(source=peer):
            return Recv, peer
        case AllReduce():
            return AllReduce
