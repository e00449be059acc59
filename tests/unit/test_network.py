"""Which links are measured, and what cluster their times describe."""

import pytest

from chimera_ir.measure.links import Described, Host, LinkTimes, PairTimes, chosen_fan_outs, chosen_pairs, described
from chimera_ir.measure.stages import Samples
from chimera_ir.profile.cluster import Link

SIZES = [4**power for power in range(3, 13)]
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
