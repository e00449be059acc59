"""Equation 1 of the Chimera paper (section 3.4), computed by hand for small schedules.

F_t = 1 and B_t = 2 seconds unless a test says otherwise; a GB takes a second (beta), so that a message of L GB costs
alpha + L and an all-reduce of L GB over r ranks 2 log2(r) alpha + 2 (r-1) L / r. The drawings have two characters a
second: digits are forwards, then backwards (marked =), by micro-batch; dots are idle.
"""

from fractions import Fraction
from random import Random

import pytest

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.simulate import simulate
from chimera_ir.ir.levels import Program
from chimera_ir.predict.equation import Equation, Term, equation
from chimera_ir.predict.memory_need import memory
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster, Link
from chimera_ir.profile.costs import StageCosts, Timing
from chimera_ir.request import Request
from chimera_ir.source import Source
from chimera_ir.verify.verify import schedule_of
from tests.timings import stage_timing

GB = 10**9
BETA = 1 / GB

Figures = dict[int, float]


def program(source: Source, **settings: int) -> Program:
    return Compilation(Request(source, settings), warn=lambda warning: pytest.fail(warning.code)).verified.program


def scheme(name: str, **settings: int) -> Program:
    return program(library.source(name), **settings)


def timing(forward: float = 1.0, backward: float = 2.0, message: float = 0.0) -> Timing:
    return stage_timing(forward, backward, 3 * forward, 0, 0, round(message * GB), round(message * GB))


def solve(
    compiled: Program,
    gradients: list[float],
    copies: int,
    alpha: float = 0.0,
    p2p: Link = FREE,
    each: Timing | None = None,
) -> Equation:
    """Equation 1 with stages whose gradients are so many GB."""
    stages = tuple(StageCosts(0, round(size * GB), 0, {1: each or timing()}) for size in gradients)
    cluster = Cluster("by hand", 10**6, 1, 10**12, 0, p2p, p2p, Link(alpha, BETA))
    return equation(compiled, Setting(stages, cluster, copies, 1))


def regions(found: Equation, worker: int) -> Figures:
    return {each.group[0]: each.seconds for each in found.regions[worker]}


def test_the_papers_example_of_six_workers_has_6_forwards_and_10_backwards_on_its_critical_path() -> None:
    """Figure 6: N = D = 6, C_f = 6, C_b = 10, so 6 + 20 = 26 seconds; and the free regions of its first three workers.

    P0 0-1-2-......3-3===4-4===5-5===....0===....1===....2===   stage 5 done at 14; 2 + 2 + 2 idle; nothing after 26
    P1 ..0-1-..3-2-4-..3===5-4===..0===5===1===....2===....     stage 4 done at 20? it is: B5 ends at 18 + 2 idle; c = 2
    P2 ....0-3-1-4-2-5-....3===0===4===1===5===2===........     stage 3 done at 20, then work; c = 4
    """
    found = solve(scheme("chimera", D=6, N=6), [1.0] * 6, copies=1)
    assert (found.forwards, found.backwards, found.compute) == (6, 10, 26)
    assert regions(found, 0) == {5: 6, 0: 0}
    assert regions(found, 1) == {4: 4, 1: 2}
    assert regions(found, 2) == {3: 4, 2: 4}
    # r = 2: 1 s per sum. P0: the first fits in 6, the second has 0: 1 left. P1, P2: 2 s fit.
    assert found.all_reduce == (1.0,) * 6
    assert found.unoverlapped == pytest.approx((1, 0, 0, 0, 0, 1))
    assert found.seconds == pytest.approx(27)


def test_chimera_on_four_workers_twice() -> None:
    """D = N = 4, W = 2, so r = 4 and an all-reduce of L takes 1.5 L.

    P0 0-1-..2-2===3-3===..0===....1===    stage 3 done at 9, idle 9-10 and 12-14: 3; stage 0 done at 16, nothing left
    P1 ..0-2-1-3-..2===0===3===1===....    stages 2 and 1 launched at 14, 2 left
    """
    found = solve(scheme("chimera", D=4, N=4), [1.0, 2.0, 1.0, 3.0], copies=2)
    assert found.all_reduce == pytest.approx((1.5, 3.0, 1.5, 4.5))
    assert regions(found, 0) == regions(found, 3) == {3: 3, 0: 0}
    assert regions(found, 1) == regions(found, 2) == {2: 2, 1: 2}
    # P0: 4.5 - 3 = 1.5 are left, and 1.5 more. P1: 1.5 + 3 - 2 = 2.5.
    assert found.unoverlapped == pytest.approx((3.0, 2.5, 2.5, 3.0))
    assert found.seconds == pytest.approx(16 + 3.0)


def test_messages_lengthen_every_operation_of_the_critical_path() -> None:
    """Comm_p2p = 0.25 + 0.25: 4 (1 + 0.5) + 6 (2 + 0.5) = 21. No other path can be longer: none has more than 10
    operations (3D-2, section 3.1), and with free messages none takes more than 16."""
    found = solve(scheme("chimera", D=4, N=4), [0.0] * 4, copies=2, p2p=Link(0.25, BETA), each=timing(message=0.25))
    assert found.p2p == pytest.approx(0.5)
    assert (found.forwards, found.backwards) == (4, 6)
    assert found.seconds == pytest.approx(21)


@pytest.mark.parametrize("name", ["dapple", "gpipe"])
def test_one_direction_twice(name: str) -> None:
    """D = N = 2, W = 2, so r = 2 and an all-reduce of L takes 2 alpha + L = 0.5 + L.

    P0 0-1-....0===1===  (gpipe: 0-1-......0===1===, the same end)   done at 9, nothing left
    P1 ..0-0===1-1===..                                              done at 7, 2 left
    """
    found = solve(scheme(name, D=2, N=2), [0.5, 3.0], copies=2, alpha=0.25)
    assert (found.forwards, found.backwards, found.compute) == (3, 3, 9)
    assert [regions(found, 0), regions(found, 1)] == [{0: 0}, {1: 2}]
    assert found.unoverlapped == pytest.approx((1.0, 3.5 - 2))
    assert found.seconds == pytest.approx(10.5)


def test_gems_where_a_sum_begins_when_its_last_member_has_launched_it() -> None:
    """D = N = 2, one copy: each stage is on both workers, r = 2.

    P0 0-......0===1-1===....    stage 0 done at 6, stage 1 at 9; it idles from 9 to 11
    P1 ..0-0===1-........1===    stage 1 done at 4, stage 0 at 11; it idles from 5 to 9

    So stage 1 begins at 9 on both: on P0 with 2 s free, on P1 with none, although P1 idled 4 s after its launch.
    Stage 0 begins at 11.
    """
    found = solve(scheme("gems", D=2, N=2), [1.0, 2.0], copies=1)
    assert found.compute == 11
    assert regions(found, 0) == {1: 2, 0: 0}
    assert regions(found, 1) == {1: 0, 0: 0}
    # P0: stage 1 is over at 11, stage 0 at 12. P1: 2 s of stage 1 and 1 s of stage 0, all after the end.
    assert found.unoverlapped == pytest.approx((1.0, 3.0))
    assert found.seconds == pytest.approx(14.0)


def test_a_queue_of_four_stages_a_worker() -> None:
    """f = 2, D = N = 8, one copy: r = 4, and an all-reduce of L takes 4 alpha + 1.5 L = 0.5 + 1.5 L.

    P0 0-1-..6-4-7-5-2-2===3-3===..4===6===5===7===0===....1===
       stage 7 done at 13, 4 at 20, 3 at 22, 0 at 28; idle 13-14 and 24-26
    P1 ..0-6-1-7-4-2-5-3-..2===4===3===5===6===0===7===1===....
       all four launched at 26, 2 left
    P3, P4, P7 are like P0 and P2, P5, P6 like P1.
    """
    gradients = [1.0, 0.25, 0.25, 0.5, 0.0, 0.25, 0.25, 1.0]
    found = solve(scheme("chimera", D=8, N=8, f=2), gradients, copies=1, alpha=0.125)
    assert found.compute == 28
    assert regions(found, 0) == {7: 3, 4: 2, 3: 2, 0: 0}
    assert regions(found, 1) == {6: 2, 5: 2, 2: 2, 1: 2}
    # Stage 7 takes 2: 13-14 and 24-25. Stage 4 takes 0.5: until 25.5. Stage 3 takes 1.25: until 26, and 0.75 after 28.
    # Stage 0 takes 2: until 30.75. On P1 four times 0.875, less 2.
    assert found.all_reduce[7] == found.all_reduce[0] == pytest.approx(2.0)
    assert found.unoverlapped == pytest.approx((2.75, 1.5, 1.5, 2.75, 2.75, 1.5, 1.5, 2.75))
    assert found.seconds == pytest.approx(30.75)


@pytest.mark.parametrize(("D", "N"), [(2, 2), (4, 4), (4, 8), (6, 6), (8, 8), (8, 12), (10, 30)])
def test_two_stages_a_worker_share_the_regions_of_figure_6(D: int, N: int) -> None:
    """A1 of the larger stage has a + b, idle before the last backward, and c behind it; A2 of the other has c.

    Comm_unoverlapped = max(0, max(0, A1 - a - b) + A2 - c), with idle times counted second by second on the lanes.
    """
    compiled = scheme("chimera", D=D, N=N)
    timeline = simulate(schedule_of(compiled), Costs())
    assert timeline.tick == 1
    for seed in range(5):
        sizes = [Random(seed * D + stage).uniform(0, 8) for stage in range(D)]
        found = solve(compiled, sizes, copies=1)
        expected = []
        for lane in timeline.lanes:
            first = max(each.operation.stage for each in lane)
            (second,) = {each.operation.stage for each in lane} - {first}
            done = max(each.end for each in lane if each.operation.stage == first)
            busy = {second for each in lane for second in range(each.start, each.end)}
            a_and_b, c = len(set(range(done, lane[-1].end)) - busy), timeline.span - lane[-1].end
            left = max(0.0, sizes[first] - a_and_b)
            expected.append(max(0.0, left + sizes[second] - c))
        assert found.unoverlapped == pytest.approx(expected, abs=1e-6)


def test_sums_of_the_whole_model_after_the_end_if_they_are_lazy() -> None:
    """As the four workers above, all sums launched after the last operation: P0 4.5 + 1.5, P1 4.5 - 2."""
    source = library.source("chimera")
    lazy = Source(source.name, source.text.replace("\n  stages", "\n  sync lazy\n  stages"))
    assert lazy.text != source.text
    found = solve(program(lazy, D=4, N=4), [1.0, 2.0, 1.0, 3.0], copies=2)
    assert found.unoverlapped == pytest.approx((6.0, 2.5, 2.5, 6.0))


def test_a_micro_batch_is_an_update_of_pipedream_and_its_sums_have_no_idle_time() -> None:
    """D = 2, W = 2: r = 2, all-reduces take L. An update takes F + B = 3 and no worker idles."""
    found = solve(scheme("pipedream", D=2), [0.5, 1.0], copies=2)
    assert (found.forwards, found.backwards, found.compute) == (1, 1, 3)
    assert found.unoverlapped == pytest.approx((0.5, 1.0))
    assert found.seconds == pytest.approx(4.0)


def test_2bw_pays_for_its_sums_once_in_n_micro_batches() -> None:
    found = solve(scheme("pipedream_2bw", D=2, N=4), [0.5, 1.0], copies=2)
    assert found.seconds == pytest.approx(4 * 3 + 1.0)


UNEVEN = """\
scheme uneven(D = 3)
workers 2
update every 1
pipe down {
  stages s in 0..D on s / 2
  micros m in 0..
  reads version max(0, m - 1 + s / 2)
  F(m, s) @ 4*m + s
  B(m, s) @ 4*m + 7 - s - 2*(s / 2)
}
"""


def test_a_stream_sums_while_a_worker_idles() -> None:
    """Two stages on worker 0, one on worker 1: an update takes 2 (1 + 2) = 6, and worker 1 idles 3 of them."""
    found = solve(program(Source("uneven.chim", UNEVEN)), [0.5, 0.25, 4.0], copies=2)
    assert found.compute == 6
    assert found.unoverlapped == pytest.approx((0.75, 4.0 - 3))
    assert found.seconds == pytest.approx(7.0)


def test_the_slowest_stage_counts_and_a_backward_that_recomputes_takes_three_forwards() -> None:
    """Doubling on two workers, N = 4: a forward over two takes 2 F_t, a recomputation and a backward of one 3 F_t."""
    compiled = scheme("chimera_doubling", D=2, N=4)
    fast, slow = timing(), timing(forward=1.5, backward=3.0)
    stages = (StageCosts(0, 0, 0, {1: fast}), StageCosts(0, 0, 0, {1: slow}))
    cluster = Cluster("by hand", 8, 1, 10**12, 0, FREE, FREE, FREE)
    found = equation(compiled, Setting(stages, cluster, 1, 1))
    assert (found.forward, found.backward) == (1.5, 3.0)
    assert found.further == (Term("recompute", 1.5, Fraction(4)),)
    assert found.compute == pytest.approx(float(1.5 * found.forwards + 3 * found.backwards + 1.5 * 4))
    assert (found.forwards, found.backwards) == (Fraction(4), Fraction(4))


def test_memory_of_three_unequal_stages_by_hand() -> None:
    """1F1B with D = 2, N = 3, two bytes of optimizer per byte of weights; messages of 5 bytes there and 4 back.

    Worker 0 keeps two forwards of stage 0 at once (D - s), worker 1 one of stage 1. Worker 1 receives what it reads: 5
    of its 30 bytes lie in the receive buffers. The first backward makes the gradients once more.
    """
    first = stage_timing(1, 2, 3, activations=20, input=3, output=5, gradient=4)
    last = stage_timing(1, 2, 3, activations=30, input=5, output=0, gradient=0)
    stages = (StageCosts(100, 90, 200, {1: first}), StageCosts(110, 100, 220, {1: last}))
    cluster = Cluster("by hand", 8, 1, 10**12, 0, FREE, FREE, FREE)
    down = scheme("dapple", D=2, N=3)
    head, tail = memory(down, Setting(stages, cluster, 1, 1))
    assert (head.weights, head.gradients, head.optimizer, head.activations) == (100, 2 * 90, 200, 2 * 20)
    assert (tail.weights, tail.gradients, tail.optimizer, tail.activations) == (110, 2 * 100, 220, 30 - 5)
    # Two receive buffers each, for 2 x 4 and 2 x 5 bytes, and at most two messages of the other kind under way.
    assert (head.messages, tail.messages) == (2 * 4 + 2 * 5, 2 * 5 + 2 * 4)
    assert head.total == 100 + 2 * 90 + 200 + 18 + 40
