"""What errors carry, and that a status says which kind of failure it was."""

from chimera_runtime.errors import FAILED, INTERRUPTED, MISUSED, OUR_FAULT, TERMINATED, PeerLost


def test_every_way_to_fail_has_a_status_of_its_own_that_a_shell_can_pass_on() -> None:
    statuses = [FAILED, MISUSED, OUR_FAULT, INTERRUPTED, TERMINATED]
    assert len(set(statuses)) == len(statuses)
    assert all(0 < status < 256 for status in statuses)


def test_what_a_signal_ended_has_the_status_of_a_shell() -> None:
    """128 and the number of the signal: SIGINT is 2, SIGTERM is 15."""
    assert (INTERRUPTED, TERMINATED) == (128 + 2, 128 + 15)


def test_a_lost_peer_names_the_ranks_that_were_waited_for_as_far_as_they_are_known() -> None:
    assert PeerLost("gone", [3, 1]).peers == (3, 1)
    assert PeerLost("gone").peers == ()
    assert str(PeerLost("gone", [3])) == "gone"
