"""Checkpoints of a training loop by torch.distributed.checkpoint: asynchronous, whole or not there, resumed exactly."""

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
    About,
    Content,
    Objects,
    Part,
    SavedFacts,
    about_of,
    wanted_about,
)
from chimera_runtime.checkpoint.entries import names_in
from chimera_runtime.checkpoint.stateful import Stateful
from chimera_runtime.checkpoint.storage import Lock, Writer, beside, damage, is_whole, update_of, whole
from chimera_runtime.errors import BadCheckpoint, Misuse
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.ranks.object_exchange import ObjectExchange
from chimera_runtime.ranks.rendezvous import exchange
from chimera_runtime.state.averages import Average
from chimera_runtime.values.shards import is_spread, local
from chimera_runtime.values.tensors import digest

T = TypeVar("T")

_PATIENCE = 600.0

_ONE_MODEL = (
    "all ranks save one model in one directory; of pipelines of several models save pipe.state_dict() with "
    "torch.distributed.checkpoint, each over the process group of its pipeline"
)

_number = count()
"""Of those made so far, the same on all ranks."""


@dataclass(frozen=True)
class Resumed:
    """What training goes on from: a checkpoint, the updates and the items of all copies before it, and remarks."""

    path: Path
    update: int
    items: int
    remarks: tuple[str, ...] = ()


class Checkpoints:
    """Saves and resumes a pipeline with its optimizers; every rank of the default process group makes and calls it.

    Parameters
    ----------
    directory
        Where checkpoints are saved, and looked for; all ranks see the same files there.
    pipe
        The pipeline.
    optimizers
        Of ``pipe.named_parameters()``, one or several; none where the schedule steps the pipeline's own.
    schedulers
        Learning-rate schedulers of these, one or several; the state of each is kept with the parameters that it
        schedules.
    shared
        What else has a state, by name, that is the same on all ranks: a GradScaler.
    of_copy
        What else has a state, by name, that all ranks of a copy have alike: a data loader.
    of_rank
        What else has a state, by name, that each rank has of its own: it is resumed under the same schedule with as
        many copies.
    averages
        Averages of the weights, by name: tensors by the names of ``pipe.named_parameters()``, or modules by the numbers
        of ``pipe.stages``, AveragedModels too. They are resumed under any schedule, as the weights are.
    keep
        How many checkpoints stay, the newest.
    timeout
        Seconds that a save may take once it is waited for, and that ranks wait for one that looks at files.

    Raises
    ------
    Misuse
        If ``keep`` is less than 1, or if ranks name different directories or train different models.
    PeerLost
        If a rank makes none in time.
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
            raise Misuse(f"keep={keep}: at least one checkpoint stays")
        of_loop = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
        other = next((value for value in of_loop if not isinstance(value, torch.optim.Optimizer)), None)
        if other is not None:
            raise Misuse(
                f"optimizers= has a {type(other).__name__}, which is not a torch.optim.Optimizer: of_rank= keeps any "
                "object that has a state_dict"
            )
        at_rates = list(schedulers) if isinstance(schedulers, Sequence) else [schedulers]
        optimizing = of_loop or [*pipe.optimizers.values()]
        objects = Objects(dict(shared or {}), dict(of_copy or {}), dict(of_rank or {}), dict(averages or {}))
        self._content = Content(pipe, optimizing, at_rates, objects)
        self._directory = Path(directory)
        self._pipe = pipe
        self._keep = keep
        self._timeout = timeout
        store = PrefixStore(f"chimera/checkpoints/{next(_number)}", registry._get_default_store())
        what = f"rank {dist.get_rank()}: wait for all ranks of the default process group to make Checkpoints"
        rank, size = dist.get_rank(), dist.get_world_size()
        directories = exchange(store, "made", rank, size, value=f"{directory}", what=what, seconds=timeout)
        if len({*directories}) > 1:
            raise Misuse(f"Checkpoints of {' and '.join(sorted({*directories}))} at once: {_ONE_MODEL}")
        self._exchange = ObjectExchange(dist.new_group(backend="gloo"), f"the checkpoints in {directory}", timeout)
        self._lock: Lock | None = None
        self._is_locked = False
        self._saving: tuple[int, Future[Any]] | None = None  # the update, and what ends with it
        self._begun = pipe.updates, 0  # the updates and items before this job's
        self._stepped: int | None = None  # the update that an optimizer has stepped for last
        for optimizer in of_loop:
            optimizer.register_step_post_hook(self._note_step)
        self._require_one_model()

    # ---- saving

    @property
    def items(self) -> int:
        """The items of all copies that training has used so far, before this job included."""
        updates, items = self._begun
        return items + (self._pipe.updates - updates) * self._pipe.items

    def save(self) -> None:
        """Saves what there is now while the next steps run: it returns when tensors are copied to memory of the CPU.

        The updates of a stream that are under way are completed first. A save before this one is waited for. What is
        saved counts once it is whole, and the oldest of more than ``keep`` are then removed. Gradients are not saved.

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
        self._require_applied()
        self._require_one_model()
        self._pipe.check_replicas()
        state = self._pipe.state_dict()
        parts: list[Part] = []

        def facts() -> SavedFacts:
            parts.append(self._content.part(state))
            return parts[0].facts

        of_ranks = self._exchange.gather_results(facts)
        complete = self._content.complete(parts[0], of_ranks, self.items)
        self.claim()
        writer = Writer(self._directory, self._pipe.updates, self._keep)
        saving = cast(Future[Any], async_save(complete, storage_writer=writer, process_group=self._exchange.group))
        self._saving = self._pipe.updates, saving

    def _require_one_model(self) -> None:
        """Refuses pipelines beside this one that hold something else under a name: one would resume from the other."""
        if self._pipe.copies * self._pipe.job.workers == self._exchange.size:
            return
        mine = {name: digest([tensor]) for name, tensor in self._pipe.named_parameters() if not is_spread(tensor)}
        known: dict[str, tuple[int, str]] = {}
        for rank, digests in enumerate(self._exchange.all_gather(mine)):
            for name, value in digests.items():
                first, expected = known.setdefault(name, (rank, value))
                if value != expected:
                    raise Misuse(f"{name} of rank {rank} is not that of rank {first}: {_ONE_MODEL}")

    def _require_applied(self) -> None:
        """Refuses to save in the middle of an update; every rank calls it."""
        applied = self._exchange.all_gather(self._has_applied())
        if False in applied and True not in applied:
            raise Misuse(
                f"the gradients of update {self._pipe.updates} are there and no optimizer has stepped with them: save "
                "after optimizer.step() and optimizer.zero_grad(), as gradients are not saved"
            )

    def _has_applied(self) -> bool | None:
        """Whether the gradients on this rank have been stepped with, or are to be skipped; None if there are none.

        It is not known before a first step of an optimizer has been seen.
        """
        gradients = [local(parameter.grad) for parameter in self._pipe.parameters() if parameter.grad is not None]
        if self._stepped is None or not any(bool(gradient.any()) for gradient in gradients):
            return None
        return self._stepped == self._pipe.updates or not all(bool(g.isfinite().all()) for g in gradients)

    def _note_step(self, *_: object) -> None:
        self._stepped = self._pipe.updates

    def wait(self) -> None:
        """Returns when the last save is whole; errors as in `save`."""
        under_way, self._saving = self._saving, None
        if under_way is None:
            return
        update, saving = under_way
        what = f"the checkpoint after update {update} in {self._directory}"
        try:
            with self._exchange.peer_lost_errors():
                saving.result(self._timeout)
        except TooLate as error:
            raise BadCheckpoint(
                f"{what} is not written after {self._timeout:g} s; those before it are whole"
            ) from error
        except CheckpointException as error:
            raise BadCheckpoint(f"{what} was not written: {_cause(error)}; those before it are whole") from error

    def close(self) -> None:
        """Waits for the last save and lets the directory go; errors as in `save`."""
        self.wait()
        if self._lock is not None:
            self._lock.release()
        dist.destroy_process_group(self._exchange.group)

    def claim(self) -> None:
        """Makes the directory this job's, as the first save does: errors as in `save`, before there is work to lose."""
        if self._is_locked:
            return
        complaint = None
        if self._exchange.rank == 0:
            try:
                self._lock = Lock(self._directory)
                later = [path.name for path in whole(self._directory) if update_of(path) > self._pipe.updates]
                if later:
                    complaint = (
                        f"{self._directory} has {', '.join(later)}, which would count as newer than what is saved "
                        f"from update {self._pipe.updates} on: save elsewhere, or remove what you do not want"
                    )
            except BadCheckpoint as error:
                complaint = str(error)
        self._exchange.require_none(complaint, BadCheckpoint)
        self._is_locked = True

    # ---- resuming

    def resume(self, source: str | Path | None = None) -> Resumed | None:
        """Takes the newest checkpoint; None if there is none. Training then goes on as if it had not stopped.

        That is bitwise so under the same schedule on as many ranks, and but for rounding under another one, if a
        mini-batch has as many items.

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
        path = self._exchange.gather_results(lambda: self._newest(where) if self._exchange.rank == 0 else None)[0]
        if path is None:
            return None
        self._require_none(damage(path, self._exchange.rank, self._exchange.size), path)
        reader = FileSystemReader(path)
        there = self._agreed(path, reader.read_metadata)
        about = self._about(path, reader, there)
        read = self._content.wanted_groups(there, about)
        self._load(path, reader, read)
        groups = self._agreed(path, lambda: self._content.groups(read, about))
        state = self._pipe.state_dict(self._content.replica(about))
        wanted = self._agreed(path, lambda: self._content.wanted(there, about, state))
        unknown = self._unknown(there, about)
        self._require_none(self._content.lacking(wanted, there) or unknown, path)
        self._require_none(self._agreed(path, lambda: self._content.refusal(groups)), path)
        self._load(path, reader, wanted)
        self._pipe.load_state_dict({**wanted, "extra": wanted["extra"] or state["extra"]}, self._content.replica(about))
        self._agreed(path, lambda: self._content.take(wanted, about, groups))
        self._begun = about.update, about.items
        return Resumed(path, about.update, about.items, self._remarks(there, about))

    def _newest(self, source: Path) -> Path | None:
        checkpoints = [source] if is_whole(source) else whole(source)
        return checkpoints[-1] if checkpoints else None

    def _about(self, path: Path, reader: FileSystemReader, there: Metadata) -> About:
        """What a checkpoint says of itself, if this version can read it."""
        read = wanted_about(there)
        self._require_none(None if read else "it is not one that a Checkpoints of chimera_runtime has written", path)
        self._load(path, reader, read)
        fields = about_of(read)
        if fields["format"] not in FORMATS:
            raise BadCheckpoint(
                f"{path} has format {fields['format']}, and this version of chimera_runtime reads the formats "
                f"{' and '.join(map(str, FORMATS))}"
            )
        return About(**fields)

    def _load(self, path: Path, reader: FileSystemReader, wanted: dict[str, Any]) -> None:
        """Reads into what is wanted; every rank calls it."""
        try:
            with self._exchange.peer_lost_errors():
                load(wanted, storage_reader=reader, process_group=self._exchange.group)
        except CheckpointException as error:
            raise BadCheckpoint(f"{path} cannot be resumed from: {_cause(error)}{beside(path)}") from error

    def _unknown(self, there: Metadata, about: About) -> str | None:
        """What a checkpoint has of the model and no rank has a place for; every rank calls it."""
        state, stepped = self._pipe.state_dict(0), self._content.stepped
        names = [{*state["model"]}, *({name[2:] for name in state[kind]} for kind in ("replicas", "extra")), {*stepped}]
        model, replicas, extra, steps = (
            set[str]().union(*(held[kind] for held in self._exchange.all_gather(names))) for kind in range(4)
        )
        if unknown := sorted(names_in(there) - model):
            return f"it has {unknown[0]}, which this model has not"
        if unknown := sorted(names_in(there, "replicas") - replicas):
            return (
                f"it has the buffer {unknown[0]}, which this model has not (yet): register it when the module is made, "
                "in the shape that it will have; or with persistent=False, so that it is not saved"
            )
        if unknown := sorted(names_in(there, "extra") - extra):
            return f"it has {unknown[0]}, which no module of this model has in its state_dict when it is made"
        if unknown := sorted(about.group_of(0).keys() - steps):
            return (
                f"it has the optimizer state of {unknown[0]}, which no optimizer steps here: give one that parameter, "
                "as before; or read the weights alone, with torch.distributed.checkpoint.load into pipe.state_dict()"
            )
        return None

    def _remarks(self, there: Metadata, about: About) -> tuple[str, ...]:
        state = self._pipe.state_dict()
        has_extra = bool(state["replicas"]) or bool(state["extra"])
        facts = self._exchange.all_gather((has_extra, self._content.left_out(there)))
        remarks = []
        if not self._content.is_laid_out_as(about) and any(has_buffers for has_buffers, _ in facts):
            layout = f"{about.name} on {about.copies} {'copies' if about.copies > 1 else 'copy'}"
            remarks.append(f"buffers are those of the first replica of each stage: the checkpoint is of {layout}")
        if about.unsaved:
            remarks.append(
                f"the buffer {about.unsaved[0]} (persistent=False) had changed when the checkpoint was saved and is in "
                "no checkpoint: it begins as it is made"
            )
        left_out = sorted(set.intersection(*({*names} for _, names in facts)))
        if left_out:
            remarks.append(f"the checkpoint has {', '.join(left_out)}, and Checkpoints was given no such object")
        if about.format == 1 and any(self._exchange.all_gather(self._content.exceeds_format_1)):
            remarks.append(
                "the checkpoint is of format 1: of several schedulers each takes the state of the first, and what "
                "modules have in their state_dict beside parameters and buffers, or optimizers beside settings and the "
                "state of parameters, begins anew"
            )
        return tuple(remarks)

    def _agreed(self, path: Path, call: Callable[[], T]) -> T:
        """What a call returns on this rank, if no rank has anything against the checkpoint in it."""
        values: list[T] = []
        self._exchange.gather_results(lambda: values.append(call()), lambda words: self._refused(path, words))
        return values[0]

    def _require_none(self, complaint: str | None, path: Path) -> None:
        """Raises the first complaint of any rank about a checkpoint on all of them."""
        self._exchange.require_none(None if complaint is None else self._refused(path, complaint), BadCheckpoint)

    def _refused(self, path: Path, complaint: str) -> str:
        return f"{path} cannot be resumed from: {complaint}{beside(path)}"


def _cause(error: Any) -> str:
    """What the first rank that failed says."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause) or type(cause).__name__
    return f"rank {rank}: {reason}"
