"""Work and bytes against closed formulas, fits against lines that are known, noise against samples that are."""

import random
import re
from collections.abc import Callable
from math import log
from pathlib import Path
from statistics import NormalDist

import pytest

from chimera_ir.measure import links, stations
from chimera_ir.measure.links import (
    Described,
    Host,
    LinkTimes,
    PairTimes,
    Point,
    chosen_fan_outs,
    chosen_pairs,
    described,
)
from chimera_ir.measure.stages import BadFile, Samples, StageRequest, counted, in_rounds, of_file, timed, too_noisy
from chimera_ir.profile.cluster import Link
from chimera_ir.profile.costs import StageCosts

WIDTH, LAYERS, FLOAT = 24, 3, 4

LINEAR = f"""
import torch
from torch import nn

def build_stage(stage, num_stages):
    return nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})))

def loss(output, target):
    return nn.functional.mse_loss(output, target)

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.full(({WIDTH},), float(i)), torch.zeros({WIDTH})

def dataset():
    return Numbers()

def optimizer(parameters):
    return torch.optim.Adam(parameters)
"""

SIZES = [4**power for power in range(3, 13)]


def quiet(_doing: str, _done: int, _steps: int) -> None:
    """Nobody listens."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "linear.py").write_text(LINEAR)
    return tmp_path / "linear.py"


def assert_linear(stage: StageCosts, last: bool, first: bool = False) -> None:
    """A linear layer keeps its input; the loss keeps result and target; the flat buffer has a number per parameter.

    What a stage receives does not move to the host.

    For the second half of a backward each layer keeps the gradient of its result, and the first stage what it received.
    The first half lets go of what the loss kept.
    """
    weights = LAYERS * WIDTH * WIDTH * FLOAT
    assert (stage.weights, stage.gradients) == (weights, weights + LAYERS * FLOAT)
    assert stage.optimizer == 2 * weights + LAYERS * FLOAT
    for size, at in stage.at.items():
        message = size * WIDTH * FLOAT
        assert at.kept.activations == (LAYERS + (2 if last else 0)) * message
        assert at.kept.input == (2 if last else 1) * message
        assert at.kept.moved.activations == (LAYERS - 1 + (2 if last else 0)) * message
        assert (at.output, at.gradient) == ((0, 0) if last else (message, message))
        if not (first and last):
            assert at.kept.released == (2 * message if last else 0)
            assert at.kept.operands == (message if first else LAYERS * message)


def test_a_stack_of_linear_layers_has_the_work_and_the_bytes_of_the_formulas(model: Path) -> None:
    found = counted(model, StageRequest((2, 3), (4, 8), 5, 0), quiet).counts
    assert sorted(found.depths) == [2, 3]
    for depth, profile in found.depths.items():
        for number, stage in enumerate(profile):
            assert_linear(stage, number == depth - 1, number == 0)
            for size, at in stage.at.items():
                product = 2 * size * WIDTH * WIDTH
                backward = 2 * LAYERS - (1 if number == 0 else 0)
                assert at.times["F"] == LAYERS * product
                assert at.times["B"] == backward * product
                assert at.times["recomputing"] == (LAYERS + backward) * product
                assert (at.times["I"], at.times["W"]) == (
                    (0 if number == 0 else LAYERS) * product,
                    (backward - LAYERS * (number > 0)) * product,
                )
                assert at.noise is None
            assert (stage.step, stage.step_noise) == (0, None)


def test_what_is_timed_has_the_same_bytes_and_a_time_and_a_spread_for_everything(model: Path) -> None:
    told: list[tuple[int, int]] = []
    request = StageRequest((2,), (4, 8), 5, 0)
    found = timed(of_file(model), request, "cpu", 1, lambda _, done, steps: told.append((done, steps)))
    assert told == [(n, 8) for n in range(1, 9)]
    for number, stage in enumerate(found.profile.depths[2]):
        assert_linear(stage, number == 1, number == 0)
        assert stage.step > 0
        assert 0 <= stage.step_noise <= 1
        for at in stage.at.values():
            assert min(at.times["F"], at.times["B"], at.times["recomputing"], at.times["I"], at.times["W"]) > 0
            assert 0 <= at.noise <= 1


STEPPING = """
import time

class Slow(torch.optim.SGD):
    def step(self):
        assert all(each.grad is not None for group in self.param_groups for each in group["params"])
        time.sleep(0.02)
        super().step()

def optimizer(parameters):
    return Slow(parameters, lr=1e30)
"""


def test_a_step_is_the_optimizer_s_of_the_model_file_and_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    """It sleeps for 20 ms, and makes weights of which no loss would be a number; the first stage has none to step."""
    text = LINEAR.replace("return nn.Sequential", "return nn.Identity() if stage == 0 else nn.Sequential")
    text = text.replace("    return nn.functional", "    assert output.isfinite().all()\n    return nn.functional")
    (tmp_path / "slow.py").write_text(text.partition("def optimizer")[0] + STEPPING)
    found = timed(of_file(tmp_path / "slow.py"), StageRequest((3,), (4,), 5, 0), "cpu", 1, quiet)
    none, *others = found.profile.depths[3]
    assert none.weights == 0
    assert none.step > 0
    assert min(each.step for each in others) >= 0.02


def test_an_optimizer_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text(LINEAR.replace("return torch.optim.Adam(parameters)", "pass"))
    with pytest.raises(BadFile, match=r"optimizer returned None, not a torch\.optim\.Optimizer"):
        timed(of_file(tmp_path / "none.py"), StageRequest((1,), (4,), 5, 0), "cpu", 1, quiet)


ATTENTION = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        q, k, v = (each(x).view(len(x), 16, 4, 8).transpose(1, 2) for each in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(x), 16, 32)
"""


def test_attention_counts_its_two_products_and_keeps_the_matrix_of_scores(tmp_path: Path) -> None:
    """Three projections; 16 x 16 scores in each of 4 heads of 8, and two products to make and to use them."""
    text = LINEAR.replace("def build_stage", f"{ATTENTION}\ndef build_stage", 1)
    text = text.replace(
        f"nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})))", "Attention()"
    )
    text = text.replace(f"({WIDTH},)", "(16, 32)").replace(f"torch.zeros({WIDTH})", "torch.zeros(16, 32)")
    (tmp_path / "attention.py").write_text(text)
    stage, *_ = counted(tmp_path / "attention.py", StageRequest((2,), (2,), 5, 0), quiet).counts.depths[2]
    projections, products = 3 * 2 * (2 * 16) * 32 * 32, 2 * 2 * (2 * 4) * 16 * 16 * 8
    assert stage.at[2].times["F"] == projections + products
    assert stage.at[2].times["B"] == projections + 2 * products
    item, scores = 16 * 32 * FLOAT, 4 * 16 * 16 * FLOAT
    assert stage.at[2].kept.activations == 2 * (4 * item + scores)


LOOKING_BACK = ATTENTION.replace("forward(self, x)", "forward(self, x, carry=None)").replace("16", "-1")
JOINED = "k, v = (k, v) if carry is None else (torch.cat(both, dim=2) for both in zip(carry, (k, v)))"
LOOKING_BACK = LOOKING_BACK.replace("        return", f"        {JOINED}\n        return")
LOOKING_BACK = LOOKING_BACK.replace("len(x), -1, 32)", "len(x), -1, 32), (k, v)")


@pytest.mark.full
def test_slices_of_attention_cost_more_from_one_to_the_next_and_leave_their_keys_and_values(tmp_path: Path) -> None:
    """A quarter of the projections, and as many products as positions so far; the last slice leaves no carry."""
    text = LINEAR.replace("def build_stage", f"{LOOKING_BACK}\ndef build_stage", 1)
    text = text.replace(
        f"nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})))", "Attention()"
    )
    text = text.replace(f"({WIDTH},)", "(16, 32)").replace(f"torch.zeros({WIDTH})", "torch.zeros(16, 32)")
    (tmp_path / "attention.py").write_text(text)
    request = StageRequest((2,), (2,), 5, 0, slices=4)
    stage, last = counted(tmp_path / "attention.py", request, quiet).counts.depths[2]
    item = 16 * 32 * FLOAT
    for place, costs in enumerate(stage.at[2].slices):
        projections, products = 3 * 2 * (2 * 4) * 32 * 32, 2 * 2 * (2 * 4) * 4 * 4 * (place + 1) * 8
        assert costs.times["F"] == projections + products
        assert costs.times["B"] == projections + 2 * products
        assert costs.times["I"] + costs.times["W"] == costs.times["B"]
        carried = 2 * 2 * (place + 1) * item // 4 if place < 3 else 0
        assert (costs.kept.carry, costs.kept.carry_gradients) == (carried, carried)
        assert (costs.output, costs.gradient) == (item // 2, item // 2)
    assert len(last.at[2].slices) == 4
    measured = timed(of_file(tmp_path / "attention.py"), request, "cpu", 1, quiet).profile.depths[2]
    for part, exact in zip(measured[0].at[2].slices, stage.at[2].slices, strict=True):
        assert min(part.times.values()) > 0
        assert part.output == exact.output
        assert (part.kept.carry, part.kept.carry_gradients) == (exact.kept.carry, exact.kept.carry_gradients)


def test_a_model_that_asks_for_values_where_there_are_none_is_told_so_by_its_line(tmp_path: Path) -> None:
    text = LINEAR.replace(
        "return nn.functional.mse_loss(output, target)", "return output.mean() if output.sum() > 0 else 0"
    )
    (tmp_path / "curious.py").write_text(text)
    with pytest.raises(BadFile, match=r"curious\.py:9 in loss: .*meta tensors"):
        counted(tmp_path / "curious.py", StageRequest((1,), (1,), 5, 0), quiet)


def test_a_micro_batch_larger_than_the_dataset_is_refused(model: Path) -> None:
    with pytest.raises(BadFile, match="the dataset has 64 items"):
        counted(model, StageRequest((1,), (65,), 5, 0), quiet)


@pytest.mark.parametrize(("alpha", "bandwidth"), [(2e-6, 9.7e9), (5e-5, 1e9), (1e-3, 1e7)])
def test_a_line_without_noise_is_found(alpha: float, bandwidth: float) -> None:
    messages = links.messages([Point(size, 2, alpha + size / bandwidth) for size in SIZES])
    assert (messages.alpha, 1 / messages.beta) == pytest.approx((alpha, bandwidth), rel=1e-6)
    link = Link(alpha, 1 / bandwidth)
    sums = links.sums([Point(size, ranks, link.all_reduce(size, ranks)) for size in SIZES for ranks in (2, 4, 7)])
    assert (sums.alpha, 1 / sums.beta) == pytest.approx((alpha, bandwidth), rel=1e-6)


def noisy_points(seed: int) -> list[Point]:
    """10 % of noise on 20 us and 1 GB/s."""
    draw = random.Random(seed)
    return [Point(size, 2, (2e-5 + size / 1e9) * draw.lognormvariate(0, 0.1)) for size in SIZES]


@pytest.mark.parametrize("seed", range(20))
def test_a_line_with_noise_is_found_about_as_well_as_the_noise_allows(seed: int) -> None:
    link = links.messages(noisy_points(seed))
    assert link.alpha == pytest.approx(2e-5, rel=0.15)
    assert 1 / link.beta == pytest.approx(1e9, rel=0.25)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_line_has_a_smaller_sum_of_huber_s_function(seed: int) -> None:
    points = noisy_points(seed)

    def huber(off: float) -> float:
        return off**2 / 2 if abs(off) < 0.1 else 0.1 * (abs(off) - 0.05)

    def loss(alpha: float, beta: float) -> float:
        return sum(huber(log((alpha + beta * p.size) / p.seconds)) for p in points)

    link = links.messages(points)
    factors = [1 + step / 50 for step in range(-25, 51) if step]
    best = loss(link.alpha, link.beta)
    assert all(loss(link.alpha * a, link.beta * b) > best for a in factors for b in factors)


@pytest.mark.parametrize("factor", [0.1, 3, 40])
@pytest.mark.parametrize("wrong", SIZES[:-2])
def test_one_size_that_behaves_otherwise_hardly_bends_the_line(wrong: int, factor: float) -> None:
    points = [Point(size, 2, (2e-5 + size / 1e9) * (factor if size == wrong else 1)) for size in SIZES]
    link = links.messages(points)
    assert (link.alpha, 1 / link.beta) == pytest.approx((2e-5, 1e9), rel=0.1)


def test_what_is_uncertain_counts_for_less() -> None:
    """Half of the sizes say twice the time, and are known half as well as the others or better than those."""
    line = {size: 2e-5 + size / 1e9 for size in SIZES}

    def fitted(even: float, odd: float) -> Link:
        points = [Point(size, 2, line[size] * (1 + i % 2), odd if i % 2 else even) for i, size in enumerate(SIZES)]
        return links.messages(points)

    assert fitted(even=0.0, odd=1.0).message(2**24) == pytest.approx(line[2**24], rel=0.1)
    assert fitted(even=1.0, odd=0.0).message(2**24) == pytest.approx(2 * line[2**24], rel=0.1)


def spread_samples(rounds: int, share: float) -> Samples:
    """Evenly spaced quantiles of a normal distribution whose quartiles are ``share`` of the mean apart."""
    normal = NormalDist(1.0, share / 1.349)
    return Samples(tuple(normal.inv_cdf((i + 0.5) / rounds) for i in range(rounds)))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_median_and_spread_are_those_of_the_distribution(share: float) -> None:
    samples = spread_samples(101, share)
    assert samples.median == pytest.approx(1)
    assert samples.spread == pytest.approx(share, rel=0.05)
    assert samples.scatter == pytest.approx(share, rel=0.05)


def test_a_neighbour_now_and_then_makes_the_spread_larger_and_leaves_the_scatter() -> None:
    """Of 101 rounds 30 take twice as long: the upper quartile is among them, the median 20 places further up.

    That is at 50 / 71 of the others, the quartile at 25 / 71: 0.533 and -0.380 deviations, 0.10 / 1.349 each.
    """
    values = spread_samples(71, 0.10).values + tuple(2 * value for value in spread_samples(30, 0.10).values)
    samples = Samples(values)
    assert samples.spread > 0.8
    assert samples.scatter == pytest.approx(2 * (0.533 + 0.380) * 0.10 / 1.349 / samples.median, rel=0.05)


@pytest.mark.parametrize(("rounds", "share", "noisy"), [(25, 0.1, False), (25, 0.2, True), (400, 0.2, False)])
def test_more_rounds_make_a_spread_bearable(rounds: int, share: float, noisy: bool) -> None:
    """1.57 * 0.2 / sqrt(25) = 6.3 %, more than 5 %; with 0.1 it is half of that, after 400 rounds a quarter."""
    samples = spread_samples(rounds, share)
    assert samples.is_noisy == noisy
    assert bool(too_noisy("here", [("backward", samples)])) == noisy


def test_what_is_too_noisy_is_named_with_its_uncertainty() -> None:
    good, bad = spread_samples(16, 0.02), spread_samples(16, 0.4)
    (said,) = too_noisy("stage 2", [("forward", good), ("backward", bad)])
    assert said.startswith("stage 2: too noisy to use: after 16 rounds")
    assert said.endswith(f": backward {100 * bad.uncertainty:.2g} %")


def times(values: list[float]) -> Callable[[], tuple[float, ...]]:
    left = iter(values)
    return lambda: (next(left),)


def test_rounds_end_when_the_median_is_known_or_the_limit_is_reached_and_the_first_do_not_count() -> None:
    (steady,) = in_rounds(times([9.0, 9.0, 9.0] + [1.0] * 50), warm_up=3, most=30)
    assert steady.values == (1.0,) * 5
    (restless,) = in_rounds(times([1.0, 2.0] * 20), warm_up=2, most=12)
    assert len(restless.values) == 12


def test_the_memory_is_the_machine_s_or_what_a_control_group_above_allows(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemFree:  1 kB\nMemTotal:       8000 kB\n")
    assert stations.memory(tmp_path) == 8000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/mine\n")
    folder = tmp_path / "sys/fs/cgroup/jobs/mine"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("max\n")
    (folder.parent / "memory.max").write_text("4096000\n")
    assert stations.memory(tmp_path) == 4096000
    (tmp_path / "proc/self/cgroup").write_text("7:cpu:/other\n4:cpuset,memory:/old\n")
    old = tmp_path / "sys/fs/cgroup/memory/old"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("2048000\n")
    assert stations.memory(tmp_path) == 2048000


MASKED = f"""
class Masked(nn.Module):
    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last
        self.layer, self.norm = nn.Linear({WIDTH}, {WIDTH}), nn.BatchNorm1d({WIDTH})

    def forward(self, received):
        x, mask = (received, torch.ones(len(received), dtype=torch.int64)) if self.first else received
        x = self.norm(self.layer(x) * mask[:, None])
        return x if self.last else (x, mask)
"""


def test_what_has_no_gradient_does_not_come_back_and_updated_buffers_are_kept_to_run_again(tmp_path: Path) -> None:
    text = LINEAR.replace("def build_stage", f"{MASKED}\ndef build_stage", 1)
    made = f"nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})))"
    text = text.replace(made, "Masked(stage == 0, stage == num_stages - 1)")
    (tmp_path / "masked.py").write_text(text)
    found = timed(of_file(tmp_path / "masked.py"), StageRequest((3,), (4,), 5, 0), "cpu", 1, quiet)
    values, mask, statistics = 4 * WIDTH * FLOAT, 4 * 8, 2 * WIDTH * FLOAT + 8
    first, middle, last = (stage.at[4] for stage in found.profile.depths[3])
    assert (middle.output, middle.gradient) == (first.output, first.gradient) == (values + mask, values)
    assert (last.output, last.gradient) == (0, 0)
    inputs = [values, values + mask, values + mask + values]
    assert [at.kept.input for at in (first, middle, last)] == [each + statistics for each in inputs]


def test_counting_again_counts_the_same(model: Path) -> None:
    request = StageRequest((2,), (4,), 5, 0)
    assert counted(model, request, quiet) == counted(model, request, quiet)


def test_a_stage_that_changes_its_input_in_place_is_refused_since_it_could_not_run_again(tmp_path: Path) -> None:
    text = LINEAR.replace("nn.Sequential(", "nn.Sequential(nn.ReLU(inplace=True), ")
    (tmp_path / "hasty.py").write_text(text)
    with pytest.raises(BadFile, match="stage 0 changes its input in place"):
        counted(tmp_path / "hasty.py", StageRequest((1,), (1,), 5, 0), quiet)


@pytest.mark.parametrize("place", ["layer", "forward", "backward", "optimizer"])
def test_a_stage_that_lacks_memory_is_named_with_what_it_needs_and_what_there_is(tmp_path: Path, place: str) -> None:
    """Wherever it runs out: the model is too large for this machine, and nothing of ours is wrong."""
    hungry = "torch.empty(10**14)"
    texts = {
        "layer": LINEAR.replace("return nn.Sequential(", f"x = {hungry} if stage else 0; return nn.Sequential("),
        "forward": LINEAR.replace("mse_loss(output, target)", f"mse_loss(output, target) + {hungry}.sum()"),
        "backward": LINEAR.replace(
            "return nn.functional.mse_loss(output, target)",
            f"output.register_hook(lambda grad: {hungry}) if output.requires_grad else None\n"
            "    return nn.functional.mse_loss(output, target)",
        ),
        "optimizer": LINEAR.replace(
            "torch.optim.Adam(parameters)",
            "Hungry(parameters)\n\nclass Hungry(torch.optim.Adam):\n    def step(self, closure=None):\n"
            f"        {hungry}",
        ),
    }
    (tmp_path / "hungry.py").write_text(texts[place])
    request = StageRequest((2,), (4,), 2, 0)
    with pytest.raises(BadFile) as raised:
        timed(of_file(tmp_path / "hungry.py"), request, "cpu", 1, quiet)
    words = (
        r"stage 1 of 2 does not fit into memory with a micro-batch of 4: 364 TiB more are needed; memory: this process "
    )
    assert re.match(
        words + r"has used at most .*, of .* in the machine.*\. Take smaller micro-batches or more stages",
        f"{raised.value}",
    )


# Which links are measured, and what cluster their times describe.


HOST = Link(1e-5, 5e-11)


def test_pairs_are_neighbours_within_nodes_and_first_ranks_between_them() -> None:
    assert chosen_pairs(["a", "b"]) == [(0, 1)]
    assert chosen_pairs(["a"] * 8) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert chosen_pairs(["a", "a", "b", "b"]) == [(0, 1), (2, 3), (0, 2)]


def test_a_fork_is_a_rank_between_two_others_of_the_same_kind() -> None:
    def fan_outs(places: str) -> dict[bool, tuple[int, tuple[int, int]]]:
        return chosen_fan_outs(chosen_pairs([*places]), [*places])

    assert fan_outs("ab") == fan_outs("aa") == fan_outs("aabb") == {}
    assert fan_outs("aaaa") == {True: (1, (0, 2))}
    assert fan_outs("abcd") == {False: (1, (0, 2))}
    assert fan_outs("aaabbcc") == {True: (1, (0, 2)), False: (3, (0, 5))}


def network(
    places: str, slow: float = 1.0, at_once: dict[bool, float] | None = None, crowded: float = 1.0
) -> Described:
    """Exact times on a network of two levels: 20 us and 1 GB/s between nodes, 2 us and 10 GB/s within them.

    Posting takes 4 us, 1 us, and of a sum 5 us. Messages to two ranks at once take ``at_once`` as long, by (within).
    Transfers to the host take 10 us and 20 GB/s, and ``crowded`` as long if all ranks make them.
    """
    links = {False: Link(2e-5, 1e-9, 4e-6), True: Link(2e-6, 1e-10, 1e-6)}
    sums = Link(3e-5, 2e-9, 5e-6)
    kinds = {False} if len(set(places)) == len(places) else {True} if len(set(places)) == 1 else {False, True}

    def exactly(seconds: float) -> Samples:
        return Samples((seconds,) * 5)

    def messages(kind: bool) -> PairTimes:
        times = {size: exactly(links[kind].message(size)) for size in SIZES}
        if kind is min(kinds):
            times[SIZES[-1]] = exactly(slow * links[kind].message(SIZES[-1]))
        fan_out = exactly(at_once[kind] * times[SIZES[-1]].median) if at_once else None
        return PairTimes(times, times, dict.fromkeys(SIZES, exactly(links[kind].overhead)), fan_out)

    taken = {r: {size: exactly(sums.overhead + sums.all_reduce(size, r)) for size in SIZES} for r in (2, len(places))}
    nodes = tuple(Host(place, 0, 6 << 20, shared=True) for place in places)
    moves = {size: exactly(HOST.message(size)) for size in SIZES}
    together = exactly(crowded * HOST.message(SIZES[-1]))
    pairs = {kind: messages(kind) for kind in kinds}
    return described("here", LinkTimes(nodes, pairs, taken, exactly(sums.overhead), moves, together))


def test_links_are_shared_where_two_messages_at_once_take_longer() -> None:
    found = network("aaabbb", at_once={False: 1.96, True: 1.02})
    assert (found.cluster.between.shared, found.cluster.within.shared, found.cluster.sums.shared) == (
        True,
        False,
        False,
    )
    assert "Messages between nodes to two ranks at once take 1.96 times as long as to one." in found.table
    cluster = network("aabb").cluster
    assert not cluster.between.shared
    assert "not measured" in network("aabb").table[-2]


@pytest.mark.parametrize(("crowded", "workers"), [(1.02, 1), (1.9, 2), (4.1, 4)])
def test_as_many_workers_have_one_link_to_the_host_as_slow_each_other_down(crowded: float, workers: int) -> None:
    host = network("aaaa", crowded=crowded).cluster.host
    assert (host.link.alpha, host.link.beta) == pytest.approx((HOST.alpha, HOST.beta), rel=1e-3)
    assert host.workers == workers


def test_a_network_of_two_levels_is_described_as_it_is() -> None:
    found = network("aabb")
    cluster = found.cluster
    assert (cluster.workers, cluster.per_node, cluster.memory) == (4, 2, 3 << 20)
    assert (cluster.between.alpha, cluster.within.alpha) == pytest.approx((2e-5, 2e-6), rel=1e-3)
    assert (cluster.between.beta, cluster.within.beta) == pytest.approx((1e-9, 1e-10), rel=1e-3)
    assert (cluster.sums.alpha, cluster.sums.beta) == pytest.approx((3e-5, 2e-9), rel=1e-3)
    assert (cluster.between.overhead, cluster.within.overhead, cluster.sums.overhead) == (4e-6, 1e-6, 5e-6)
    assert found.remarks == ()
    assert len(found.table) == 5 * (1 + len(SIZES)) + 3


@pytest.mark.parametrize(("places", "alpha"), [("aaaa", 2e-6), ("abcd", 2e-5)])
def test_where_there_is_one_kind_of_link_it_stands_for_both_and_the_table_says_so(places: str, alpha: float) -> None:
    found = network(places)
    assert found.cluster.between == found.cluster.within
    assert found.cluster.between.alpha == pytest.approx(alpha, rel=1e-3)
    assert "is what was measured" in found.table[0]


def test_nodes_of_different_sizes_and_sizes_off_the_line_are_remarked_on() -> None:
    (uneven,) = network("aab").remarks
    assert uneven == "nodes have 1 to 2 ranks; the file says 2 for all of them"
    (off,) = network("aabb", slow=2).remarks
    assert off.startswith("messages between nodes: the straight line is off by more than 20 %: ")
    assert "at 16 MiB" in off
