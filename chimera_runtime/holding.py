"""What a rank holds of a pipeline: its stages, and their state in checkpoints and in one file."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from chimera_runtime.blame import Located
from chimera_runtime.errors import Misuse
from chimera_runtime.exporting import export_weights, load_weights
from chimera_runtime.feed import Feed
from chimera_runtime.flushing import Flushing
from chimera_runtime.program import Group, Job, spread
from chimera_runtime.setting import Setting
from chimera_runtime.state import State
from chimera_runtime.stepping import Steppers
from chimera_runtime.streaming import Streaming
from chimera_runtime.tensors import generators_kept


class Holding:
    """What a `Pipeline` is beside the steps that it makes."""

    _setting: Setting
    _modules: Mapping[int, torch.nn.Module]
    _named: Mapping[str, torch.nn.Parameter]
    _steppers: Steppers | None
    _schedule: Streaming | Flushing
    _feed: Feed
    _state: State
    _located: Located

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
        """The parameters of this rank."""
        for _, parameter in self.named_parameters():
            yield parameter

    @property
    def job(self) -> Job:
        """The schedule, as ``program.json`` has it."""
        return self._setting.world.job

    @property
    def updates(self) -> int:
        """How many updates have been given so far, those before a checkpoint that was loaded included."""
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
    def optimizers(self) -> dict[int | Group, Any]:
        """What ``optimizer`` has made, by stage, or by the stages that share: empty where the caller steps."""
        return {} if self._steppers is None else self._steppers.optimizers

    @property
    def needs(self) -> frozenset[int]:
        """The micro-batches of a mini-batch whose input or target this rank uses: a loader may leave out the others."""
        facts, count = self._setting.facts, self._setting.world.job.micro_batches
        return frozenset(micro % count for micro in spread((*facts.inputs, *facts.targets)))

    # ---- checkpoints

    def state_dict(self, replica: int | None = None) -> dict[str, Any]:
        """Parameters and buffers of this rank for torch.distributed.checkpoint, which may read into them, too.

        ``model`` has the parameters by name; those of all ranks together are the model. ``replicas`` has the buffers by
        ``<k>/<name>`` for the k-th replica of the stage, or for ``replica`` if that is given. ``update`` is `updates`.
        The updates of a stream that are under way are completed first; every rank calls it.
        """
        self._finish()
        return {**self._state.saved(replica), "update": {"0": (self.updates,)}}

    def load_state_dict(self, state: Mapping[str, Any], replica: int | None = None) -> None:
        """Goes on from a state that `state_dict` has returned, here or on another rank that holds as much.

        Raises
        ------
        BadCheckpoint
            If a parameter or a buffer is missing.
        """
        self._finish()
        self._state.load(state, replica)
        ((updates,),) = state["update"].values()
        self._schedule.count_from(updates)
        if self._steppers is not None:
            self._steppers.count_from(updates)

    def export_weights(self, path: str | Path) -> None:
        """Writes the parameters and buffers of the whole model into one file, under the model's own names.

        Every rank calls it, and rank 0 holds the model meanwhile. A path that ends in ``.safetensors`` gets that
        format, any other a state dict for ``torch.load(path, weights_only=True)``. What is tied is there under each of
        its names, but in safetensors under the first alone, as is usual there. Buffers are those of the first replica.

        Raises
        ------
        BadCheckpoint
            If the file cannot be written; one that was there is as before.
        Misuse
            If the package safetensors is needed and is not installed.
        """
        self._finish()
        self._state.require_values()
        export_weights(self._state, Path(path))

    def load_weights(self, path: str | Path) -> list[str]:
        """Takes parameters, and those buffers that are there, from a file as `export_weights` writes it.

        Every rank calls it, and reads what it holds. Returned are the names in the file that the model does not have.

        Raises
        ------
        BadCheckpoint
            If the file cannot be read, lacks a parameter, or has one in another shape.
        Misuse
            If the package safetensors is needed and is not installed.
        """
        self._finish()
        return load_weights(self._state, Path(path))

    # ---- for its methods

    def _finish(self) -> None:
        """Completes what is under way."""
        self._require_sound()
        with self._located, generators_kept():
            self._schedule.finish()

    def _require_sound(self) -> None:
        if self._located.failed:
            raise Misuse("an update has failed on this pipeline: make a new one, from the last checkpoint")
