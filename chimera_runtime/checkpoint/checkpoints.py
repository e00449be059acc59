"""Checkpoints of a training loop by torch.distributed.checkpoint: asynchronous, atomic, and resumed exactly."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as registry
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.distributed_c10d import PrefixStore

from chimera_runtime.checkpoint.content import (
    FORMATS,
    INFO,
    CheckpointContent,
    CheckpointInfo,
    Objects,
    Stateful,
    names_in,
    paths_of,
    value_of,
)
from chimera_runtime.checkpoint.storage import Lock, Writer, damage, is_whole, others, update_of, whole
from chimera_runtime.errors import BadCheckpoint
from chimera_runtime.errors import data as mistakes
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.ranks.agreement import ObjectExchange
from chimera_runtime.ranks.rendezvous import exchange
from chimera_runtime.state.state import Average
from chimera_runtime.values.mesh_tensors import is_spread, local
from chimera_runtime.values.nested import digest

T = TypeVar("T")

_PATIENCE = 600.0

_number = count()
"""Numbers for the `Checkpoints` of this process; all ranks make them in the same order, so numbers are equal."""


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that was loaded, saved after ``update`` updates and ``items`` items of all copies, and remarks."""

    path: Path
    update: int
    items: int
    remarks: tuple[str, ...] = ()


class Checkpoints:
    """Saves and resumes a pipeline with its optimizers; every rank of the default process group makes and calls it.

    Parameters
    ----------
    directory
        Directory in which checkpoints are saved and looked for; all ranks must see the same files there.
    pipe
        The pipeline.
    optimizers
        One or several optimizers of ``pipe.named_parameters()``; none if the pipeline steps its own in the schedule.
    schedulers
        Learning-rate schedulers of these, one or several; the state of each is saved with the parameters that it
        schedules.
    shared
        Other objects with a state that is the same on all ranks, by name: a GradScaler.
    of_copy
        Other objects with a state that is the same on all ranks of a copy, by name: a data loader.
    of_rank
        Other objects with a state that differs between ranks, by name: they are resumed under the same schedule with
        as many copies.
    averages
        Averages of the weights, by name: tensors by the names of ``pipe.named_parameters()``, or modules by the numbers
        of ``pipe.stages``, AveragedModels too. They are resumed under any schedule, as the weights are.
    keep
        Number of checkpoints that stay; older ones are removed.
    timeout
        Seconds that `wait` waits for a save, and that ranks wait for a rank that reads files.

    Raises
    ------
    Misuse
        If ``keep`` is less than 1, or if ranks name different directories or train different models.
    PeerLost
        If a rank does not make its `Checkpoints` in time.
    """

    def __init__(
        self,
        directory: str | Path,
        pipe: Pipeline,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        schedulers: Stateful | Sequence[Stateful] = (),
        shared: Mapping[str, Stateful] | None = None,
        of_copy: Mapping[str, Stateful] | None = None,
        of_rank: Mapping[str, Stateful] | None = None,
        averages: Mapping[str, Average] | None = None,
        keep: int = 3,
        timeout: float = _PATIENCE,
    ) -> None:
        if keep < 1:
            raise mistakes.copies_are_too_few(keep=keep)
        of_loop = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
        other = next((value for value in of_loop if not isinstance(value, torch.optim.Optimizer)), None)
        if other is not None:
            raise mistakes.is_not_an_optimizer(name=type(other).__name__)
        of_rates = list(schedulers) if isinstance(schedulers, Sequence) else [schedulers]
        optimizing = of_loop or [*pipe.optimizers.values()]
        objects = Objects(dict(shared or {}), dict(of_copy or {}), dict(of_rank or {}), dict(averages or {}))
        self._content = CheckpointContent(pipe, optimizing, of_rates, objects)
        self._directory = Path(directory)
        self._pipe = pipe
        self._keep = keep
        self._timeout = timeout

        # All ranks must name one directory. They exchange its name through the store, before there is a process group.
        store = PrefixStore(f"chimera/checkpoints/{next(_number)}", registry._get_default_store())
        what = f"rank {dist.get_rank()}: wait for all ranks of the default process group to make Checkpoints"
        rank, size = dist.get_rank(), dist.get_world_size()
        directories = exchange(store, "made", rank, size, value=f"{directory}", what=what, seconds=timeout)
        if len({*directories}) > 1:
            raise mistakes.directories_differ(directories=sorted({*directories}))
        self._exchange = ObjectExchange(dist.new_group(backend="gloo"), f"the checkpoints in {directory}", timeout)
        self._lock: Lock | None = None
        self._is_locked = False
        self._saving: tuple[int, Future[Any]] | None = None  # the update of a save that runs, and its end
        self._begun = -pipe.items_used  # items before this job, less those that the pipeline has used by then
        self._stepped: int | None = None  # the update of the newest step of an optimizer
        for optimizer in of_loop:
            optimizer.register_step_post_hook(self._note_step)
        self._require_one_model()

    # ---- saving

    @property
    def items(self) -> int:
        """Number of items of all copies that training has used so far, those before this job included."""
        return self._begun + self._pipe.items_used

    def save(self) -> None:
        """Saves a checkpoint while the next steps run: returns when tensors are copied to memory of the CPU.

        First waits for the save before, and completes the updates of a stream that are under way. When the checkpoint
        is complete, the oldest ones are removed, so that ``keep`` stay. Gradients are not saved.

        Raises
        ------
        BadCheckpoint
            If the save before could not be written, or another job saves in the directory.
        Misuse
            If `step` has made gradients and no optimizer has stepped with them: a resumed run would lack an update. Or
            if something cannot be saved, or differs between ranks that share it.
        ModelError
            If the ``state_dict`` of an object raises an error; on the other ranks it is a BadCheckpoint.
        PeerLost
            If another rank has ended.
        """
        self.wait()

        # Nothing is written unless every rank can save: the checks raise on all ranks, or on none.
        applied = self._exchange.all_gather(self._has_applied())
        if False in applied and True not in applied:
            raise mistakes.gradients_are_not_applied(update=self._pipe.updates)
        self._require_one_model()
        self._pipe.check_replicas()

        # Each rank collects its content; from the facts of all ranks it checks what must be equal on them.
        state = self._pipe.state_dict()
        content, facts = self._exchange.on_all_ranks(lambda: self._content.part(state))
        complete = self._content.complete(content, self._exchange.all_gather(facts), self.items)

        # torch copies the tensors, and writes them in a thread.
        self.claim()
        writer = Writer(self._directory, self._pipe.updates, self._keep)
        saving = cast(Future[Any], async_save(complete, storage_writer=writer, process_group=self._exchange.group))
        self._saving = self._pipe.updates, saving

    def _require_one_model(self) -> None:
        """Raises Misuse if pipelines of several models give parameters the same name: they would be mixed up."""
        if self._pipe.copies * self._pipe.job.workers == self._exchange.size:
            return
        digests_here = {
            name: digest([tensor]) for name, tensor in self._pipe.named_parameters() if not is_spread(tensor)
        }
        digest_of: dict[str, tuple[int, str]] = {}
        for rank, digests in enumerate(self._exchange.all_gather(digests_here)):
            for name, value in digests.items():
                first, expected = digest_of.setdefault(name, (rank, value))
                if value != expected:
                    raise mistakes.models_differ(parameter=name, rank=rank, first=first)

    def _has_applied(self) -> bool | None:
        """Whether an optimizer has stepped with this rank's gradients, or has skipped them because they are not finite.

        None if all gradients are absent or 0, or if no optimizer has stepped yet.
        """
        gradients = [local(parameter.grad) for parameter in self._pipe.parameters() if parameter.grad is not None]
        if self._stepped is None or not any(bool(gradient.any()) for gradient in gradients):
            return None
        return self._stepped == self._pipe.updates or not all(bool(g.isfinite().all()) for g in gradients)

    def _note_step(self, *_: object) -> None:
        self._stepped = self._pipe.updates

    def wait(self) -> None:
        """Waits until the checkpoint of the last `save` is complete; errors as in `save`."""
        under_way, self._saving = self._saving, None
        if under_way is None:
            return
        update, saving = under_way
        try:
            with self._exchange.peer_lost_errors():
                saving.result(self._timeout)
        except TooLate as error:
            raise mistakes.save_is_late(update=update, directory=self._directory, seconds=self._timeout) from error
        except CheckpointException as error:
            raise mistakes.save_has_failed(update=update, directory=self._directory, why=_cause(error)) from error

    def close(self) -> None:
        """Waits for the last save and releases the directory; errors as in `save`."""
        self.wait()
        if self._lock is not None:
            self._lock.release()
        self._exchange.close()

    def claim(self) -> None:
        """Locks the directory for this job before training, as an error in the first `save` would lose work."""
        if self._is_locked:
            return
        complaint = None
        if self._exchange.rank == 0:
            try:
                self._lock = Lock(self._directory)
                later = [path.name for path in whole(self._directory) if update_of(path) > self._pipe.updates]
                if later:
                    complaint = str(
                        mistakes.later_checkpoints_are_there(
                            directory=self._directory, names=later, update=self._pipe.updates
                        )
                    )
            except BadCheckpoint as error:
                complaint = str(error)
        self._exchange.require_none(complaint, BadCheckpoint)
        self._is_locked = True

    # ---- resuming

    def resume(self, source: str | Path | None = None) -> Resumed | None:
        """Loads the newest checkpoint, so that training continues as if it had not stopped; None if there is none.

        Under the same schedule on as many ranks the result is bitwise the same; under another one it is the same but
        for rounding, if a mini-batch has as many items.

        Parameters
        ----------
        source
            A checkpoint, or a directory of checkpoints; by default the directory where they are saved.

        Raises
        ------
        BadCheckpoint
            If it is damaged, or of another model, optimizer or format.
        """
        where = Path(source or self._directory)
        path = self._exchange.gather_results(lambda: _newest(where) if self._exchange.rank == 0 else None)[0]
        if path is None:
            return None

        # Each rank checks a share of the files; then all read what the checkpoint says of itself.
        self._require_none(damage(path, self._exchange.rank, self._exchange.size), path)
        reader = FileSystemReader(path)
        there = self._agreed(path, reader.read_metadata)
        info = self._info(path, reader, there)

        # Groups of optimizers come before the rest: they show whether this rank's optimizers can continue with it.
        read = self._content.wanted_groups(there, info)
        self._load(path, reader, read)
        groups = self._agreed(path, lambda: self._content.groups(read, info))

        # Every reason to refuse is found before anything here changes.
        state = self._pipe.state_dict(self._content.replica(info))
        wanted = self._agreed(path, lambda: self._content.wanted(there, info, state))
        unknown = self._unknown(there, info)
        self._require_none(self._content.lacking(wanted, there) or unknown, path)
        self._require_none(self._agreed(path, lambda: self._content.refusal(groups)), path)

        self._load(path, reader, wanted)
        replicas, extra = {**state["replicas"], **wanted["replicas"]}, wanted["extra"] or state["extra"]
        self._pipe.load_state_dict({**wanted, "replicas": replicas, "extra": extra}, self._content.replica(info))
        self._agreed(path, lambda: self._content.take(wanted, info, groups))
        self._begun = info.items - self._pipe.items_used
        return Resumed(path, info.update, info.items, self._remarks(there, info))

    def _info(self, path: Path, reader: FileSystemReader, there: Metadata) -> CheckpointInfo:
        self._require_none(None if INFO in paths_of(there) else mistakes.IS_NOT_OURS, path)
        first, last = INFO
        read: dict[str, Any] = {first: {last: ()}}
        self._load(path, reader, read)
        fields = dict(value_of(read[first][last]))
        if fields["format"] not in FORMATS:
            raise mistakes.format_is_unknown(path=path, number=fields["format"], known=FORMATS)
        return CheckpointInfo(**fields)

    def _load(self, path: Path, reader: FileSystemReader, wanted: dict[str, Any]) -> None:
        try:
            with self._exchange.peer_lost_errors():
                load(wanted, storage_reader=reader, process_group=self._exchange.group)
        except CheckpointException as error:
            raise mistakes.cannot_be_resumed(path, _cause(error), others(path)) from error

    def _unknown(self, there: Metadata, info: CheckpointInfo) -> str | None:
        """A complaint if a checkpoint has an entry of the model that no rank has; every rank calls it."""
        state = self._pipe.state_dict(0)
        names = {kind: {name[2:] for name in state[kind]} for kind in ("replicas", "extra")}
        names |= {"model": {*state["model"]}, "optimizer": {*self._content.stepped}}
        on_ranks = self._exchange.all_gather(names)
        saved = {kind: names_in(there, kind) for kind in ("model", "replicas", "extra")}
        for kind, saved_names in (saved | {"optimizer": {*info.group_of(0)}}).items():
            if unknown := sorted(saved_names.difference(*(held[kind] for held in on_ranks))):
                return mistakes.name_is_unknown(kind, unknown[0])
        return None

    def _remarks(self, there: Metadata, info: CheckpointInfo) -> tuple[str, ...]:
        state = self._pipe.state_dict()
        has_extra = bool(state["replicas"]) or bool(state["extra"])
        facts = self._exchange.all_gather((has_extra, self._content.left_out(there)))
        remarks = []
        if not self._content.is_laid_out_as(info) and any(has_buffers for has_buffers, _ in facts):
            remarks.append(mistakes.buffers_are_of_first_replicas(info.name, info.copies))
        if info.unsaved:
            remarks.append(mistakes.buffer_was_not_saved(name=info.unsaved[0]))
        left_out = sorted(set.intersection(*({*names} for _, names in facts)))
        if left_out:
            remarks.append(mistakes.objects_are_not_given(names=left_out))
        if info.format == 1 and any(self._exchange.all_gather(self._content.exceeds_format_1)):
            remarks.append(mistakes.FORMAT_1_HAS_LESS)
        return tuple(remarks)

    def _agreed(self, path: Path, call: Callable[[], T]) -> T:
        return self._exchange.on_all_ranks(call, lambda words: self._refused(path, words))

    def _require_none(self, complaint: str | None, path: Path) -> None:
        self._exchange.require_none(None if complaint is None else self._refused(path, complaint), BadCheckpoint)

    def _refused(self, path: Path, complaint: str) -> str:
        return str(mistakes.cannot_be_resumed(path, complaint, others(path)))


def _newest(source: Path) -> Path | None:
    return source if is_whole(source) else next(reversed(whole(source)), None)


def _cause(error: Any) -> str:
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause) or type(cause).__name__
    return f"rank {rank}: {reason}"
