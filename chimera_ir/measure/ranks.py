"""One rank of ``chimera profile links``: from torchrun to the measured times, or to a message and an exit status."""

import traceback
from collections.abc import Callable

import torch.distributed as dist

from chimera_ir.measure.links import LinkRequest, measure
from chimera_ir.measure.network import LinkTimes
from chimera_ir.measure.samples import ShowProgress
from chimera_ir.output import OutputRefused
from chimera_runtime.errors import MISUSED, OUR_FAULT, Misuse, PeerLost
from chimera_runtime.ranks.rendezvous import find_store
from chimera_runtime.tools.fail.faults import Faults

_NAME = "chimera-profile"


def run(request: LinkRequest, ready: Callable[[], None], progress: ShowProgress) -> LinkTimes | None:
    """Returns the times of messages and sums on rank 0, None on others.

    Rank 0 calls ``ready`` first, and every rank ``progress`` after each step.

    Does not return if anything fails on any rank: all ranks end, with one message.
    """
    store, rank, size = find_store(request.timeout)
    faults = Faults(store, rank, _NAME)
    faults.watch_signals(size)
    try:
        if size < 2:
            raise Misuse("links lie between ranks: start at least two, as in --nproc-per-node=2")
        if rank == 0:
            ready()
        return measure(store, rank, size, request, progress)
    except (Misuse, OutputRefused) as error:
        faults.end(f"{_NAME}: {error}", MISUSED)
    except PeerLost as error:
        faults.lost(error)
    except (RuntimeError, dist.DistError) as error:
        faults.fail(error)
    except Exception as error:
        faults.end(f"{_NAME}: rank {rank}: our own fault\n{''.join(traceback.format_exception(error))}", OUR_FAULT)
