"""A cluster: its workers, their memory, and what it costs to talk."""

from dataclasses import dataclass
from math import log2

from chimera_ir.profile.work import Device
from chimera_ir.visible import as_argument, command_line


@dataclass(frozen=True, slots=True)
class Link:
    """A message of L bytes takes alpha + beta L: ``alpha`` in seconds, ``beta`` in seconds per byte (section 3.4).

    ``overhead`` is for how many seconds posting keeps a processor from computing, o of the LogP model (Culler and
    others 1993). Messages over ``shared`` links that leave a worker at the same time share its bandwidth, and so do
    those that arrive. An ``eager`` message leaves whether or not its receipt is posted, and its send is over at once.
    Where ``short`` ones cost something else, that is for them, but for ``shared``, which is of all messages together.
    """

    alpha: float
    beta: float
    overhead: float = 0.0
    shared: bool = False
    eager: bool = False
    short: "Short | None" = None

    def of(self, size: float) -> "Link":
        """What a message of so many bytes costs."""
        return self if self.short is None or size > self.short.up_to else self.short.link

    def message(self, size: float) -> float:
        """Comm_p2p of so many bytes, in seconds, from when its sender begins to post it."""
        link = self.of(size)
        return link.overhead + link.alpha + link.beta * size

    def all_reduce(self, size: float, ranks: int) -> float:
        """Comm_allreduce of so many bytes over r ranks by Rabenseifner's algorithm, in seconds (section 3.4)."""
        return 2 * log2(ranks) * self.alpha + 2 * (ranks - 1) * self.beta * size / ranks


@dataclass(frozen=True, slots=True)
class Short:
    """What messages of at most ``up_to`` bytes cost: an eager link, which says nothing of ports."""

    up_to: int
    link: Link


def torchrun(ranks: int, per_node: int, script: str, micro_batch_size: int, replica_layout: bool) -> str:
    """The line that starts so many ranks, on every node if they take several, where HOST stands for the first."""
    nodes = -(-ranks // per_node)
    words = ["torchrun"]
    if nodes > 1:
        words += [f"--nnodes={nodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]
    words += [f"--nproc-per-node={ranks // nodes}", as_argument(script), "--model", "MODEL.py"]
    words += ["--micro-batch-size", str(micro_batch_size)]
    words += ["--layout", "replica"] if replica_layout else []
    return command_line(words)


FREE = Link(0.0, 0.0)
"""What the paper's analysis of schedules assumes (section 2)."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """So many workers, ``per_node`` to a node, each with ``memory`` bytes of which ``reserved`` are not the model's.

    Messages travel over ``between`` from node to node and over ``within`` inside one; all-reduces over ``sums``.
    ``device`` is what turns work into time, where the cluster is known by it.
    """

    name: str
    workers: int
    per_node: int
    memory: int
    reserved: int
    between: Link
    within: Link
    sums: Link
    device: Device | None = None
