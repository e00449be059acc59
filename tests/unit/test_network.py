"""Which links are measured, and what cluster their times describe."""

from dataclasses import replace

import pytest

from chimera_ir.measure.links import chosen_forks, chosen_pairs, chosen_sizes, connected_kinds
from chimera_ir.measure.network import Described, Host, LinkTimes, described
from chimera_ir.measure.samples import Samples
from chimera_ir.profile.cluster import Link, Short

SIZES = [4**power for power in range(3, 13)]
SHORT = 2**16
SOON = Link(5e-7, 5e-10, 2.5e-7, eager=True)


def test_pairs_are_neighbours_within_nodes_and_first_ranks_between_them() -> None:
    assert chosen_pairs(["a", "b"]) == [(0, 1)]
    assert chosen_pairs(["a"] * 8) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert chosen_pairs(["a", "a", "b", "b"]) == [(0, 1), (2, 3), (0, 2)]


def test_a_fork_is_a_rank_between_two_others_of_the_same_kind() -> None:
    def forks(places: str) -> dict[bool, tuple[int, tuple[int, int]]]:
        return chosen_forks(chosen_pairs([*places]), [*places])

    assert forks("ab") == forks("aa") == forks("aabb") == {}
    assert forks("aaaa") == {True: (1, (0, 2))}
    assert forks("abcd") == {False: (1, (0, 2))}
    assert forks("aaabbcc") == {True: (1, (0, 2)), False: (3, (0, 5))}


def test_where_ranks_are_connected_at_least_two_sizes_are_short_and_two_are_not() -> None:
    for sizes in ([64], [1, 2, 64], [2**16], [2**16, 2**17], [2**20], [64, 2**20], [2**18, 2**20], SIZES):
        found = chosen_sizes(sizes, connected=True)
        assert {*sizes} <= {*found}
        assert found == sorted({*found})
        assert min(sum(size <= SHORT for size in found), sum(size > SHORT for size in found)) >= 2
        assert chosen_sizes(sizes, connected=False) == sizes
    assert chosen_sizes(SIZES, connected=True) == SIZES, "what is measured unless --largest says otherwise has enough"


def test_a_kind_of_link_is_connected_only_where_all_its_pairs_are() -> None:
    kinds = {(0, 1): True, (1, 2): True, (0, 3): False}
    assert connected_kinds(kinds, {0: [1, 3], 1: [0, 2]}) == {True, False}
    assert connected_kinds(kinds, {0: [1, 3], 1: [0]}) == {False}
    assert connected_kinds(kinds, {0: [], 1: []}) == set()


def network(
    places: str, slow: float = 1.0, at_once: dict[bool, float] | None = None, short: dict[bool, int] | None = None
) -> Described:
    """Exact times on a network of two levels: 20 us and 1 GB/s between nodes, 2 us and 10 GB/s within them.

    Posting takes 4 us, 1 us, and of a sum 5 us. Messages to two ranks at once take ``at_once`` as long, by (within).
    Messages of up to ``short`` bytes, by (within), take 0.5 us and 2 GB/s, and 0.25 us to post.
    """
    links = {False: Link(2e-5, 1e-9, 4e-6), True: Link(2e-6, 1e-10, 1e-6)}
    links |= {kind: replace(links[kind], short=Short(up_to, SOON)) for kind, up_to in (short or {}).items()}
    sums = Link(3e-5, 2e-9, 5e-6)
    kinds = {False} if len(set(places)) == len(places) else {True} if len(set(places)) == 1 else {False, True}

    def exactly(seconds: float) -> Samples:
        return Samples((seconds,) * 5)

    messages = {(kind, size): exactly(links[kind].message(size)) for kind in kinds for size in SIZES}
    messages[min(kinds), SIZES[-1]] = exactly(slow * links[min(kinds)].message(SIZES[-1]))
    posts = {(kind, size): exactly(links[kind].of(size).overhead) for kind, size in messages}
    taken = {(r, size): exactly(sums.overhead + sums.all_reduce(size, r)) for r in (2, len(places)) for size in SIZES}
    nodes = tuple(Host(place, 0, 6 << 20, shared=True) for place in places)
    forks = {kind: exactly(longer * messages[kind, SIZES[-1]].median) for kind, longer in (at_once or {}).items()}
    launches = exactly(sums.overhead)
    return described("here", LinkTimes(nodes, messages, messages, forks, taken, posts, launches, short or {}))


@pytest.mark.parametrize(("places", "kinds"), [("aabb", [True]), ("aabb", [True, False]), ("aaa", [True])])
def test_short_messages_have_a_line_of_their_own_where_they_go_another_way(places: str, kinds: list[bool]) -> None:
    found = network(places, at_once={True: 1.9}, short=dict.fromkeys(kinds, SHORT))
    plain = network(places, at_once={True: 1.9}).cluster
    links = {True: (found.cluster.within, plain.within), False: (found.cluster.between, plain.between)}
    for kind in kinds:
        link, without = links[kind]
        assert link.short is not None
        assert (link.short.up_to, link.short.link.eager, link.short.link.overhead) == (SHORT, True, SOON.overhead)
        assert (link.short.link.alpha, link.short.link.beta) == pytest.approx((SOON.alpha, SOON.beta), rel=1e-3)
        assert (link.alpha, link.beta) == pytest.approx((without.alpha, without.beta), rel=1e-2)
        assert (link.overhead, link.shared, link.eager) == (without.overhead, kind, False)
    assert found.remarks == ()
    assert sum(line.startswith("short messages") for line in found.table) == len(kinds)
    assert sum("64 KiB within a node went over sockets" in line for line in found.table) == 1
    if False not in kinds:
        assert found.cluster.between.short is None, "between machines there are none"
    if "b" not in places:
        assert found.cluster.between == replace(found.cluster.within, short=None)
        assert "[links.between] is what was measured within it, of messages that are not short" in found.table[0]


def test_each_line_is_said_to_be_off_by_its_own_name() -> None:
    wrong = network("aabb", slow=2, short={False: SHORT}).remarks
    assert [each.split(":")[0] for each in wrong] == ["messages between nodes"]


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
    assert "not measured" in network("aabb").table[-1]


def test_a_network_of_two_levels_is_described_as_it_is() -> None:
    found = network("aabb")
    cluster = found.cluster
    assert (cluster.workers, cluster.per_node, cluster.memory) == (4, 2, 3 << 20)
    assert (cluster.between.alpha, cluster.within.alpha) == pytest.approx((2e-5, 2e-6), rel=1e-3)
    assert (cluster.between.beta, cluster.within.beta) == pytest.approx((1e-9, 1e-10), rel=1e-3)
    assert (cluster.sums.alpha, cluster.sums.beta) == pytest.approx((3e-5, 2e-9), rel=1e-3)
    assert (cluster.between.overhead, cluster.within.overhead, cluster.sums.overhead) == (4e-6, 1e-6, 5e-6)
    assert found.remarks == ()
    assert len(found.table) == 4 * (1 + len(SIZES)) + 2


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
