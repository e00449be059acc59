"""A cluster: its workers, their memory, and the costs of messages and all-reduces."""

from dataclasses import dataclass
from math import log2

from chimera_ir.escapes import as_argument, command_line
from chimera_ir.profile.costs import Device


@dataclass(frozen=True, slots=True)
class Link:
    """A message of L bytes takes alpha + beta L: ``alpha`` in seconds, ``beta`` in seconds per byte (section 3.4).

    ``overhead`` is the time in seconds for which posting a message keeps a processor from computing, o of the LogP
    model (Culler and others 1993). Messages over ``shared`` links that leave a worker at the same time share its
    bandwidth, and so do messages that arrive.
    """

    alpha: float
    beta: float
    overhead: float = 0.0
    shared: bool = False

    def message(self, size: float) -> float:
        """Comm_p2p: seconds of a message of ``size`` bytes, from when its sender begins to post it."""
        return self.overhead + self.alpha + self.beta * size

    def all_reduce(self, size: float, ranks: int) -> float:
        """Comm_allreduce: seconds of an all-reduce of ``size`` bytes by Rabenseifner's algorithm (section 3.4)."""
        return 2 * log2(ranks) * self.alpha + 2 * (ranks - 1) * self.beta * size / ranks

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds to gather ``size`` bytes, of which each rank has a share: the second half of an all-reduce."""
        return self.all_reduce(size, ranks) / 2


def ranks_on_node(ranks: int, per_node: int) -> int:
    """The number of ranks to start on each node: equal ones on the fewest nodes if that is possible, else ``per_node``.

    In the latter case the last node has fewer.
    """
    nodes = -(-ranks // per_node)
    return per_node if ranks % nodes else ranks // nodes


def torchrun(
    ranks: int,
    per_node: int,
    script: str,
    micro_batch_size: int,
    replica_layout: bool,
    split: tuple[int, ...] | None = None,
    sharded_optimizer: bool = False,
    model: str = "",
) -> str:
    """The command line that starts ``script`` on ``ranks`` ranks, to be given on each node if there are several.

    If the nodes cannot have equally many ranks, a comment behind the line says how many the last one has.

    HOST stands for the first node. ``model`` is a model file or the name of a model of transformers, which needs a text
    to train on: FILE stands for it. If ``model`` is empty, MODEL.py stands for the model file.
    """
    option = "--hf" if model and not model.endswith(".py") else "--model"
    words_of_model = [option, as_argument(model or "MODEL.py"), *(["--text", "FILE"] if option == "--hf" else [])]
    nodes = -(-ranks // per_node)
    words = ["torchrun"]
    if nodes > 1:
        words += [f"--nnodes={nodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]
    of_node = ranks_on_node(ranks, per_node)
    words += [f"--nproc-per-node={of_node}", as_argument(script), *words_of_model]
    words += ["--micro-batch-size", str(micro_batch_size)]
    words += [] if split is None else ["--split", ",".join(map(str, split))]
    words += ["--layout", "replica"] if replica_layout else []
    words += ["--shard-optimizer"] if sharded_optimizer else []
    rest = ranks % of_node
    return command_line(words) + (f"  # on one of the nodes --nproc-per-node={rest}" if rest else "")


FREE = Link(0.0, 0.0)
"""The free link that the paper's analysis of schedules assumes (section 2)."""


@dataclass(frozen=True, slots=True)
class HostLink:
    """The link over which a worker moves activations to the memory of its host and back.

    A transfer costs as much as a message over ``link``. ``workers`` consecutive workers of a node have one link
    together, whose bandwidth they share. ``memory`` is the host memory of each worker in bytes; None if unlimited.
    """

    link: Link
    workers: int = 1
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster of ``workers``, ``per_node`` to a node, each with ``memory`` bytes, ``reserved`` not for the model.

    Messages travel over ``between`` from node to node and over ``within`` inside a node; all-reduces over ``sums``.
    ``device`` turns work into time, for profiles that count work. ``host`` is None if nothing can be moved to the host.
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
    host: HostLink | None = None
