"""`Updates`, with a flush or without one.

With a flush an update ends before the next one begins, and the caller's optimizer steps. In a stream, which has none,
several are under way, and stages step inside the schedule.
"""

import json
import logging
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from chimera_runtime.data.feed import Feed
from chimera_runtime.errors import Misuse, PeerLost, RanksDiffer, visible
from chimera_runtime.errors import stage as mistakes
from chimera_runtime.lane.lane import Lane, LaneComponents
from chimera_runtime.lane.stream_lane import Driver
from chimera_runtime.optimizer.optimizer_facts import next_moment
from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Round
from chimera_runtime.ranks.agreement import SCALE, ControlGroup, Fact, FactComparison, Facts, Key, averaged_in_mesh
from chimera_runtime.ranks.messages import Reader
from chimera_runtime.ranks.monitor import end_process
from chimera_runtime.stage.gradient_sums import main_gradient, set_gradient
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.assemble import RankContext, driver_of, loss_share
from chimera_runtime.update.rounds import SumsAlone
from chimera_runtime.update.stage_optimizer import Hook, Named, StepHooks
from chimera_runtime.values.losses import Tally, added
from chimera_runtime.values.mesh_tensors import is_spread, local, mesh_of

# `Outcome` of an update: the loss of its mini-batch, summed over all ranks while the next step runs.

_AT_ONCE = 16
"""The largest number of sums of losses under way at once, if updates overlap; with a flush there is one."""


class Clearings(NamedTuple):
    """What a loop did to gradients between two steps: it ``cleared`` some that no optimizer stepped, or ``kept`` some.

    A parameter without a gradient counts as cleared if some were cleared and none was kept. If both happened, it is
    ``unknown`` whether steps before count for a parameter that has got its first gradient now.
    """

    cleared: bool
    kept: bool
    unknown: bool


NOTHING_CLEARED = Clearings(False, False, False)


@dataclass
class Outcome:
    """The outcome of update number ``update``, counted from 0; ``computed_here`` is this rank's part of the losses.

    ``_numbers`` is summed over the ranks: ``[loss, count, auxiliary losses, reports, ranks with new reports, request to
    stop, clearings, facts]``. Reports whose names the ranks do not know of each other yet are in the store, under
    ``_key`` and the number of a rank that has some, from 1; `settle` reads them into ``new_reports``.
    """

    update: int
    computed_here: Tally
    _control_group: ControlGroup
    _counted: bool
    _names: Sequence[str]
    _numbers: "array[float]"
    _work: dist.Work | None
    _compare: Callable[[Sequence[float]], None] | None = None
    _reported: Sequence[str] = ()
    _key: str = ""
    new_reports: Tally = field(default_factory=Tally, init=False)

    @property
    def loss(self) -> float:
        """The loss of the mini-batch on the weights that it was computed with: the same number on every rank.

        Where ``loss`` returns sums and counts, it is their quotient: NaN if the count is 0. The sum over the ranks is
        under way since the end of the step; reading the loss waits for it.

        Raises
        ------
        PeerLost
            If that takes longer than the time-out, or a rank has ended.
        RanksDiffer
            If ranks differ in something that must be the same on them.
        """
        return self._tally.mean

    @property
    def auxiliary(self) -> dict[str, float]:
        """Each auxiliary loss of the mini-batch, by its name; ``loss`` does not include them. Errors as in `loss`."""
        return self._tally.auxiliary_means

    @property
    def reports(self) -> dict[str, float]:
        """Numbers that stages and loss have reported, averaged over micro-batches and copies; errors as in `loss`."""
        return (self._tally + self.new_reports).report_means

    @property
    def weight(self) -> float:
        """Weight of the mini-batch among others: its count, or 1 if ``loss`` returns means. Errors as in `loss`."""
        return self._tally.count if self._counted else 1.0

    @property
    def is_last(self) -> bool:
        """Whether any rank called `Pipeline.ask_to_stop` before this update's sum; errors as in `loss`."""
        self.settle()
        return bool(self._numbers[self._losses + 1])

    @property
    def clearings(self) -> Clearings:
        """What the loop did to gradients before the update, on any rank; errors as in `loss`."""
        self.settle()
        return Clearings(*map(bool, self._numbers[self._losses + 2 : self._losses + 5]))

    def settle(self) -> None:
        """Waits for the sum, and compares the facts that came with it; errors as in `loss`."""
        self._control_group.check()
        if self._work is not None:
            self._control_group.settle(self._work, "for the loss of a step")
            self._work = None
        if self._compare is not None:
            self._compare(self._numbers[self._losses + 2 :])
            self._compare = None
            ranks, store = range(1, 1 + int(self._numbers[self._losses])), self._control_group.store
            messages = [json.loads(store.get(f"{self._key}/{number}")) for number in ranks]
            self.new_reports = added(Tally(reports={name: (*sums,) for name, sums in new.items()}) for new in messages)

    @property
    def _losses(self) -> int:
        return 2 + len(self._names) + 2 * len(self._reported)

    @property
    def is_there(self) -> bool:
        """Whether the sum has arrived, so that reading it does not wait."""
        return self._work is None or self._work.is_completed()

    @property
    def _tally(self) -> Tally:
        self.settle()
        return Tally.of(self._numbers[: self._losses], self._names, self._reported)


@dataclass(eq=False)
class Outcomes:
    """Launches the sum of the losses of each update over the ranks, and waits for it while later sums are launched.

    Facts and the request to stop are added up together with the losses. All ranks wait for a sum at the same point of
    the program: so all learn of a request to stop after the same update, and raise an error together.

    ``names`` are the auxiliary losses of all stages, ``reported`` the reports that all ranks know of. ``facts_of``
    returns the facts of an update that must be equal on all ranks.
    """

    control_group: ControlGroup
    job: Job
    read: Reader
    _: KW_ONLY
    counted: bool
    names: Sequence[str] = ()
    reported: tuple[str, ...] = ()
    asked_to_stop: bool = False
    facts_of: Callable[[int], dict[Key, Fact]] = lambda _update: {}

    def __post_init__(self) -> None:
        self.agreement = FactComparison(self.control_group, self.job)
        self._difference: RanksDiffer | None = None
        self._at_once = min(self.job.lag + 1, _AT_ONCE)
        self._under_way: deque[Outcome] = deque()

    def require_agreement(self) -> None:
        """Raises `RanksDiffer` if a sum has shown that ranks differ."""
        if self._difference is not None:
            raise self._difference

    def explain(self) -> None:
        """Raises RanksDiffer if a sum that has arrived shows that ranks differ: another rank may have ended for it."""
        with suppress(PeerLost):  # a sum that failed with the lost rank counts as arrived
            while self._under_way and self._under_way[0].is_there:
                self._under_way.popleft().settle()

    def settle(self) -> None:
        """Waits for all sums under way. Call it before connections close, as other ranks need them for these sums."""
        while self._under_way:
            self._settle_first()

    def compare(self, facts: Facts, where: str) -> None:
        """Raises RanksDiffer on all ranks if any two have different facts; every rank calls it."""
        numbers = array("d", self.agreement.numbers(facts))
        if numbers:
            self.control_group.reduce(_tensor(numbers), "to compare replicas")
            self._compare(self.agreement.number(), where, facts, numbers)

    def launch(self, update: int, tally: Tally, clearings: Clearings = NOTHING_CLEARED) -> Outcome:
        """Launches the sum of an update's losses; ``clearings`` says what the loop did to gradients before it."""
        facts = self.facts_of(update)
        number = self.agreement.number()
        key, store = f"reports/{number}", self.control_group.store
        new = {name: sums for name, sums in tally.reports.items() if name not in self.reported}
        if new:
            store.set(f"{key}/{store.add(key, 1)}", json.dumps(new))
        losses = [*tally.numbers(self.names, self.reported), float(bool(new)), float(self.asked_to_stop)]
        numbers = array("d", [*losses, *map(float, clearings), *self.agreement.numbers(facts)])
        compare = partial(self._compare_update, number, f"update {update + 1}", facts)
        work, reported = self.control_group.post_reduce(_tensor(numbers), "for the loss of a step"), self.reported
        while len(self._under_way) >= self._at_once:
            self._settle_first()
        whose = self.control_group, self.counted, self.names
        outcome = Outcome(update, tally, *whose, numbers, work, compare, reported, key)
        self._under_way.append(outcome)
        return outcome

    def _settle_first(self) -> None:
        """Waits for the oldest sum. All ranks do so at the same point, and know its reports from then on."""
        first = self._under_way.popleft()
        first.settle()
        self.reported += tuple(sorted(first.new_reports.reports.keys() - {*self.reported}))

    def _compare_update(self, number: int, where: str, facts: Facts, sums: Sequence[float]) -> None:
        self._compare(number, where, facts, sums[len(NOTHING_CLEARED) :])
        if all(sums[: len(NOTHING_CLEARED)]):
            self._difference = mistakes.cleared_in_part(where=where)
            raise self._difference

    def _compare(self, number: int, where: str, facts: Facts, sums: Sequence[float]) -> None:
        self.require_agreement()
        if differing := self.agreement.differing(sums):
            self._difference = self.agreement.error(number, where, differing, facts)
            raise self._difference


def _tensor(numbers: "array[float]") -> torch.Tensor:
    """Returns the numbers as a tensor in the same memory: a sum into the tensor is a sum into the numbers."""
    return torch.frombuffer(numbers, dtype=torch.float64)


# Accumulation: gradients of several steps become those of one larger mini-batch.
#
# The steps whose mean a gradient is are its window. A window ends when the loop clears the gradient, or when an
# optimizer steps the parameter. A parameter without a gradient cannot show that it was cleared. If no optimizer of
# torch has stepped it, what the loop did to the gradients of other parameters decides, on any rank: ranks tell each
# other with the sum of the loss of the next step.


@dataclass(frozen=True, eq=False)
class Step:
    """A step in the windows of parameters, or several steps joined to one.

    ``items`` is the weight of the step; it is None if that is the count of the mini-batch. ``scale`` is the factor of
    the loss. ``moment`` tells when the step ended, and ``key`` which steps it is.
    """

    outcome: Outcome
    items: float | None
    is_counted: bool
    scale: float
    moment: int
    key: int

    @property
    def weight(self) -> float:
        """Weight of the step among others. It waits for the sum of the loss if that has the count."""
        return self.outcome.weight if self.items is None else self.items

    @property
    def begins_anew(self) -> bool:
        """Whether a parameter without a gradient counts as cleared before the step. Waits for the sum of the loss."""
        return self.outcome.clearings.cleared and not self.outcome.clearings.kept

    @property
    def is_ambiguous(self) -> bool:
        """Whether it is unknown if such a parameter was cleared. Waits for the sum of the loss."""
        return self.outcome.clearings.cleared and self.outcome.clearings.kept


@dataclass(eq=False)
class Window:
    """The steps whose mean the gradient of a parameter is; all pipelines that train it have the same window.

    Before the steps at the places ``unclear`` the parameter had no gradient. ``left`` has address and version counter
    of the gradient after the last step, or is None if there was none.
    """

    steps: list[Step] = field(default_factory=list)
    unclear: list[int] = field(default_factory=list)
    left: tuple[int, int] | None = None

    def end(self) -> None:
        """Begins anew: no step counts so far."""
        self.steps, self.unclear = [], []

    def resolve(self, until: int) -> None:
        """Removes the steps of an earlier window, if one of the unclear places below ``until`` turns out to end it."""
        start = max((place for place in self.unclear if place < until and self.steps[place].begins_anew), default=0)
        open_places = [p for p in self.unclear if p >= until or (p > start and self.steps[p].is_ambiguous)]
        self.steps, self.unclear = self.steps[start:], [place - start for place in open_places]


class Accumulation:
    """Averages the gradients of a new step with those of earlier steps, or refuses a step while there are gradients.

    The average of a parameter is over all steps of its window, also over steps that gave it no gradient. A step weighs
    as much as its mini-batch has ``items``, or by the count of the mini-batch if ``loss`` returns counts: then
    ``mean_in_mesh`` is needed, as for a parameter that is spread over a mesh the weight is the mean of the counts
    there. ``last_steps`` returns the parameters that optimizers have stepped, each with the moment of the last step.
    """

    _living: ClassVar[WeakSet["Accumulation"]] = WeakSet()

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        items: int = 1,
        mean_in_mesh: Callable[[Sequence[float], Any], list[float]] | None = None,
    ) -> None:
        self.last_steps: Callable[[], Mapping[torch.Tensor, int]] = dict
        self.items = items  # of the mini-batch of the step under way
        self._mean_in_mesh = mean_in_mesh
        self._named = {name: (parameter, parameter.requires_grad) for name, parameter in named.items()}
        known: dict[torch.nn.Parameter, Window] = {}
        for other in self._living:
            known |= other._windows
        self._windows: dict[torch.nn.Parameter, Window] = {
            p: known.get(p) or Window() for p, trained in self._named.values() if trained
        }
        self._spread = {parameter for parameter in self._windows if is_spread(parameter)}
        # About the step that has begun: gradients to average with, parameters that may have been cleared, and so on.
        self._earlier_gradients: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._unclear: set[torch.nn.Parameter] = set()
        self._clearings = NOTHING_CLEARED
        self._scale = 1.0
        self._living.add(self)

    def begin(self, accumulate: bool, scale: float = 1.0) -> None:
        """Copies the gradients that a step is to be averaged with; ``scale`` is the factor of its loss.

        Raises `Misuse` if there are gradients and ``accumulate`` is false, if one cannot be averaged with that of the
        step, or if ``requires_grad`` of a parameter has changed.
        """
        changed = next((name for name, (p, trained) in self._named.items() if p.requires_grad != trained), None)
        if changed is not None:
            raise mistakes.training_of_parameter_changed(name=changed)
        kept = self._with_gradients()
        if kept and not accumulate:
            raise mistakes.gradient_is_still_there(name=next(iter(kept)))
        last_steps = self.last_steps() if accumulate else {}
        stepped = {p for p, w in self._windows.items() if w.steps and last_steps.get(p, 0) > w.steps[-1].moment}
        # Copies of the gradients that are kept, as the update will overwrite them. No step writes those of frozen ones.
        self._earlier_gradients = {}
        for name, parameter in kept.items():
            if parameter in self._windows and (gradient := main_gradient(parameter)) is not None:
                self._require_mean(name, parameter, scale, parameter in stepped)
                self._earlier_gradients[parameter] = gradient.clone()
        # Which windows end here; those of other parameters without a gradient may end as well.
        cleared, self._unclear = False, set()
        for parameter, window in self._windows.items():
            if not accumulate or parameter in stepped:
                window.end()
            elif parameter not in self._earlier_gradients:
                cleared = cleared or window.left is not None
                if window.left is not None and parameter.grad is None:
                    window.end()
                elif window.steps:
                    self._unclear.add(parameter)
        self._clearings, self._scale = Clearings(cleared, bool(self._earlier_gradients), False), scale

    def _require_mean(self, name: str, parameter: torch.nn.Parameter, scale: float, is_stepped: bool) -> None:
        window = self._windows[parameter]
        if window.left is None:
            raise mistakes.gradient_is_of_no_step(name=name)
        if is_stepped:
            raise mistakes.gradient_was_stepped(name=name)
        if window.steps[-1].scale != scale:
            raise mistakes.scale_has_changed(name=name, before=window.steps[-1].scale, now=scale)
        if window.steps[-1].is_counted != (self._mean_in_mesh is not None):
            raise mistakes.means_and_counts(name=name)

    def clearings(self) -> Clearings:
        """What the loop did to gradients before the step, for the other ranks; call it when the step has gradients."""
        new = [self._windows[parameter] for parameter in self._unclear if parameter.grad is not None]
        if any(window.steps[place].is_ambiguous for window in new for place in window.unclear):
            return Clearings(True, True, True)
        return self._clearings._replace(unknown=bool(new))

    @torch.no_grad()
    def end(self, outcome: Outcome) -> None:
        """Replaces each gradient by its mean with the earlier gradients, weighted by step.

        Raises `RanksDiffer` if it cannot be known whether earlier steps count for a parameter.
        """
        is_counted, moment = self._mean_in_mesh is not None, next_moment()
        items = None if is_counted else float(self.items)
        step = Step(outcome, items, is_counted, self._scale, moment, moment)
        averaged = []
        for parameter, window in self._windows.items():
            if parameter in self._unclear:
                window.unclear.append(len(window.steps))
            window.steps.append(step)
            has_gradient = parameter.grad is not None or parameter in self._earlier_gradients
            if window.unclear:
                window.resolve(len(window.steps) - (not has_gradient))
            if has_gradient and len(window.steps) > 1:
                averaged.append(parameter)
        self._average(averaged)
        self._earlier_gradients = {}
        for parameter, window in self._windows.items():
            window.left = self._mark(parameter)

    def note_scaled(self, unscaled: Iterable[torch.nn.Parameter] = ()) -> None:
        """Call it after the gradients that the last step left were scaled; some were ``unscaled`` by a GradScaler."""
        for parameter in unscaled:
            if (window := self._windows.get(parameter)) is not None and window.steps:
                window.steps = [*window.steps[:-1], replace(window.steps[-1], scale=1.0)]
        for parameter, window in self._windows.items():
            if window.left is not None and parameter.grad is not None:
                window.left = self._mark(parameter)

    def _average(self, averaged: Sequence[torch.nn.Parameter]) -> None:
        keys = {p: (mesh_of(p), *[step.key for step in self._windows[p].steps]) for p in averaged}
        windows = {key: self._windows[p].steps for p, key in keys.items()}
        weights = {key: [sum(s.weight for s in before), last.weight] for key, (*before, last) in windows.items()}
        joined = {key: replace(w[-1], items=sum(weights[key]), key=hash(key[1:])) for key, w in windows.items()}
        if self._mean_in_mesh is not None:
            for mesh in dict.fromkeys(key[0] for key in windows if key[0] is not None):
                of_mesh = [key for key in windows if key[0] is mesh]
                means = iter(self._mean_in_mesh([number for key in of_mesh for number in weights[key]], mesh))
                weights |= {key: [next(means), next(means)] for key in of_mesh}
        for parameter, key in keys.items():
            before, last = weights[key]
            self._add_earlier(parameter, before / (before + last) if before else 0.0)
            self._windows[parameter].steps = [joined[key]]

    def _add_earlier(self, parameter: torch.nn.Parameter, share: float) -> None:
        """Replaces a gradient by ``share`` times the earlier one plus (1 - ``share``) times the new one."""
        earlier, made = self._earlier_gradients.get(parameter), main_gradient(parameter)
        if made is None:
            made = earlier if earlier is None else earlier.mul_(share)
        else:
            made.mul_(1 - share)
            if earlier is not None:
                made.add_(earlier, alpha=share)
        if made is not None:
            set_gradient(parameter, made)

    def _with_gradients(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that have a gradient, other than the zeros of ``zero_grad(set_to_none=False)``, by name."""
        present = {name: p for name, (p, _) in self._named.items() if p.grad is not None}
        windows = {p: window for p in present.values() if (window := self._windows.get(p)) is not None}
        written = [p for p in present.values() if p not in windows or windows[p].left != self._mark(p)]
        # A read waits for the device: there is one, however many parameters there are.
        flags = [local(p.grad).any() for p in written if p.grad is not None]
        read = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
        cleared = {p for p, is_set in zip(written, read, strict=True) if not is_set}
        return {name: p for name, p in present.items() if p not in cleared}

    def _mark(self, parameter: torch.nn.Parameter) -> tuple[int, int] | None:
        """Address and version counter of a gradient, which show whether it was replaced or written."""
        gradient = parameter.grad
        if gradient is None:
            return None
        shown = local(gradient) if parameter in self._spread else gradient
        return 0 if shown.is_sparse else shown.data_ptr(), shown._version


# `Hooks`: functions that tools give a `Pipeline` to call; by them train.py checks, measures and records.

_LOG = logging.getLogger("chimera_runtime")


class Hooks:
    """Functions that `Pipeline` calls while it is made. A tool overrides some of them; the rest keep the defaults here.

    ``measures`` says whether the memory that a forward of each stage keeps is measured at start, ``loads`` whether data
    are loaded, ``explains`` whether the error of a lost rank gets notes about the waits of others, which take seconds.
    """

    measures = False
    loads = True
    explains = True

    def lost(self, error: PeerLost) -> None:
        """Called in a thread when a rank does not answer: ends this process, as its main thread would wait for ever."""
        end_process(error)

    def ready(self, context: RankContext, modules: dict[int, torch.nn.Module]) -> None:
        """Called when modules are built and probed, before any buffer is allocated."""

    def remark(self, remark: str) -> None:
        """Called on the first rank with each of `Pipeline.remarks`; gives it to the logger ``chimera_runtime``."""
        _LOG.warning("%s", visible(remark))

    def stage_maker(self, job: Job) -> Callable[..., Stage]:
        """Returns a function that makes a stage from the arguments of `Stage`."""
        return Stage

    def wrapped(self, components: LaneComponents, stages: dict[int, Stage]) -> LaneComponents:
        """Returns the components of the lane; a tool may return wrappers that record their calls."""
        return components

    def outcomes_class(self, job: Job) -> type[Outcomes]:
        """Returns the class of the pipeline's `Outcomes`."""
        return Outcomes


class LossScale(Protocol):
    """A factor of the loss: a GradScaler of torch, or any other object with a method like its ``scale``."""

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns a tensor multiplied by the factor."""


@dataclass(kw_only=True)
class Updates(ABC):
    """The updates of a schedule on this rank: a call of `Pipeline.step` calls `prepare` and `run_update` once each.

    ``started`` is the number of updates that have been started. ``terms`` has, as numbers by name, the arguments of the
    newest `prepare` that must be equal on all ranks.
    """

    stages: Mapping[int, Stage]
    feed: Feed
    outcomes: Outcomes
    started: int = 0
    terms: Mapping[str, float] = field(default_factory=dict)

    @abstractmethod
    def prepare(self, accumulate: bool, scaler: LossScale | None) -> None:
        """Prepares gradients and the scale of the loss for an update. Raises `Misuse` if an argument does not fit."""

    @abstractmethod
    def run_update(self) -> Outcome | None:
        """Runs one more update, on the mini-batch in the feed; returns the outcome of the newest complete one."""

    @abstractmethod
    def finish(self) -> None:
        """Completes the updates that are under way."""

    @property
    def are_complete(self) -> bool:
        """Whether no update is under way."""
        return True

    def take_outcomes(self) -> list[Outcome]:
        """Returns the outcomes of the updates that `finish` has completed since the last call."""
        return []

    def count_from(self, updates: int) -> None:
        """Sets the number of updates before the next one, from which seeds follow; none may be under way."""
        self.started = updates
        for stage in self.stages.values():
            stage.count_from(updates)


@dataclass(kw_only=True)
class FlushedUpdates(Updates):
    """The `Updates` of a schedule with a flush: a call of `run_update` runs a whole update.

    ``scripts`` are the functions ``update`` of this rank's scripts, by the number of micro-batches; `choose` says which
    of them run. ``share_of`` returns the weight of a micro-batch's loss in an update of so many over all copies. A
    GradScaler has its scale on ``device``. ``sums_wider`` says that gradients are summed in another dtype than that of
    the weights, into ``main_grad``. If shapes vary, ``fit`` fits the stages to those of a round.
    """

    scripts: Mapping[int, Callable[[Lane], None]]
    lane: Lane
    accumulation: Accumulation
    share_of: Callable[[int], float]
    device: torch.device
    sums_wider: bool
    rounds: Sequence[Round]
    micro_batches: int  # of the update over all copies
    fit: Callable[[Round], None] | None = None

    def prepare(self, accumulate: bool, scaler: LossScale | None) -> None:
        """Clears all gradients, after copying them if the update is to ``accumulate``, and scales the loss."""
        if scaler is not None and self.sums_wider:
            raise Misuse(mistakes.SCALER_WITH_WIDER_SUMS)
        # The scale that a scaler has is the factor by which it multiplies; a new one is initialized by the call.
        scale = 1.0 if scaler is None else float(scaler.scale(torch.ones((), device=self.device)))
        self.accumulation.begin(accumulate, scale)
        self.accumulation.items = self.feed.size * self.micro_batches
        self.terms = {"accumulate": accumulate, SCALE: scale}
        share = self.share_of(self.micro_batches)
        for stage in self.stages.values():
            for group in stage.groups:
                group.gradient_sum.clear()
            stage.weigh_loss(share, scale)

    def run_update(self) -> Outcome:
        """Runs a whole update and returns its outcome; ``.grad`` is then the gradient of the mini-batch's loss."""
        update = self.started
        # A script makes all calls of a schedule; the last one returns when gradients are summed over the replicas.
        for each in self.rounds:
            if len(self.scripts) > 1:
                self._begin_round(each)
            if self.fit is not None:
                self.fit(each)
            self.lane.begin(update)
            self.scripts[each.number](self.lane)
            self.lane.end()
        # Losses that were computed here go to the other ranks while this one steps and begins the next update.
        losses = added(stage.take_loss(update) for stage in self.stages.values())
        outcome = self.outcomes.launch(update, losses, self.accumulation.clearings())
        self.feed.drop(update)
        self.accumulation.end(outcome)
        self.started += 1
        return outcome

    def choose(self, rounds: Sequence[Round], micro_batches: int) -> None:
        """Chooses the rounds of the next update, which has so many micro-batches over all copies."""
        self.rounds, self.micro_batches = rounds, micro_batches

    def _begin_round(self, each: Round) -> None:
        self.feed.start = each.start
        self.lane.begin_round(each.start * self.feed.job.parts, each.is_last)

    def finish(self) -> None:
        """Does nothing: no update is under way."""


def step_hooks_of(
    job: Job, optimizer: Callable[[Named], Any] | None, before: Hook | None, after: Hook | None
) -> StepHooks | None:
    """Returns the user's functions for steps inside the schedule; None if the schedule has a flush.

    Raises `Misuse` if the optimizer is missing, or a function is given that would never be called.
    """
    if job.period:
        if optimizer is None:
            raise mistakes.optimizer_is_missing(scheme=job.name)
        return StepHooks(optimizer, before, after)
    if (optimizer, before, after) != (None, None, None):
        raise mistakes.optimizer_would_not_be_called(scheme=job.name)
    return None


@dataclass(kw_only=True)
class StreamedUpdates(Updates):
    """The `Updates` of a stream: a call of `run_update` starts an update, and may complete an earlier one.

    The sum of an update's losses is launched in the call in which the last rank completes the update, which all ranks
    know from the schedule. So all ranks launch the sums in the same order, and a sum waits for no later call.
    """

    job: Job
    driver: Driver
    _completed: int = 0
    _dropped: int = 0  # updates whose mini-batches the feed no longer holds
    _finished: list[Outcome] = field(default_factory=list)

    def prepare(self, accumulate: bool, scaler: LossScale | None) -> None:
        """Raises `Misuse` if gradients are to be accumulated or scaled, or the user cleared one during an update."""
        if accumulate:
            raise mistakes.accumulation_without_flush(scheme=self.job.name)
        if scaler is not None:
            raise mistakes.scaler_without_flush(scheme=self.job.name)
        for number, stage in self.stages.items():
            disturbed = {group.gradient_sum.disturbed for group in stage.groups}
            name = next((name for name, parameter in stage.module.named_parameters() if parameter in disturbed), None)
            if name is not None:
                raise mistakes.gradient_was_taken_away(stage=number, name=name)

    def run_update(self) -> Outcome | None:
        """Starts one more update; returns the outcome of the update that this call completes, if there is one."""
        # Mini-batches of earlier updates are still read: the loop must not have changed them since.
        self.feed.require_unwritten_batches()
        self.started += 1
        # The driver runs the turns of the script that need no later update of any rank.
        self.driver.add_update()
        self._drop_mini_batches()
        # After ``lag`` further updates an update is complete on every rank.
        return self._complete() if self.started - self._completed > self.job.lag else None

    def finish(self) -> None:
        """Completes the updates under way. The next update starts with empty pipelines, on the newest weights."""
        self.feed.require_unwritten_batches()
        self.driver.drain()
        self._drop_mini_batches()
        while self._completed < self.started:
            self._finished.append(self._complete())
        self.driver.begin(self.started)

    @property
    def are_complete(self) -> bool:
        """Whether no update is under way."""
        return self._completed == self.started

    def take_outcomes(self) -> list[Outcome]:
        """Returns the outcomes of the updates that `finish` has completed since the last call."""
        outcomes, self._finished = self._finished, []
        return outcomes

    def count_from(self, updates: int) -> None:
        """Sets the number of updates before the next one, as in `Updates`."""
        super().count_from(updates)
        self._completed = self._dropped = updates
        self.driver.begin(updates)

    def _complete(self) -> Outcome:
        update = self._completed
        self._completed += 1
        return self.outcomes.launch(update, added(stage.take_loss(update) for stage in self.stages.values()))

    def _drop_mini_batches(self) -> None:
        """Drops the mini-batches of the updates for which every stage of this rank has stepped."""
        stepped = min((stage.updates for stage in self.stages.values()), default=self.started)
        for update in range(self._dropped, stepped):
            self.feed.drop(update)
        self._dropped = stepped
        self.feed.note_versions()


def updates_of(
    context: RankContext,
    lane: Lane,
    stages: Mapping[int, Stage],
    feed: Feed,
    *,
    outcomes: Outcomes,
    parameters: Mapping[str, torch.nn.Parameter],
    scripts: Mapping[int, Callable[[Lane], None]],
    sum_dtype: torch.dtype | None,
) -> Updates:
    """Makes the updates of a rank from its stages and its lane. ``scripts`` are its functions ``update``, by the number
    of micro-batches; ``sum_dtype`` is as in `Pipeline`.
    """
    world = context.world
    if world.job.period:
        driver = driver_of(context, lane)
        return StreamedUpdates(job=world.job, driver=driver, stages=stages, feed=feed, outcomes=outcomes)
    mean_in_mesh = partial(averaged_in_mesh, world.control_group, device=world.device)
    job = world.job
    return FlushedUpdates(
        scripts=scripts if len(scripts) == 1 else {0: lambda lane: context.script.update(SumsAlone(lane)), **scripts},
        lane=lane,
        stages=stages,
        feed=feed,
        outcomes=outcomes,
        accumulation=Accumulation(parameters, mean_in_mesh=mean_in_mesh if context.probed.expected_count else None),
        share_of=lambda micro_batches: loss_share(context.probed, micro_batches * job.parts),
        device=world.device,
        sums_wider=sum_dtype is not None,
        rounds=(Round(job.micro_batches),),
        micro_batches=job.micro_batches * world.place.copies,
    )
