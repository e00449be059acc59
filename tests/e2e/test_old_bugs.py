"""Mistakes that gloo forgives and NCCL does not, as others made them: the strict backend names each cause."""

import re

import pytest

from tests.e2e.old_bugs import BUGS
from tests.e2e.ranks import HERE, Job, Outcome, run_all

RULES = {"STRICT_PATIENCE": "2", "STRICT_ALONE": "1", "STRICT_LATE": "1"}
MORE = {"posted_ahead": {"STRICT_QUEUES": "1"}, "made_by_first_message": {"STRICT_MEETING": "2"}}
GRACE = 10.0
"""Both ranks of a hang give up at about the same time, and one of them knows the cause."""

SAID = {
    "sends_first": r"send tag 0 to rank (\d) hangs; at the heads of the streams: .*: send tag 0 to rank \1",
    "tags_mixed_up": r"on rank 1 \(tag 1: .*\) meets \(tag 2: .*\): without tags, what is next is what comes",
    "receives_deferred": r"recv tag 0 from rank 0 hangs|recv tag 10 from rank 1 hangs; at the heads .*: send tag 1",
    "sums_crossed": r"all_reduce of 64 numbers hangs; at the heads of the streams: .*all_reduce.*; .*all_reduce",
    "sent_buffer_reused": r"recv tag 0 from rank 0 writes memory that send tag 0 to rank 0 reads, and nothing",
    "received_buffer_reused": r"aten\S+ reads memory that recv tag 0 from rank 0 writes, and nothing",
    "made_by_first_message": r"the first operation of a communicator of ranks \[0, 1\] blocks the host",
    "posted_ahead": r"wait recv tag 0 from rank 0 hangs behind recv tag 0 from rank 0 in its hardware queue",
    "read_too_early": "the host reads memory that a copy writes which does not block it, and nothing has waited",
    "staging_reused": r"(?s)tensor\(\[5\., .* in place of 1",
    "sent_memory_given_back": r"memory that send tag 0 to rank 1 reads is given back, and nothing has waited",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    program = HERE / "old_bugs.py"
    jobs = [Job("gloo", program, ("gloo", *SAID), model=None)]
    for name in SAID:
        rules = RULES | MORE.get(name, {})
        jobs.append(Job(name, program, ("strict", name), model=None, environment=rules, grace=GRACE))
    return run_all(tmp_path_factory.mktemp("old"), 2, jobs)


def test_every_old_bug_is_run() -> None:
    assert [bug.__name__ for bug in BUGS] == list(SAID)


@pytest.mark.parametrize("name", SAID)
def test_gloo_lets_an_old_bug_pass(outcomes: dict[str, Outcome], name: str) -> None:
    assert all(f"{name} is right\n" in said for said in outcomes["gloo"].said), outcomes["gloo"].said


def test_gloo_lets_the_ranks_end(outcomes: dict[str, Outcome]) -> None:
    outcomes["gloo"].assert_passed()


@pytest.mark.parametrize("name", SAID)
def test_an_old_bug_fails_by_the_rules_of_nccl(outcomes: dict[str, Outcome], name: str) -> None:
    strict = outcomes[name]
    assert set(strict.statuses) != {"0"}
    assert re.search(SAID[name], "\n".join(strict.said)), strict.said
