"""What a rank holds of a pipeline: its stages, and their state in checkpoints and in one file."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from chimera_runtime.blame import Located
from chimera_runtime.data.data_workers import DataWorkers
from chimera_runtime.data.epoch_length import EpochLength, Messages
from chimera_runtime.data.feed import Feed
from chimera_runtime.data.item_order import ItemOrder, Share, is_stream
from chimera_runtime.data.loader import Loader
from chimera_runtime.data.loading import Loading, Uses
from chimera_runtime.errors import Misuse
from chimera_runtime.errors.data import order_of_iterable
from chimera_runtime.program.job import Job
from chimera_runtime.program.weight_groups import Group
from chimera_runtime.ranks.agreement import weights_of
from chimera_runtime.ranks.object_exchange import ObjectExchange
from chimera_runtime.stage.replicas import Replicas, digest
from chimera_runtime.start.assemble import remarks
from chimera_runtime.start.rank_context import Setting
from chimera_runtime.state.averages import Average, AverageState
from chimera_runtime.state.exporting import export_weights, load_weights
from chimera_runtime.state.state import State
from chimera_runtime.update.flushing import Flushing
from chimera_runtime.update.outcome import Outcomes
from chimera_runtime.update.stage_optimizer import Steppers
from chimera_runtime.update.streaming import Streaming

T = TypeVar("T")

_PATIENCE = 600.0
"""Seconds that ranks wait at least for one whose modules say or take their state."""


class Holding:
    """What a `Pipeline` is beside the steps that it makes."""

    _setting: Setting
    _modules: Mapping[int, torch.nn.Module]
    _named: Mapping[str, torch.nn.Parameter]
    _steppers: Steppers | None
    _schedule: Streaming | Flushing
    _feed: Feed
    _uses: Sequence[Uses]  # by worker
    _loaders: int = 0
    _messages: Messages
    _state: State
    _located: Located
    _outcomes: Outcomes
    _replicas: Replicas
    _is_known: bool = False  # whether parameters have been looked at since weights were loaded

    @property
    def stages(self) -> dict[int, torch.nn.Module]:
        """The modules of the stages that this rank holds, by their number."""
        return dict(self._modules)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters of this rank by the model's own names: what ``name`` says.

        Without it they are ``stages.<stage>.<name>``, or with `Layers` ``layers.<layer>.<name>``. What stages share is
        there once, by the end that is declared first: so its name is the same on every rank.
        """
        yield from self._named.items()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters of this rank.

        Their norm is not that of the model: clip with `Pipeline.clip_grad_norm_`, not with torch's own.
        """
        for _, parameter in self.named_parameters():
            yield parameter

    @property
    def job(self) -> Job:
        """The schedule, as ``program.json`` has it."""
        return self._setting.world.job

    @property
    def updates(self) -> int:
        """How many updates have been given so far, those before a checkpoint that was loaded included.

        An update is a call of `Pipeline.step`, also one with ``accumulate=True``, after which the optimizer does not
        step: each has random numbers of its own, and the next mini-batch is the one of this number.
        """
        return self._schedule.given

    @property
    def items(self) -> int:
        """B*N*W: the items of a mini-batch, over all copies."""
        return self._feed.size * self.micro_batches * self.copies

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter that an optimizer may be given: those of `named_parameters` and `optimizers`."""
        given = {} if self._steppers is None else self._steppers.names
        return {parameter: name for name, parameter in self.named_parameters()} | given

    @property
    def micro_batches(self) -> int:
        """N: the micro-batches of a mini-batch, which a copy takes in a step."""
        return self._setting.world.job.micro_batches

    @property
    def copies(self) -> int:
        """W: the copies of the pipelines; they train on different mini-batches."""
        return self._setting.world.place.copies

    @property
    def copy(self) -> int:
        """The copy that this rank is a part of, from 0."""
        return self._setting.world.place.copy

    @property
    def worker(self) -> int:
        """The worker of the schedule whose part this rank runs."""
        return self._setting.world.place.worker

    @property
    def first_rank(self) -> int:
        """The number of the first rank of these pipelines in the default process group."""
        return self._setting.world.control_group.members[0]

    @property
    def optimizers(self) -> dict[int | Group, Any]:
        """What ``optimizer`` has made, by stage, or by the stages that share: empty where the caller steps."""
        return {} if self._steppers is None else self._steppers.optimizers

    @property
    def remarks(self) -> tuple[str, ...]:
        """What one should know of stages that do not run as the schedule has them, the same on every rank."""
        return tuple(remarks(self._setting.world, self._setting.findings))

    # ---- data

    @property
    def needs(self) -> frozenset[int]:
        """The micro-batches of a mini-batch of which this rank uses anything: a loader may leave out the others."""
        return frozenset(self._uses[self._setting.world.place.worker])

    def loader(
        self,
        dataset: Any,
        *,
        shuffle: bool = False,
        sampler: Iterable[Any] | None = None,
        seed: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = True,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        multiprocessing_context: str | None = None,
        pin_memory: bool = False,
    ) -> Loader:
        """The dataset as mini-batches for `step` and `evaluate`: a DataLoader of torch of what this rank uses of them.

        Every rank makes it, with the same arguments. Item j of a mini-batch, the next B*N*W items, goes to copy
        j // (B*N) and to micro-batch (j // B) % N. A rank loads the items of micro-batches whose input, target or
        keyword arguments its stages take, and keeps these alone. An iterable dataset is read as a whole by each rank
        that takes any item.

        Parameters
        ----------
        dataset
            Map-style or iterable, with items (input, target) or (input, target, keywords), or whatever ``collate_fn``
            makes these of.
        shuffle
            Whether a map-style dataset comes in another order in each epoch.
        sampler
            The keys of a map-style dataset for an epoch, the same on all ranks; if it draws them from global generators
            these are seeded alike.
        seed
            With the epoch it decides the order, and with that and the item all that an item draws from the generators
            of torch, Python and NumPy: by default the pipeline's.
        collate_fn
            Makes the pair or triple of a micro-batch from the list of its B items: by default torch's default_collate.
        drop_last
            Leaves out the items of an epoch that fill no mini-batch. Without it they are a smaller one, for `evaluate`.
        num_workers
            Processes that load while the rank computes; the order does not depend on them. With none, the rank loads.
        prefetch_factor
            How many mini-batches each of them is ahead.
        multiprocessing_context
            How they are started, as ``"spawn"``: by default as Python does it.
        pin_memory
            Whether they are put into memory from which a GPU copies while it works.

        Raises
        ------
        Misuse
            If arguments do not go together, or the dataset is too small or none.
        """
        size, place = self._feed.size, self._setting.world.place
        share = Share(size, self.micro_batches, self.copies, self.copy)
        if num_workers < 0 or prefetch_factor < 1:
            raise Misuse(f"num_workers={num_workers}, prefetch_factor={prefetch_factor}: no such numbers of either")
        if is_stream(dataset) and (shuffle or sampler is not None):
            raise order_of_iterable("shuffle=True" if sampler is None else "a sampler")
        if shuffle and sampler is not None:
            raise Misuse("a sampler decides the order: leave shuffle=True out")
        if getattr(sampler, "num_replicas", 1) > 1:
            raise Misuse("the sampler gives every rank other items, and so does the loader: use shuffle=True instead")
        drawn_by = self._setting.seed if seed is None else seed
        self._loaders += 1
        readers = frozenset(worker for worker, used in enumerate(self._uses) if used)
        return Loader(
            Loading(dataset, drawn_by, collate_fn, names=self._feed.names),
            share,
            self._uses[place.worker],
            ItemOrder(dataset, drawn_by, shuffle, sampler),
            EpochLength(self._setting.world, readers, self._loaders, self._messages),
            self._located.for_loader(),
            DataWorkers(
                num_workers,
                prefetch_factor,
                multiprocessing_context,
                pin_memory,
                self._setting.world.control_group.timeout,
            ),
            drop_last,
        )

    # ---- checkpoints

    def check_replicas(self) -> None:
        """Passes if the replicas of each stage have the same weights, bit by bit; every rank calls it.

        `Checkpoints` and `export_weights` do so before they write. Buffers are local to a replica and not compared.
        The updates of a stream that are under way are completed first.

        Raises
        ------
        RanksDiffer
            If replicas have drifted apart; the message names stages and ranks.
        Misuse
            If a module has parameters that the pipeline does not know.
        """
        self._catch_up()
        self._for_all(self._state.require_known)
        with self._located:
            self._outcomes.settle()
            self._outcomes.compare(
                {weights_of(group): digest(numbers) for group, numbers in self._replicas.begin().items()},
                f"after update {self.updates}",
            )

    def state_dict(self, replica: int | None = None) -> dict[str, Any]:
        """Parameters and buffers of this rank for torch.distributed.checkpoint, which may read into them, too.

        ``model`` has the parameters by name; those of all ranks together are the model. ``replicas`` has the buffers by
        ``<k>/<name>`` for the k-th replica of the stage, or for ``replica`` if that is given. ``extra`` has by such
        names, pickled, what else the modules have in their own ``state_dict``, as of ``get_extra_state``. ``update`` is
        `updates`. The updates of a stream that are under way are completed first; every rank calls it.

        Raises
        ------
        Misuse, ModelError, BadCheckpoint
            On all ranks, if a module of any of them cannot say its state, or that cannot be pickled.
        """
        self._catch_up()
        saved = self._for_all(lambda: self._state.saved(replica))
        return {**saved, "update": {"0": (self.updates,)}}

    def load_state_dict(self, state: Mapping[str, Any], replica: int | None = None) -> None:
        """Goes on from a state that `state_dict` has returned, here or on another rank that holds as much.

        Every rank calls it.

        Raises
        ------
        BadCheckpoint, ModelError
            On all ranks, if a parameter, a buffer or an extra state is missing on any, or is not taken.
        """
        self._finish()
        self._for_all(lambda: self._state.load(state, replica))
        self._is_known = False
        ((updates,),) = state["update"].values()
        self._schedule.count_from(updates)
        if self._steppers is not None:
            self._steppers.count_from(updates)

    def unsaved_buffers(self) -> dict[str, str]:
        """Digests of the buffers of this rank that are in no state dict (``persistent=False``), by their names."""
        return self._state.unsaved()

    def average_state(self, average: Average, what: str) -> AverageState:
        """The state of an average of the weights that the caller keeps; errors as of `AverageState`."""
        return AverageState(what, average, self._setting, self._modules, self._named)

    def _for_all(self, call: Callable[[], T]) -> T:
        """What a call returns on this rank, if it raises no error on any rank of the pipelines."""
        world, value = self._setting.world, list[T]()

        def located() -> None:
            with self._located.for_loader():
                value.append(call())

        ObjectExchange(
            world.control_group.group, "the state of a pipeline", max(world.control_group.timeout, _PATIENCE)
        ).gather_results(located)
        return value[0]

    def export_weights(self, path: str | Path) -> None:
        """Writes the state dict of the whole model into one file, under the model's own names.

        Every rank calls it, and rank 0 holds the model meanwhile; where pipelines in several rows of a mesh hold parts
        of one model, all call it and the first row writes. A path that ends in ``.safetensors`` gets that
        format, any other a state dict for ``torch.load(path, weights_only=True)``. What is tied is there under each of
        its names, but in safetensors under the first alone, as is usual there. Buffers, and what else modules have in
        their ``state_dict``, are those of the first replica.

        Raises
        ------
        BadCheckpoint
            If the file cannot be written, or could not be read again because a module has something else in its
            ``state_dict`` than the format takes; a file that was there is as before.
        Misuse
            If the package safetensors is needed and is not installed.
        """
        self.check_replicas()
        export_weights(self._state, Path(path))

    def load_weights(self, path: str | Path) -> list[str]:
        """Takes parameters, and what there is of the rest, from a file as `export_weights` writes it.

        Every rank calls it, and reads what it holds. Returned are the names in the file that the model does not have.

        Raises
        ------
        BadCheckpoint
            If the file cannot be read, lacks a parameter, or has one in another shape.
        Misuse
            If the package safetensors is needed and is not installed.
        """
        self._finish()
        self._is_known = False
        return load_weights(self._state, Path(path))

    # ---- for its methods

    def _finish(self) -> None:
        """Completes what is under way."""
        self._require_sound()
        with self._located, self._setting.generators_kept():
            self._schedule.finish()

    def _require_sound(self) -> None:
        if self._located.closed:
            raise Misuse("the pipeline is closed: call its methods before close(), or inside the with block")
        if self._located.failed:
            raise Misuse("an update has failed on this pipeline: make a new one, from the last checkpoint")
        with self._located:
            self._setting.world.control_group.check()

    def _catch_up(self) -> None:
        """Completes what is under way, on the device as well: what is kept of it counts."""
        self._finish()
        with self._located:
            self._setting.world.synchronize()
