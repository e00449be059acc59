"""``--save``, ``--resume``, ``--load`` and ``--export``, and the checkpoint at a SIGTERM or Ctrl-C."""

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, update_wrapper, wraps
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from chimera_runtime.blame import LaneOperation, during
from chimera_runtime.checkpoint.checkpoints import Checkpoints
from chimera_runtime.checkpoint.content import Stateful
from chimera_runtime.errors import INTERRUPTED, TERMINATED
from chimera_runtime.errors.stage import weights_cannot_be_written
from chimera_runtime.errors.tools import optimizer_cannot_be_saved
from chimera_runtime.model.model import Layers, ModelFile
from chimera_runtime.model.ties import Modules, Tie, by_group
from chimera_runtime.optimizer.sharding import ShardedOptimizer
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.operations import MAKES, MOVES, OPERATIONS, PAIRED
from chimera_runtime.program.rank_facts import VALUES, Group, Rooms, group_key
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.weight_versions import WeightGroup, Weights
from chimera_runtime.state.exporting import require_writable
from chimera_runtime.update.updates import Outcome
from chimera_runtime.values.nested import Tensors, draw_seed, join, seed_torch

# ``--autocast bf16``: wraps the model file's stages and loss, so that each call of them runs in ``torch.autocast``.
#
# This covers every call: of the probe at start, which finds the dtypes of messages; of forwards, also when they run a
# second time; of evaluations; and of the one process of ``--check``. Backwards run outside, as torch recommends.


def under_autocast(model: ModelFile, device: str, dtype: torch.dtype) -> ModelFile:
    """Returns the model file with stages (or layers), loss and ``reference()`` that run under autocast."""

    def running(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            with torch.autocast(device, dtype):
                return function(*arguments, **keywords)

        return run

    def making(make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make, updated=())
        def made(*arguments: Any) -> Any:
            module = make(*arguments)
            if isinstance(module, torch.nn.Module):
                _change_forward(module, running)
            return module

        return made

    def judging(loss: Callable[..., Any]) -> Callable[..., Any]:
        return update_wrapper(partial(_under, loss, device, dtype), loss, updated=())

    build = model.build_stage
    return replace(
        model,
        build_stage=replace(build, layers=tuple(map(making, build.layers)))
        if isinstance(build, Layers)
        else making(build),
        loss={name: judging(loss) for name, loss in model.loss.items()}
        if isinstance(model.loss, Mapping)
        else judging(model.loss),
        reference=None if model.reference is None else making(model.reference),
        autocast=dtype,
    )


def _under(function: Callable[..., Any], device: str, dtype: torch.dtype, *arguments: Any, **keywords: Any) -> Any:
    """Calls a function under autocast; a partial of this shows a loss that is a module, as a closure does not."""
    with torch.autocast(device, dtype):
        return function(*arguments, **keywords)


def _change_forward(module: torch.nn.Module, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the ``forward`` of a module by ``change(forward)``, in a class of its own, which copies have as well;
    inside of a module that `torch.compile` has wrapped.
    """
    inside = getattr(module, "_orig_mod", module)
    if "forward" in vars(inside):
        inside.forward = change(inside.forward)
        return
    kind = type(inside)
    names = {"forward": change(kind.forward), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    inside.__class__ = type(kind.__name__, (kind,), names)


# Optimizers of a model file: one for each weight group of a rank, stepped together like a single one.


class Optimizers:
    """Steps every weight group of this rank; all ranks that hold a group draw the same random numbers for its step.

    An ``idle`` one, of a rehearsal, makes no step. The model file's scheduler gets the number of ``updates``;
    ``schedulers`` are stepped after the optimizers. Over ``sharded_over`` the state of each group is sharded.
    """

    def __init__(
        self,
        model: ModelFile,
        modules: Modules,
        seed: int,
        idle: bool,
        ties: Sequence[Tie] = (),
        updates: int = 0,
        sharded_over: World | None = None,
    ) -> None:
        groups = by_group(modules, ties)
        trained = {group: [p for p in parameters if p.requires_grad] for group, parameters in groups.items()}
        self._parameters = [parameter for parameters in trained.values() for parameter in parameters]
        self._optimizers = {
            group: optimizer_of(model, group, parameters, sharded_over) for group, parameters in trained.items()
        }
        self._sharded = [made for made in self._optimizers.values() if isinstance(made, ShardedOptimizer)]
        made = [model.schedule(optimizer, updates) for optimizer in self._optimizers.values()]
        self.schedulers = [scheduler for scheduler in made if scheduler is not None]
        self._seed = seed
        self._idle = idle
        self._update = 0
        self._stepped: set[Group] = set()

    def step(self) -> None:
        """Steps the groups that the lane has not stepped already, and the schedulers."""
        for group in self._optimizers:
            if group not in self._stepped:
                self._step(group)
        self._stepped.clear()
        self._update += 1
        if self._idle:
            return
        for optimizer in self._sharded:
            optimizer.gather()
        for scheduler in self.schedulers:
            scheduler.step()

    def step_in_lane(self, weights: WeightGroup) -> None:
        """Steps a group at its place in the schedule; called at the end of `WeightGroup.step`."""
        self._stepped.add(weights.group)
        self._step(weights.group)

    def count_from(self, updates: int) -> None:
        """Sets the number of updates so far, which decides on the random numbers of the next step."""
        self._update = updates

    def __iter__(self) -> Iterator[Any]:
        return (optimizer for optimizer in self._optimizers.values() if hasattr(optimizer, "param_groups"))

    def zero_grad(self) -> None:
        """Removes the gradients of all parameters."""
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def learning_rates(self) -> dict[str, list[float]]:
        """Learning rates of each optimizer's parameter groups, by stage (``0``) or stages of a tie (``0+3``)."""
        return {
            "+".join(map(str, stages)): [
                float(group["lr"]) for group in getattr(optimizer, "param_groups", ()) if "lr" in group
            ]
            for stages, optimizer in self._optimizers.items()
        }

    def _step(self, group: Group) -> None:
        if self._idle:
            return
        seed_torch(draw_seed("step", self._seed, self._update, *group))
        with during(lambda: LaneOperation("step", group_key(group), (), self._update)):
            Weights(self._optimizers[group]).step()


def optimizer_of(
    model: ModelFile, group: Group, parameters: list[torch.nn.Parameter], sharded_over: World | None
) -> Any:
    """Makes the model file's optimizer of a weight group; if its state is sharded, the caller must gather weights."""
    if sharded_over is None or not parameters:
        return model.steps(parameters)
    return ShardedOptimizer(sharded_over, {group: parameters}, model.steps, gathers=False)


# ``--rehearse``: stages that sleep instead of computing.


@dataclass
class RehearsedLink:
    """Link to the host, which runs one move at a time; busy until ``free_at``, a time of `time.perf_counter`."""

    free_at: float = 0.0

    def launch(self, seconds: float) -> float:
        """Launches a move; returns the time of its end."""
        self.free_at = max(self.free_at, time.perf_counter()) + seconds
        return self.free_at


class RehearsedStage(Stage):
    """Stage that sleeps instead of computing; its messages and sums have the sizes of the real stage. Nothing moves,
    but waits for moves last as over ``rehearsed_link``, which all stages of a rank share.
    """

    def __init__(
        self,
        *,
        seconds: Mapping[str, float],
        slack: float,
        cost_weights: Sequence[float],
        sizes: Sequence[float],
        rehearsed_link: RehearsedLink,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        for group in self.groups:
            group.rehearse()
        self._seconds, self._slack, self._weights, self._sizes = seconds, slack, cost_weights, sizes
        self._fake: dict[str, list[Tensors]] = {}
        for letter, method in OPERATIONS.items():
            setattr(self, method, partial(self._sleep, letter))
        self._link = rehearsed_link
        self._ends: dict[tuple[str, Micros], float] = {}
        for letter, method in MOVES.items():
            setattr(self, method, partial(self._launch, letter))
            setattr(self, f"wait_{method}", partial(self._wait, letter))

    def reserve(self, rooms: Mapping[str, Rooms], device: torch.device) -> None:
        """Allocates the receive buffers, and tensors that are sent instead of results."""
        super().reserve(rooms, device)
        self._device = device
        for letter, value in VALUES.items():
            boundary = self._output.after if value.onward else self._input.before
            slices = range(self._numbering.slices if boundary and boundary.of_micros else 1)
            self._fake[letter] = [
                getattr(boundary.at(place), value.buffers)(device) if boundary else () for place in slices
            ]

    def pair(self, forward: tuple[Any, ...], other: Stage, backward: tuple[Any, ...]) -> None:
        """Sleeps for the time of a pair; hands on tensors of the shapes of its forward and its backward."""
        assert isinstance(other, RehearsedStage)
        weights = [
            mean(pair) for pair in zip(_of(forward[0], self._weights), _of(backward[0], self._weights), strict=True)
        ]
        self._sleep_for(PAIRED, weights)
        self._hand_on_fakes("F", forward[0])
        other._hand_on_fakes("B", backward[0])

    def _sleep(self, letter: str, micros: Micros, *_values: Any) -> None:
        self._sleep_for(letter, _of(micros, self._weights))
        self._hand_on_fakes(letter, micros)

    def _sleep_for(self, letter: str, weights: Iterable[float]) -> None:
        for weight in weights:
            time.sleep(max(0.0, self._seconds.get(letter, 0.0) * weight - self._slack))

    def _launch(self, letter: str, micros: Micros) -> None:
        seconds = sum(_of(micros, self._sizes)) * self._seconds.get(letter, 0.0)
        self._ends[letter, micros] = self._link.launch(seconds)

    def _wait(self, letter: str, micros: Micros) -> None:
        time.sleep(max(0.0, self._ends.pop((letter, micros)) - time.perf_counter()))

    def _hand_on_fakes(self, letter: str, micros: Micros) -> None:
        for value in MAKES.get(letter, ()):
            fakes = self._fake[value]
            first = micros[0] if isinstance(micros, tuple) else micros
            fake, before = fakes[first % len(fakes)], self._input.at(first)
            if before is not self._input.before and before is not None and not VALUES[value].onward:
                fake = before.at(first).gradient_buffers(self._device)  # for those feeding stages that it has
            self._hand_on(value, micros, repeated(micros, fake))


def _of(micros: Micros, weights: Sequence[float]) -> list[float]:
    """The weight of each of ``micros``, a factor of its time; ``weights`` repeat, and are all 1 if there are none."""
    several = micros if isinstance(micros, tuple) else (micros,)
    return [weights[micro % len(weights)] if weights else 1 for micro in several]


def repeated(micros: Micros, fake: Tensors) -> Tensors:
    """Returns the tensors of one micro-batch, repeated for each micro-batch of an operation and joined."""
    return join([fake] * len(micros)) if isinstance(micros, tuple) and len(micros) > 1 else fake


def rehearsed(seconds: Mapping[str, float], job: Job) -> Callable[..., Stage]:
    """Returns a function that makes stages which sleep; ``seconds`` has each kind's time for a whole micro-batch."""
    return partial(
        RehearsedStage,
        seconds={kind: value / job.parts for kind, value in seconds.items()},
        slack=overshoot(),
        cost_weights=cost_weights(job),
        sizes=slice_sizes(job),
        rehearsed_link=RehearsedLink(),
    )


def cost_weights(job: Job) -> Sequence[float]:
    """Returns factors for the time of consecutive parts, which repeat: a slice longer than the mean takes longer."""
    sizes = slice_sizes(job)
    if not sizes:
        return job.weights
    weights = job.weights or (1,) * len(sizes)
    return [weight * sizes[place % len(sizes)] for place, weight in enumerate(weights)]


def slice_sizes(job: Job) -> Sequence[float]:
    """The length of each slice of a micro-batch, divided by their mean; empty if all are equal."""
    return [length * len(job.lengths) / sum(job.lengths) for length in job.lengths]


def overshoot() -> float:
    """Seconds by which a sleep of 2 ms is too long on this machine: the third shortest of 21 samples, as it may be idle
    later.
    """
    samples = []
    for _ in range(21):
        start = time.perf_counter()
        time.sleep(0.002)
        samples.append(time.perf_counter() - start - 0.002)
    return sorted(samples)[2]


class Terminated(Exception):
    """End of a run after a signal such as SIGTERM, once a checkpoint is saved; ``status`` is that of the rank."""

    def __init__(self, name: str, update: int, directory: Path) -> None:
        super().__init__(f"{name}: saved after update {update} in {directory}, for --resume")
        self.status = INTERRUPTED if name == "SIGINT" else TERMINATED


@dataclass
class Saving:
    """Reads and writes weights and checkpoints for the training loop, as the options ask.

    ``write`` writes a line for the user, on rank 0. ``termination`` returns the name of the signal that has come to any
    rank, or None. ``shared`` are further objects with a state that is the same on all ranks. ``reserve`` refuses the
    path of an option that another job will write. If ``--export`` names a directory, ``describe`` writes all files
    there but weights. ``is_over`` says that training ends early, because a rank has called `Pipeline.ask_to_stop`.
    """

    options: argparse.Namespace
    pipe: Pipeline
    optimizers: Iterable[Any]
    schedulers: Sequence[Any]
    shared: Mapping[str, Stateful]
    write: Callable[[str], None]
    termination: Callable[[], str | None]
    reserve: Callable[[str, Path], None]
    describe: Callable[[Path], None] | None = None
    is_over: bool = False
    _checkpoints: Checkpoints | None = None
    _outcomes: deque[Outcome] = field(default_factory=deque)
    _saved: int = -1

    def __post_init__(self) -> None:
        if (directory := self.options.save or self.options.resume) is not None:
            optimizers, keep = [*self.optimizers], self.options.keep
            other = next((made for made in optimizers if not isinstance(made, torch.optim.Optimizer)), None)
            if other is not None:
                raise optimizer_cannot_be_saved(name=type(other).__name__)
            self._checkpoints = Checkpoints(
                directory, self.pipe, optimizers, schedulers=self.schedulers, shared=self.shared, keep=keep
            )

    def begin(self) -> None:
        """Loads the weights of ``--load``, then the checkpoint of ``--resume``. Raises `BadCheckpoint` or `Misuse` if
        that fails, or ``--save`` or ``--export`` cannot be written later.
        """
        options = self.options
        if options.export is not None:
            if self.describe is not None:
                try:
                    options.export.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise weights_cannot_be_written(path=options.export, reason=str(error.strerror)) from error
            require_writable(self._exported)
            self.reserve("--export", self._exported)
        if options.load is not None:
            unknown = self.pipe.load_weights(options.load)
            if unknown:
                self.write(f"--load {options.load}: the model has no {', '.join(unknown)}")
        if options.resume is not None and self._checkpoints is not None:
            resumed = self._checkpoints.resume(options.resume)
            if resumed is None:
                self.write(f"--resume {options.resume}: no checkpoint there yet; the training begins")
            else:
                self._saved = resumed.update
                self.write(f"resumed from {resumed.path}, after update {resumed.update}, item {resumed.items}")
                for remark in resumed.remarks:
                    self.write(remark)
                if resumed.update >= (updates := options.steps) and not options.check_only:
                    self.write(f"nothing left to do: {resumed.update} of {updates} updates are done (--steps)")
        if options.save is not None and self._checkpoints is not None:
            self._checkpoints.claim()

    @property
    def _exported(self) -> Path:
        path: Path = self.options.export
        return path if self.describe is None else path / "model.safetensors"

    def is_due(self, outcome: Outcome | None) -> bool:
        """Whether to save now, after the update with this outcome. Sets `is_over` by the outcome of the update before:
        the newest one would wait for the slowest rank.
        """
        if outcome is not None:
            self._outcomes.append(outcome)
        self.is_over = len(self._outcomes) > 1 and self._outcomes.popleft().is_last
        every = self.options.save_every
        return every is not None and self.pipe.updates % every == 0 and self.pipe.updates != self.options.steps

    def save(self) -> None:
        """Saves, unless there is a checkpoint of the last update already."""
        if self._checkpoints is not None and self._saved != self.pipe.updates:
            self._checkpoints.save()
            self._saved = self.pipe.updates

    def end(self) -> None:
        """Saves and exports at the end of training. Raises `Terminated` if it ended after a signal, `BadCheckpoint` if
        a file cannot be written.
        """
        options = self.options
        if options.save is not None and not options.check_only:
            self.save()
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self.is_over and (name := self.termination()) is not None:
            raise Terminated(name, self.pipe.updates, options.save)
        if options.export is not None:
            self.pipe.export_weights(self._exported)
            if self.describe is not None and self.pipe.copy == self.pipe.worker == 0:
                self.describe(options.export)
            self.write(f"exported to {options.export}")
