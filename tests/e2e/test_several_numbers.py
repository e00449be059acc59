"""Directories with programs for several numbers of micro-batches: each update takes as many as its mini-batch has."""

from pathlib import Path

import pytest

from tests.e2e.ranks import Job, Outcome, compiled, run_all

LOOP = Path(__file__).parent / "loops" / "several_numbers.py"
UPDATES = 25
DAPPLE = ("dapple", "D=4", "N=1..16")
SOME = ("dapple", "D=2", "N=1,4")
CHIMERA = ("chimera", "D=4", "N=1,2,4,8")
TRAINED = {
    "dapple": (DAPPLE, ()),
    "functions": (DAPPLE, ("functions", "counts")),
    "dapple twice": (SOME, ("counts", "sharded")),
    "loader": (SOME, ("loader",)),
    "chimera": (CHIMERA, ("lists",)),
    "loader of chimera": (CHIMERA, ("loader", "counts")),
    "chimera twice": (("chimera", "D=2", "N=1,2,6"), ()),
    "zb_h1 twice": (("zb_h1", "D=2", "N=1,3,8"), ("counts",)),
    "interleaved twice": (("interleaved", "P=2", "N=1..8"), ()),
    "graph": (("encoder_decoder", "E=2", "D=2", "N=1,2,5"), ("counts",)),
}
"""Directories, of four workers or of two in two copies, and what is asked of the loop."""
DROPPED = {"by few programs": SOME, "by many": ("dapple", "D=2", "N=1..16")}
KILLED = {"tensors": (DAPPLE, ()), "a loader": (("dapple", "D=2", "N=1..16"), ("loader",))}

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("several")
    directories = {words: compiled(folder, words[0], asked=words[1:]) for words, _ in TRAINED.values()}
    directories |= {words: compiled(folder, words[0], asked=words[1:]) for words in DROPPED.values()}

    def job(name: str, words: tuple[str, ...], *asked: str) -> Job:
        return Job(name, LOOP, (str(directories[words]), str(UPDATES), *asked), None)

    jobs = [job(name, words, *asked) for name, (words, asked) in TRAINED.items()]
    jobs += [job(name, words, "dropout") for name, words in DROPPED.items()]
    for name, (words, asked) in KILLED.items():
        saved = f"checkpoints={folder / name}"
        jobs += [
            job(f"{name}, killed", words, *asked, saved, "killed=7"),
            job(f"{name}, resumed", words, *asked, saved),
        ]
    jobs.append(job("differing", DAPPLE, "differ"))
    return run_all(folder, 4, jobs)


@pytest.mark.parametrize("name", TRAINED)
def test_updates_of_random_numbers_are_those_of_one_process(name: str, outcomes: dict[str, Outcome]) -> None:
    outcomes[name].assert_passed()
    said = "".join(outcomes[name].said)
    assert f"{UPDATES} updates as in one process" in said
    (words, _) = TRAINED[name]
    # A number without a program is said once, however many there are.
    has_all = words == DAPPLE
    assert f"remarks: {int(not has_all)}" in said
    assert said.count("A program of its own is faster") == 1 - has_all


def test_random_numbers_of_a_forward_do_not_depend_on_the_programs(outcomes: dict[str, Outcome]) -> None:
    losses = []
    for name in DROPPED:
        outcomes[name].assert_passed()
        (line,) = (line for said in outcomes[name].said for line in said.splitlines() if line.startswith("losses "))
        losses.append([*map(float, line.split()[1:])])
    assert len(losses[0]) == UPDATES
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize("name", KILLED)
def test_a_run_that_is_killed_goes_on_where_it_was(name: str, outcomes: dict[str, Outcome]) -> None:
    assert "0" not in outcomes[f"{name}, killed"].statuses
    outcomes[f"{name}, resumed"].assert_passed()
    assert f"{UPDATES - 7} updates as in one process" in "".join(outcomes[f"{name}, resumed"].said)


def test_ranks_that_differ_in_the_number_are_named_at_that_step(outcomes: dict[str, Outcome]) -> None:
    said = outcomes["differing"].said
    assert "0" not in outcomes["differing"].statuses
    words = "ranks 0 and 1 of copy 0 are given 5 and 6 micro-batches in one step: all ranks of a copy take the same"
    assert all(words in of_rank for of_rank in said), said
