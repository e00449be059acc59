"""Losses and times of each update, gathered on rank 0 while the next ones run."""

import time
from collections import Counter, defaultdict, deque

import torch
import torch.distributed as dist

from support.compute import Stage
from support.metrics import Metrics
from support.streams import Unwritable, say
from support.world import World


class Progress:
    """What rank 0 prints and writes; on every rank, what it contributes.

    Nothing in the loop waits for a number: a gather that is complete is read at the end of a later update. Updates that
    overlap begin together, and each lasts from the end of the one before. Of those a worker has a part in several at
    any time, so as many are gathered together: with an update for each micro-batch, a gather for each would take longer
    than all messages.
    """

    def __init__(
        self, world: World, updates: int, weight: float, rehearsal: bool, metrics: Metrics | None = None
    ) -> None:
        self._world = world
        self._metrics = metrics
        self._silenced: Unwritable | None = None
        self._group = world.chat
        self._updates = updates
        self._weight = weight
        self._rehearsal = rehearsal
        self._apart = rehearsal and not world.job.period
        self._first = dist.get_rank() == 0
        job = world.job
        self._together = max(1, job.workers // job.micro_batches) if job.period else 1
        self._ended = 0
        self._facts: list[tuple[float, float, float, float]] = []
        self._pending: deque[tuple[dist.Work, list[torch.Tensor] | None, torch.Tensor]] = deque()
        self._start = 0.0
        self._cpu = 0.0
        self._before = 0.0
        self._count = 0

    def begin(self) -> None:
        """An update begins now, or all of those that overlap; in a rehearsal at the same moment everywhere."""
        if self._rehearsal:
            self._world.meet("for the step to begin")
        self._cpu = time.process_time()
        self._start = time.time()
        self._before = self._before or self._start

    def end(self, loss: float) -> None:
        """The update is over on this rank; ``loss`` is the sum over the micro-batches whose loss it computed."""
        self._facts.append((self._start, time.time(), time.process_time() - self._cpu, loss))
        self._cpu = time.process_time()
        self._ended += 1
        if len(self._facts) == self._together or self._ended == self._updates:
            self._gather()

    def _gather(self) -> None:
        facts, self._facts = torch.tensor(self._facts, dtype=torch.float64), []
        room = [torch.empty_like(facts) for _ in range(dist.get_world_size())] if self._first else None
        work = dist.gather(facts, room, dst=0, group=self._group, async_op=True)
        assert work is not None
        self._pending.append((work, room, facts))
        while self._pending and self._pending[0][0].is_completed():
            self._read(*self._pending.popleft())

    def finish(self) -> None:
        """Waits for what is still under way."""
        while self._pending:
            self._read(*self._pending.popleft())

    def _read(self, work: dist.Work, room: list[torch.Tensor] | None, _: torch.Tensor) -> None:
        self._world.settle(work, "for the losses and times of a step")
        if room is None:
            return
        for update in torch.stack(room, dim=1):
            self._tell(*update.unbind(dim=1))

    def _tell(self, starts: torch.Tensor, ends: torch.Tensor, cpu: torch.Tensor, losses: torch.Tensor) -> None:
        """One update, of which every rank says the same four."""
        end = float(ends.max())
        seconds = end - (float(starts.min()) if self._apart else self._before)
        loss = None if self._rehearsal else float(losses.sum()) * self._weight
        self._before = end
        if self._metrics is not None:
            self._metrics.add(loss, seconds, float(cpu.max()))
        self._count += 1
        self._print(loss, seconds)

    def _print(self, loss: float | None, seconds: float) -> None:
        """A line that cannot be written is no reason to stop training."""
        number = f"{self._count:>{len(str(self._updates))}}/{self._updates}"
        if self._silenced is None:
            try:
                say(f"step {number}{'' if loss is None else f'  loss {loss:.6f}'}  {seconds:.3f} s")
            except Unwritable as error:
                self._silenced = error

    def close(self) -> None:
        """Nothing more is to come.

        Raises
        ------
        Unwritable
            If not everything could be written.
        """
        if self._metrics is not None:
            self._metrics.close()
        if self._silenced is not None:
            raise self._silenced


class Overlapping:
    """Tells progress of overlapping updates: of each when every stage of this rank has made its step for it.

    It holds no stage, and a stage may hold it: a cycle of references would keep the communicators, and their threads,
    until the interpreter ends.
    """

    def __init__(self, progress: Progress, stages: int) -> None:
        self._progress = progress
        self._stages = stages
        self._steps: Counter[int] = Counter()
        self._losses: defaultdict[int, float] = defaultdict(float)

    def stepped(self, stage: Stage) -> None:
        """To be called after each step of each stage."""
        update = stage.updates - 1
        self._steps[update] += 1
        self._losses[update] += stage.take_loss(update)
        if self._steps[update] == self._stages:
            del self._steps[update]
            self._progress.end(self._losses.pop(update))
