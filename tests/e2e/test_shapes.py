"""Micro-batches of random lengths and numbers of items: each update is that of one process."""

from pathlib import Path

import pytest

from tests.e2e.ranks import Job, Outcome, compiled, run_all

LOOP = Path(__file__).parent / "loops" / "shapes.py"
UPDATES = "8"
DAPPLE = ("dapple", "D=4", "N=1..5")
RUNS = {
    "in one piece": (DAPPLE, ()),
    "functions": (DAPPLE, ("functions", "counts")),
    "lists twice": (("dapple", "D=2", "N=1,3"), ("list",)),
    "loader twice": (("zb_h1", "D=2", "N=1,2,4"), ("loader", "counts")),
    "chimera": (("chimera", "D=4", "N=1,2,4"), ("functions",)),
    "loader of chimera": (("chimera", "D=2", "N=1,2,4"), ("loader",)),
    "interleaved twice": (("interleaved", "P=2", "N=1..4"), ("list", "counts")),
    "again": (("dapple", "D=4", "N=1..4", "--recompute"), ("functions",)),
    "one number": (("chimera", "D=4", "N=4"), ("list",)),
    "slices": (("seq1f1b", "D=4", "k=2", "N=2,4"), ("functions", "counts", "slices")),
}
"""Directories, of four workers or of two in two copies, and what is asked of the loop."""

HUNDRED = {
    "dapple": ("dapple", "D=4", "N=1..16"),
    "chimera": ("chimera", "D=4", "N=1..16"),
    "zb_h1": ("zb_h1", "D=4", "N=1..16"),
    "interleaved": ("interleaved", "P=4", "N=1..16"),
    "graph": ("encoder_decoder", "E=2", "D=2", "N=1..16"),
    "dapple twice": ("dapple", "D=2", "N=1..16"),
    "chimera twice": ("chimera", "D=2", "N=1..16"),
    "zb_h1 twice": ("zb_h1", "D=2", "N=1..16"),
    "interleaved twice": ("interleaved", "P=2", "N=1..16"),
    "graph twice": ("encoder_decoder", "E=1", "D=1", "N=1..16"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("shapes")
    directories = {words: compiled(folder, words[0], asked=words[1:]) for words, _ in RUNS.values()}
    jobs = [Job(n, LOOP, (str(directories[words]), UPDATES, *asked), None) for n, (words, asked) in RUNS.items()]
    return run_all(folder, 4, jobs)


@pytest.mark.parametrize("name", RUNS)
def test_micro_batches_of_random_shapes_train_as_in_one_process(name: str, outcomes: dict[str, Outcome]) -> None:
    outcomes[name].assert_passed()
    assert f"{UPDATES} updates as in one process" in "".join(outcomes[name].said)


@pytest.mark.full
@pytest.mark.parametrize("name", HUNDRED)
def test_a_hundred_updates_of_random_numbers_and_shapes_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    directory = compiled(tmp_path, HUNDRED[name][0], asked=HUNDRED[name][1:])
    job = Job(name, LOOP, (str(directory), "100", "functions", "counts"), None)
    outcome = run_all(tmp_path, 4, [job])[name]
    outcome.assert_passed()
    assert "100 updates as in one process" in "".join(outcome.said)
