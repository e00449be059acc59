"""The loss of an update: summed over ranks, read whenever, by nobody else's leave."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import nn

from chimera_runtime.errors import Misuse, PeerLost, RanksDiffer
from chimera_runtime.optimizer.optimizer_facts import next_moment
from chimera_runtime.program.numbering import Round
from chimera_runtime.ranks.agreement import TERMS
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.assemble import components_of
from chimera_runtime.update import updates
from chimera_runtime.update.updates import NOTHING_CLEARED, Accumulation, Clearings, FlushedUpdates, Hooks, Outcomes
from chimera_runtime.values.losses import Tally
from tests.unit.runtime.models import setting
from tests.unit.runtime.thread_ranks import alone_job, job, together, worlds


def outcomes_of(world: World, counted: bool = False, names: tuple[str, ...] = ()) -> Outcomes:
    return Outcomes(world.control_group, world.job, world.read, counted=counted, names=names)


def on_both(alone: World, call: Callable[[World], Any]) -> list[Any]:
    with worlds(alone, job()) as ranks:
        return together([partial(call, world) for world in ranks])


@pytest.mark.parametrize(
    ("tallies", "options", "expected"),
    [
        ([Tally(0.0, 2), Tally(10.0, 2)], {}, (2.5, 1.0, {})),
        ([Tally(6.0, 0), Tally(6.0, 5)], {"counted": True}, (12 / 5, 5.0, {})),
        ([Tally(6.0, 0), Tally(6.0, 5)], {"counted": False}, (12 / 5, 1.0, {})),
        (
            [Tally(6.0, 4.0), Tally(auxiliary={"b": 2.0})],
            {"names": ("a", "b")},
            (1.5, 1.0, {"a": 0.0, "b": 0.5}),
        ),
    ],
    ids=["losses", "counts", "means", "auxiliary"],
)
def test_the_loss_is_the_mean_over_all_ranks_and_the_same_on_each(
    alone: World, tallies: list[Tally], options: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    """A mini-batch weighs its count, and one if the loss is a mean; read again, a loss is the same."""

    def read(world: World) -> Any:
        outcome = outcomes_of(world, **options).launch(7, tallies[world.place.rank])
        assert outcome.update == 7
        return [(outcome.loss, outcome.weight, outcome.auxiliary) for _ in range(2)]

    assert on_both(alone, read) == [[expected, expected]] * 2


def test_it_is_read_long_after_in_any_order(alone: World) -> None:
    def updates(world: World) -> list[float]:
        outcomes = outcomes_of(world)
        launched = [outcomes.launch(update, Tally(float(update), 0.5)) for update in range(20)]
        return [outcome.loss for outcome in reversed(launched)]

    assert on_both(alone, updates) == [[2.0 * u for u in reversed(range(20))]] * 2


def test_what_nobody_reads_is_let_go_once_it_is_over(alone: World) -> None:
    def updates(world: World) -> int:
        outcomes = outcomes_of(world)
        for update in range(200):
            outcomes.launch(update, Tally())
            world.control_group.barrier("for the other one")
        return len(outcomes._under_way)

    assert max(on_both(alone, updates)) < 10


def test_sums_under_way_are_waited_for_at_the_end(alone: World) -> None:
    def ended(world: World) -> list[bool]:
        outcomes = outcomes_of(world)
        launched = [outcomes.launch(update, Tally(1.0, 1)) for update in range(3)]
        outcomes.settle()
        return [outcome.is_there for outcome in launched]

    assert on_both(alone, ended) == [[True] * 3] * 2


def test_a_rank_that_never_ends_its_step_is_given_up(alone: World) -> None:
    """Also by one that holds no stage and launches sums alone: no more than one is under way."""
    with worlds(alone, job(), timeout=0.05) as (first, _):
        outcome = outcomes_of(first).launch(0, Tally(1.0, 1))
        assert not outcome.is_there
        with pytest.raises(PeerLost, match="for the loss of a step: rank 1: no answer within"):
            _ = outcome.loss
    with worlds(alone, job(), timeout=0.2) as (first, _):
        outcomes = outcomes_of(first)
        outcomes.launch(0, Tally())
        with pytest.raises(PeerLost, match="for the loss of a step"):
            outcomes.launch(1, Tally())


def test_the_loss_of_nothing_that_counts_is_not_a_number(alone: World) -> None:
    with worlds(alone, alone_job()) as (world,):
        assert math.isnan(outcomes_of(world, counted=True).launch(0, Tally(0.0, 0.0)).loss)


def test_ranks_hear_what_loops_did_to_gradients_and_refuse_together_what_is_unknown(alone: World) -> None:
    cleared, kept, unknown = (Clearings(*(i == place for i in range(3))) for place in range(3))
    with worlds(alone, job(workers=3, stages=3, placement=((0, 1, 2),), links=())) as ranks:

        def updates(world: World, last: Clearings) -> tuple[Clearings, str]:
            outcomes = outcomes_of(world)
            first = outcomes.launch(0, Tally(), kept if last is cleared else last)
            second = outcomes.launch(1, Tally(), last)
            with pytest.raises(RanksDiffer) as refused:
                second.settle()
            return first.clearings, str(refused.value)[:32]

        heard = together([partial(updates, *of) for of in zip(ranks, (cleared, kept, unknown), strict=True)])
        assert heard == [(Clearings(False, True, True), "update 2: the loop had cleared t")] * 3


def test_all_ranks_hear_with_the_same_update_that_one_has_asked_to_stop(alone: World) -> None:
    """That of the next update: the losses are as they would have been."""

    def updates(world: World) -> list[tuple[float, bool]]:
        outcomes = outcomes_of(world, names=("a",))
        launched = []
        for update in range(4):
            if (world.place.rank, update) == (1, 2):
                outcomes.asked_to_stop = True
            launched.append(outcomes.launch(update, Tally(1.0, 0.5, {"a": 1.0})))
        return [(outcome.loss, outcome.is_last) for outcome in reversed(launched)]

    assert on_both(alone, updates) == [[(2.0, True), (2.0, True), (2.0, False), (2.0, False)]] * 2


def test_all_ranks_see_a_difference_at_the_next_launch_where_nobody_reads_the_loss(alone: World) -> None:
    def updates(world: World) -> tuple[int, str]:
        outcomes = outcomes_of(world)
        rank = world.place.rank
        outcomes.facts_of = lambda update: {TERMS: (rank if update == 2 else 7, lambda: {"scale": f"{rank}"})}
        for update in range(9):
            try:
                outcomes.require_agreement()
                outcomes.launch(update, Tally(1.0, 1))
            except RanksDiffer as error:
                with pytest.raises(RanksDiffer):
                    outcomes.require_agreement()
                return update, str(error)
        return -1, ""

    (first, words), other = on_both(alone, updates)
    assert (first, words) == other
    assert first == 3
    assert words.startswith("update 3: ranks differ in what they give step (scale is 0 on rank 0 and 1 on rank 1): ")


def test_who_reads_the_loss_sees_it_at_once_and_again(alone: World) -> None:
    def read(world: World) -> None:
        outcomes = outcomes_of(world)
        outcomes.facts_of = lambda _update: {TERMS: (world.place.rank, dict)}
        outcome = outcomes.launch(0, Tally(1.0, 1))
        for _ in range(2):
            with pytest.raises(RanksDiffer):
                _ = outcome.loss
        with pytest.raises(RanksDiffer):
            outcomes.explain()

    on_both(alone, read)


def test_facts_that_are_the_same_change_no_loss(alone: World) -> None:
    def read(world: World) -> tuple[float, dict[str, float], bool]:
        outcomes = outcomes_of(world, names=("a",))
        outcomes.facts_of = lambda update: {TERMS: (update, dict)}
        outcome = outcomes.launch(3, Tally(1.0, 0.5, {"a": 3.0}))
        outcomes.compare({TERMS: (5, dict)}, "after update 4")
        return outcome.loss, outcome.auxiliary, outcome.is_last

    assert on_both(alone, read) == [(2.0, {"a": 6.0}, False)] * 2


# Gradients of several steps as those of one mini-batch, and what is refused before a step.


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def outcome(weight: float = 1.0, clearings: Clearings = NOTHING_CLEARED) -> Any:
    return SimpleNamespace(weight=weight, clearings=clearings)


def step(accumulation: Accumulation, gradients: Mapping[nn.Parameter, float | None], accumulate: bool = True) -> None:
    """A step of the only rank, as a script makes it: each gradient is new, or None."""
    accumulation.begin(accumulate)
    for of, value in gradients.items():
        of.grad = None if value is None else torch.full_like(of, value)
    accumulation.end(outcome(clearings=accumulation.clearings()))


def value_of(of: nn.Parameter) -> float | None:
    return None if of.grad is None else of.grad.item()


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        pytest.param([(1.0,), (2.0,), (3.0,), (6.0,)], [3.0], id="the mean"),
        pytest.param(
            [(6.0, None, None), (None, 3.0, None), (3.0, 3.0, None)],
            [3.0, 2.0, None],
            id="a step without a gradient counts; one parameter is never used",
        ),
        pytest.param([(4.0,), (8.0,), {0}, (2.0,), (4.0,)], [3.0], id="cleared"),
        pytest.param([(4.0, 4.0), {1}, (8.0, 8.0)], [6.0, 8.0], id="one is cleared by itself"),
        # A mean must not depend on whether a rank has seen anything but zeros.
        pytest.param([(0.0,), (4.0,)], [2.0], id="zeros are there"),
        pytest.param([(0.0,), (4.0,), "zero", (4.0,)], [4.0], id="until they are cleared"),
        # The first gradients of a low-rank adapter: those of one factor are zeros.
        pytest.param([(2.0, 0.0), "halve", (2.0, 8.0), "halve"], [0.75, 2.0], id="zeros that the pipeline clips"),
    ],
)
def test_the_gradient_of_several_steps_is_their_mean_since_it_was_cleared(made: list[Any], expected: list[Any]) -> None:
    """Each step has a gradient, or none, for each parameter; a set of parameters is cleared."""
    parameters = [parameter(1.0) for _ in made[0]]
    accumulation = Accumulation({f"{number}": of for number, of in enumerate(parameters)})
    for action in made:
        if isinstance(action, tuple):
            step(accumulation, dict(zip(parameters, action, strict=True)))
        elif isinstance(action, set):
            for number in action:
                parameters[number].grad = None
        else:
            for of in parameters:
                of.grad.mul_({"zero": 0, "halve": 0.5}[action])  # type: ignore[union-attr]
            if action == "halve":
                accumulation.note_scaled()
    assert [*map(value_of, parameters)] == expected


def test_a_rank_whose_first_step_gave_no_gradient_counts_that_step() -> None:
    weight = parameter(1.0)
    accumulation = Accumulation({"w": weight})
    step(accumulation, {}, accumulate=False)
    step(accumulation, {weight: 3.0})
    assert value_of(weight) == 1.5


@pytest.mark.parametrize("gradient", [torch.tensor([x], dtype=torch.float64) for x in (1.0, float("nan"))])
def test_a_gradient_that_was_not_cleared_is_refused_by_its_name(gradient: torch.Tensor) -> None:
    weight = parameter(1.0)
    weight.grad = gradient
    with pytest.raises(Misuse) as refused:
        Accumulation({"stages.0.w": weight}).begin(accumulate=False)
    assert str(refused.value) == (
        "stages.0.w still has the gradient of the step before: call optimizer.zero_grad() after optimizer.step(), of "
        "an optimizer that holds pipe.parameters(), or step(accumulate=True) to add to it"
    )


def test_zeros_are_cleared_gradients() -> None:
    weight = parameter(1.0)
    weight.grad = torch.zeros(1, dtype=torch.float64)
    Accumulation({"w": weight}).begin(accumulate=False)


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_that_is_frozen_or_trained_later_is_refused(trained: bool) -> None:
    weight = parameter(1.0).requires_grad_(trained)
    accumulation = Accumulation({"w": weight})
    accumulation.begin(accumulate=False)
    weight.requires_grad_(not trained)
    with pytest.raises(Misuse, match="requires_grad of w has changed"):
        accumulation.begin(accumulate=True)


def test_a_step_weighs_its_count() -> None:
    """One that counts nothing has gradients of 0, and changes nothing."""
    weight = parameter(1.0)
    accumulation = Accumulation({"w": weight}, mean_in_mesh=lambda numbers, _mesh: [*numbers])
    for gradient, count in ((4.0, 1.0), (0.0, 0.0), (8.0, 3.0)):
        accumulation.begin(accumulate=True)
        weight.grad = torch.full_like(weight, gradient)
        accumulation.end(outcome(weight=count))
    assert value_of(weight) == 7.0


# Several pipelines of the same parameters.


def test_steps_of_all_pipelines_count_by_the_items_of_their_mini_batches() -> None:
    shared, of_first, of_second = parameter(1.0), parameter(1.0), parameter(1.0)
    first = Accumulation({"shared": shared, "first": of_first}, items=4)
    second = Accumulation({"shared": shared, "second": of_second}, items=12)
    step(first, {shared: 8.0, of_first: 1.0})
    step(second, {shared: 4.0, of_second: 1.0})
    step(first, {shared: 0.0, of_first: 3.0})
    assert [*map(value_of, (shared, of_first, of_second))] == [(4 * 8 + 12 * 4) / 20, 2.0, 1.0]
    for of in (shared, of_first, of_second):
        of.grad = None
    step(second, {shared: 5.0})
    assert value_of(shared) == 5.0


def test_means_and_counts_do_not_mix() -> None:
    weight = parameter(1.0)
    mean = Accumulation({"w": weight})
    step(mean, {weight: 1.0})
    with pytest.raises(Misuse, match="w has a gradient of a pipeline whose loss is of another kind"):
        Accumulation({"w": weight}, mean_in_mesh=lambda numbers, _mesh: [*numbers]).begin(True)


# What a step cannot be averaged with.


def stepped(accumulation: Accumulation, *parameters: nn.Parameter) -> None:
    moment = next_moment()
    accumulation.last_steps = lambda: dict.fromkeys(parameters, moment)


def test_a_gradient_that_an_optimizer_has_stepped_is_refused_until_it_is_cleared() -> None:
    weight, other = parameter(1.0), parameter(1.0)
    accumulation = Accumulation({"w": weight, "other": other})
    step(accumulation, {weight: 4.0, other: 2.0})
    stepped(accumulation, weight)
    with pytest.raises(Misuse, match=r"w still has the gradient with which .* call zero_grad\(\) after"):
        accumulation.begin(accumulate=True)
    weight.grad = None
    step(accumulation, {weight: 1.0, other: 4.0})
    assert [*map(value_of, (weight, other))] == [1.0, 3.0]


def test_a_gradient_of_the_users_own_is_refused_before_the_first_step_and_averaged_after() -> None:
    weight = parameter(1.0)
    accumulation = Accumulation({"w": weight})
    weight.grad = torch.ones(1, dtype=torch.float64)
    with pytest.raises(Misuse, match="add gradients of your own after the last step that accumulates"):
        accumulation.begin(accumulate=True)
    weight.grad = torch.zeros(1, dtype=torch.float64)
    step(accumulation, {weight: 4.0})
    weight.grad = torch.full_like(weight, 6.0)
    step(accumulation, {weight: 0.0})
    assert value_of(weight) == 3.0


def test_a_scale_that_changes_within_a_window_is_refused() -> None:
    weight = parameter(1.0)
    accumulation = Accumulation({"w": weight})
    accumulation.begin(True, 8.0)
    weight.grad = torch.ones(1, dtype=torch.float64)
    accumulation.end(outcome())
    accumulation.begin(True, 8.0)
    with pytest.raises(Misuse, match="scaled by 8, and the scale of the GradScaler is 4 now"):
        accumulation.begin(True, 4.0)
    accumulation.note_scaled([weight])
    with pytest.raises(Misuse, match="scaled by 1, and"):
        accumulation.begin(True, 8.0)


# Parameters without a gradient, of which other ranks know whether they were cleared.


class Loop:
    """Ranks in lock step, each with two parameters for each of two optimizers, and what a window should hold.

    ``is_refusable`` says that nothing tells what was cleared: gradients were cleared in part, or zeros were scaled.
    """

    def __init__(self, ranks: int) -> None:
        self.parameters = [[parameter(1.0) for _ in range(4)] for _ in range(ranks)]
        self.ranks = [Accumulation({f"{i}": p for i, p in enumerate(of_rank)}) for of_rank in self.parameters]
        self.windows: dict[nn.Parameter, list[float]] = {p: [] for of_rank in self.parameters for p in of_rank}
        self.is_refusable = False

    def of_optimizer(self, number: int) -> list[nn.Parameter]:
        return [p for of_rank in self.parameters for p in of_rank[2 * number : 2 * number + 2]]

    def clear(self, parameters: Sequence[nn.Parameter], to_none: bool, by_step: bool) -> None:
        """To clear by hand what has no gradient does nothing."""
        if not by_step and all(of.grad is None for of in parameters):
            return
        for of in parameters:
            if of.grad is not None:
                of.grad = None if to_none else of.grad.zero_()
            self.windows[of] = []
        if by_step:
            moment = next_moment()
            for rank, of_rank in zip(self.ranks, self.parameters, strict=True):
                before = rank.last_steps()
                rank.last_steps = lambda new={**before, **{p: moment for p in of_rank if p in {*parameters}}}: new
        self.is_refusable = self.is_refusable or (len(parameters) < len(self.windows) and not by_step)

    def halve(self) -> None:
        for of, values in self.windows.items():
            if of.grad is not None:
                of.grad.mul_(0.5)
                self.is_refusable = self.is_refusable or not of.grad.any()
            self.windows[of] = [value / 2 for value in values]

    def step(self, values: Sequence[Sequence[float | None]]) -> bool:
        """Makes a step on all ranks; returns whether it is not refused."""
        clearings = []
        for rank, of_rank, made in zip(self.ranks, self.parameters, values, strict=True):
            rank.begin(accumulate=True)
            for of, value in zip(of_rank, made, strict=True):
                of.grad = None if value is None else torch.full_like(of, value)
                self.windows[of].append(value or 0.0)
            clearings.append(rank.clearings())
        summed = Clearings(*map(any, zip(*clearings, strict=True)))
        if all(summed):
            return False
        for rank in self.ranks:
            rank.end(outcome(clearings=summed))
        return True


_values = st.lists(st.sampled_from([None, None, 0.0, 1.0, 3.0, -2.0]), min_size=4, max_size=4)
_actions = st.sampled_from(["", "", "all", "all", "zeros", "skip", "first", "first zeros", "first by hand", "halve"])


@given(st.integers(1, 3), st.data())
def test_each_gradient_is_the_mean_of_its_window_on_every_rank(ranks: int, data: Any) -> None:
    """Whatever is cleared, by an optimizer or by hand; refused only where nothing tells what was cleared."""
    loop = Loop(ranks)
    actions: dict[str, Callable[[], None]] = {
        "": lambda: None,
        "all": lambda: [loop.clear(loop.of_optimizer(i), True, by_step=True) for i in range(2)] and None,
        "zeros": lambda: loop.clear([*loop.windows], False, by_step=False),
        "skip": lambda: loop.clear([*loop.windows], True, by_step=False),
        "first": lambda: loop.clear(loop.of_optimizer(0), True, by_step=True),
        "first zeros": lambda: loop.clear(loop.of_optimizer(0), False, by_step=True),
        "first by hand": lambda: loop.clear(loop.of_optimizer(0), True, by_step=False),
        "halve": loop.halve,
    }
    for action in data.draw(st.lists(_actions, min_size=1, max_size=6)):
        values = [data.draw(_values) for _ in range(ranks)]
        values[0][-1] = values[0][-1] or 1.0  # some parameter has a gradient in every step
        if not loop.step(values):
            event("refused")
            assert loop.is_refusable
            return
        for of, window in loop.windows.items():
            assert (0.0 if of.grad is None else of.grad.item()) == pytest.approx(sum(window) / len(window), abs=1e-9)
        actions[action]()


# Without tools a pipeline is what it is.


def test_plain_hooks_make_plain_stages_and_leave_the_components_of_a_lane_as_they_are(alone: World) -> None:
    plain = Hooks()
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world)
        plain.ready(made, built)
        assert plain.stage_maker(world.job) is Stage
        components = components_of(made, {})
        assert plain.wrapped(components, {}) is components
        assert (
            plain.outcomes_class(world.job)(world.control_group, world.job, world.read, counted=False)
            .launch(0, Tally(6.0, 4.0))
            .loss
            == 1.5
        )
    assert (plain.measures, plain.loads) == (False, True)


def test_without_tools_remarks_go_to_a_logger_which_writes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Hooks().remark("50% of stage 0")
    assert capsys.readouterr() == ("", "50% of stage 0\n")
    logging.getLogger("chimera_runtime").setLevel(logging.ERROR)
    Hooks().remark("50% of stage 0")
    logging.getLogger("chimera_runtime").setLevel(logging.NOTSET)
    assert capsys.readouterr() == ("", "")


def test_without_tools_a_rank_that_is_not_answered_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[PeerLost] = []
    monkeypatch.setattr(updates, "end_process", ended.append)
    error = PeerLost("nobody answers", [1])
    Hooks().lost(error)
    assert ended == [error]


# Updates of a schedule with a flush, on stages that note what is asked of them.


class Noting:
    """Notes each call with its arguments, as of whichever object it stands for."""

    def __init__(self, notes: list[Any], name: str, result: Any = None) -> None:
        self._notes = notes
        self._name = name
        self._result = result

    def __getattr__(self, method: str) -> Any:
        def called(*arguments: Any) -> Any:
            self._notes.append((self._name, method, *arguments))
            return self._result

        return called


def made(notes: list[Any], sums_wider: bool = False, numbers: Sequence[int] = (4,)) -> FlushedUpdates:
    """Two stages that share a weight group, whose losses of an update are 1 and 10."""
    tie = SimpleNamespace(gradient_sum=Noting(notes, "tie"))
    stages: dict[int, Any] = {
        number: SimpleNamespace(
            groups=(SimpleNamespace(gradient_sum=Noting(notes, f"stage {number}")), tie),
            weigh_loss=lambda *factors, number=number: notes.append(("weigh", number, *factors)),
            take_loss=lambda update, number=number: Tally(10.0**number, 1.0),
        )
        for number in range(2)
    }
    others: dict[str, Any] = {name: Noting(notes, name) for name in ("lane", "feed", "accumulation")}
    others["feed"].size = 2
    return FlushedUpdates(
        scripts={number: Noting(notes, f"script of {number}").update for number in numbers},
        share_of=lambda micro_batches: 1 / micro_batches,
        rounds=(Round(numbers[-1]),),
        micro_batches=2 * numbers[-1],
        stages=stages,
        outcomes=Noting(notes, "outcomes", result="outcome"),  # type: ignore[arg-type]
        device=torch.device("cpu"),
        sums_wider=sums_wider,
        **others,
    )


def test_an_update_runs_the_script_and_lets_its_mini_batch_go() -> None:
    notes: list[Any] = []
    updates = made(notes)
    for update in range(2):
        assert updates.started == update
        notes.clear()
        assert updates.run_update() == "outcome"
        names = [note[:3] for note in notes]
        assert names[0] == ("lane", "begin", update)
        assert names[1][:2] == ("script of 4", "update")
        assert ("feed", "drop", update) in names
        assert ("outcomes", "launch", update, Tally(11.0, 2.0), None) in notes
        assert names[-1] == ("accumulation", "end", "outcome")


def test_an_update_of_several_rounds_runs_a_script_for_each() -> None:
    notes: list[Any] = []
    updates = made(notes, numbers=(2, 4))
    updates.feed.job = SimpleNamespace(parts=3)  # type: ignore[assignment]
    updates.choose((Round(4, 0, is_last=False), Round(2, 4)), 6)
    updates.prepare(False, None)
    assert ("weigh", 0, 1 / 6, 1.0) in notes
    notes.clear()
    assert updates.run_update() == "outcome"
    assert updates.feed.start == 4
    rounds = [note for note in notes if note[0] == "lane" or note[0].startswith("script")]
    assert [note[:2] for note in rounds if note[0] != "lane"] == [("script of 4", "update"), ("script of 2", "update")]
    assert [note[1:] for note in rounds if note[0] == "lane"] == [
        *[("begin_round", 0, False), ("begin", 0), ("end",)],
        *[("begin_round", 12, True), ("begin", 0), ("end",)],
    ]
    assert [note[0] for note in notes].count("outcomes") == 1


def test_gradients_are_cleared_and_the_loss_is_scaled_on_every_stage() -> None:
    notes: list[Any] = []
    made(notes).prepare(False, None)
    assert notes[0] == ("accumulation", "begin", False, 1.0)
    assert {note for note in notes if note[0] == "weigh"} == {("weigh", 0, 1 / 8, 1.0), ("weigh", 1, 1 / 8, 1.0)}
    assert {note[0] for note in notes if note[-1] == "clear"} == {"stage 0", "stage 1", "tie"}
    notes.clear()
    made(notes).prepare(True, torch.amp.GradScaler("cpu", init_scale=8.0))
    assert notes[0] == ("accumulation", "begin", True, 8.0)
    assert ("weigh", 0, 1 / 8, 8.0) in notes
