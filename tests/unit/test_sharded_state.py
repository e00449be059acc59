"""Optimizer state that replicas share, at compile time: bytes by formula, and what fits because of it."""

from fractions import Fraction
from math import log2

import pytest

import chimera_ir
from chimera_ir.commands.common import WRONG_COMMAND
from chimera_ir.errors import OptionError
from chimera_ir.predict.events import Role
from chimera_ir.predict.memory_need import memory
from chimera_ir.predict.setting import Charges, Measured, Setting
from chimera_ir.profile.cluster import Cluster, Link
from chimera_ir.profile.costs import StageCosts
from tests.instructions import singly
from tests.pages import SMALL
from tests.sizes import on_workers, with_a_flush
from tests.timings import stage_times, stage_timing
from tests.unit.command import Run
from tests.unit.test_plan import cluster, compiled, found

SIZES = (670, 640, 640, 720)
"""Megabytes of the optimizer's state of each stage, in the profile."""
SUMS = Link(1e-3, 1e-9)


def setting(stages: int, copies: int, shards: bool) -> Setting:
    """Stages whose optimizer steps take 1, 2, .. seconds, with 1000, 2000, .. bytes of gradients."""
    timing = stage_timing(1.0, 2.0, 3.0, 1, 1, 1, 1)
    costs = tuple(
        StageCosts(1, 1000 * number, 10**6 + number, {1: timing}, float(number)) for number in range(1, stages + 1)
    )
    link = Link(0.0, 0.0)
    return Setting(costs, Cluster("c", 4096, 1, 1, 0, link, link, SUMS), copies, 1, sharded_optimizer=shards)


@pytest.mark.parametrize("name", with_a_flush())
@pytest.mark.parametrize("copies", [1, 3])
def test_a_worker_keeps_its_share_of_each_stage_that_it_holds(name: str, copies: int) -> None:
    """The ranks that hold a stage are counted in the lanes: those that run any operation of it."""
    program = chimera_ir.compile(name, **on_workers(name, 4, 8)).verified.program
    lanes = chimera_ir.compile(name, **on_workers(name, 4, 8)).schedule.lanes
    held = [{operation.stage for operation in singly(lane)} for lane in lanes]
    where = setting(program.header.stages, copies, True)
    for worker, need in enumerate(memory(program, where)):
        shares = 0
        for stage in held[worker]:
            ranks = copies * sum(stage in stages for stages in held)
            shares += -(-where.stages[stage].optimizer // ranks)
        assert need.optimizer == shares
    whole = memory(program, setting(program.header.stages, copies, False))
    assert [need.optimizer for need in whole] == [sum(10**6 + stage + 1 for stage in stages) for stages in held]


def test_a_step_takes_its_share_and_half_a_sum_to_gather_the_weights() -> None:
    header = chimera_ir.compile("chimera", D=4, N=4).verified.program.header
    shared, whole = (Charges(header, setting(4, 3, shards)) for shards in (True, False))
    for stage in range(4):
        gathering = log2(6) * SUMS.alpha + 5 / 6 * SUMS.beta * 1000 * (stage + 1)
        assert shared.step((stage,)) == pytest.approx((stage + 1) / 6 + gathering)  # type: ignore[arg-type]
        assert whole.step((stage,)) == stage + 1  # type: ignore[arg-type]
        assert gathering == pytest.approx(shared.setting.all_reduce(header, (stage,)) / 2)  # type: ignore[arg-type]


def test_the_report_has_the_bytes_of_every_worker() -> None:
    """Chimera with W = 3 has six ranks of each stage, two of which are on each worker of a copy."""
    states = {}
    for shards in (False, True):
        options = chimera_ir.Options(copies=3, shard_optimizer=shards, **SMALL)
        prediction = chimera_ir.compile("chimera", options=options, D=4, N=4).prediction
        states[shards] = prediction.as_json()["optimizer_state"]
        steps = [event for lane in prediction.replay.lanes for event in lane if event.role is Role.STEP]
        assert bool(steps) == shards, "the profile has no steps, but weights are gathered"
    pairs = [SIZES[0] + SIZES[3], SIZES[1] + SIZES[2]] * 1
    whole = [pairs[0] * 10**6, pairs[1] * 10**6, pairs[1] * 10**6, pairs[0] * 10**6]
    assert states[False] == whole
    assert states[True] == [
        sum(-(-SIZES[stage] * 10**6 // 6) for stage in stages) for stages in ((0, 3), (1, 2), (1, 2), (0, 3))
    ]


def test_the_option_goes_with_a_prediction_and_a_flush(run: Run) -> None:
    files = [word for name, path in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(path))]
    line = run("chimera", *files, "--shard-optimizer").out.splitlines()[-1]
    assert line.endswith("--micro-batch-size 8 --shard-optimizer --check")
    run("chimera", "--shard-optimizer").assert_refused(WRONG_COMMAND, "--shard-optimizer: a prediction needs --profile")
    run("pipedream", *files, "--shard-optimizer").assert_refused(WRONG_COMMAND, "pipedream has no flush")
    with pytest.raises(OptionError, match="shard_optimizer is 1: it is True or False"):
        chimera_ir.Options(shard_optimizer=1)  # type: ignore[arg-type]


MODEL = """
[model]
name = "m"
[[depth]]
stages = 2
""" + "".join(
    f"""
[[depth.stage]]
weights = "10 MB"
optimizer = "20 MB"
[[depth.stage.at]]
micro_batch_size = 1
forward = "1 ms"
activations = "1 MB"
input = "1 B"
{'output = "1 B"' if stage == 0 else ""}
"""
    for stage in range(2)
)


@pytest.mark.parametrize(
    ("scheme", "per_worker", "shares"), [("dapple", 1, 4), ("chimera", 2, 8), ("pipedream_2bw", 1, 1)]
)
def test_a_plan_counts_the_share_of_all_replicas(plan: Run, scheme: str, per_worker: int, shares: int) -> None:
    """Eight workers are four copies of two: of a stage Chimera has twice as many replicas as copies; a stream shares
    nothing. To the byte: a byte less of memory, and nothing fits."""

    def asked(memory: int, *more: str) -> list[dict[str, object]]:
        size = f"{memory} B"
        arguments = ("--mini-batch", 8, "--scheme", scheme, "--set", "D=2", "--no-recompute", "--json", *more)
        ended = plan(MODEL, cluster(8, size), *arguments)
        return found(ended)["choices"] if ended.status == 0 else []  # type: ignore[no-any-return]

    def least(*more: str) -> int:
        (choice,) = asked(10**9, *more)
        memory = choice["memory"]
        assert asked(max(memory), *more) == [choice]
        assert asked(max(memory) - 1, *more) == []
        return max(memory)

    difference = per_worker * (20 * 10**6 - 20 * 10**6 // shares)
    assert least() - least("--shard-optimizer") == difference


def test_the_lines_of_a_plan_have_the_option_where_there_is_a_flush(plan: Run, run: Run) -> None:
    for scheme, has in (("dapple", True), ("pipedream_2bw", False)):
        result = found(plan(MODEL, cluster(2), "--mini-batch", 8, "--scheme", scheme, "--shard-optimizer", "--json"))
        assert [line.endswith(" --shard-optimizer") for line in result["commands"]] == [has, has]
        assert compiled(run, result["commands"][0])["prediction"]["memory"] == result["choices"][0]["memory"]


def test_of_layers_a_split_counts_the_share_of_the_stage_that_it_makes(plan: Run) -> None:
    """Four layers of 20 MB state on two workers, one of which takes longer: alone it fits whatever is sharded."""
    layers = "".join(
        f"""
[[layer]]
weights = "1 MB"
optimizer = "20 MB"
[[layer.at]]
micro_batch_size = 1
forward = "{seconds} ms"
activations = "1 B"
input = "1 B"
{'output = "1 B"' if number < 3 else ""}
"""
        for number, seconds in enumerate((3, 1, 1, 1))
    )
    model = f'[model]\nname = "m"\n{layers}'
    options = ("--mini-batch", 16, "--scheme", "dapple", "--set", "D=2", "--no-recompute", "--json")
    splits = {
        more: found(plan(model, cluster(4, "50 MB"), *options, *more))["choices"][0]["split"]
        for more in ((), ("--shard-optimizer",))
    }
    assert splits == {(): [0, 2], ("--shard-optimizer",): [0, 1]}


def test_half_a_micro_batch_pays_all_of_what_an_operation_costs() -> None:
    """Of a backward of 2 s that has 0.5 s of every operation, half takes 0.75 + 0.5; a forward of both halves all."""
    schedule = chimera_ir.compile("chimera_halving", D=2, N=2).schedule
    header, operations = schedule.header, [operation for lane in schedule.lanes for operation in lane]
    timing = stage_timing(1.0, 2.0, 3.0, 1, 1, 1, 1)
    costs = StageCosts(1, 1, 1, {1: timing}, overhead=stage_times(0.25, 0.5, 0.75))
    where = Setting((costs,) * 2, setting(2, 1, False).cluster, 1, 1)
    charged = {(o.kind.letter, len(o.micros), Charges(header, where).compute(o)) for o in operations}
    assert charged == {("F", 2, 1.0), ("B", 1, 1.25)}
    exact = {Measured.of(where).duration(operation, header) for operation in operations}
    assert exact == {Fraction(1), Fraction(5, 4)}
    assert all(duration % Measured.of(where).tick(header) == 0 for duration in exact)
