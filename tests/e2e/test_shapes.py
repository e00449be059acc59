"""Micro-batches of random lengths and numbers of items: each update is that of one process."""

from pathlib import Path

import pytest

from tests.e2e.ranks import Job, Outcome, compiled, run_all

LOOP = Path(__file__).parent / "loops" / "shapes.py"
UPDATES, MANY = "8", "100"
ON_TWO = """
scheme on_two(N = 4)
feeds enc[0] -> dec[s in 0..2]
workers 2
pipe down {
  stages enc[e in 0..1] on 0
  stages dec[s in 0..2] on 1
  micros m in 0..N
  F(m, enc[0]) prefer 3*m
  F(m, dec[s]) prefer 3*m + s
  B(m, dec[s]) prefer 3*m + 3 - s
  B(m, enc[0]) prefer 3*m + 4
}
"""
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

LONG = {
    "dapple": (("dapple", "D=4", "N=1..16"), ("functions", "counts")),
    "dapple twice": (("dapple", "D=2", "N=1..16"), ("list",)),
    "chimera": (("chimera", "D=4", "N=1,2,4,8,16"), ("functions",)),
    "chimera twice": (("chimera", "D=2", "N=1,2,4,8,16"), ("list", "counts")),
    "zb_h1": (("zb_h1", "D=4", "N=1,2,4,8,16"), ("functions",)),
    "zb_h1 twice": (("zb_h1", "D=2", "N=1..16"), ("functions", "counts")),
    "interleaved": (("interleaved", "P=4", "N=4,8,12,16"), ("list",)),
    "interleaved twice": (("interleaved", "P=2", "N=1..16"), ("functions",)),
    "graph": (("encoder_decoder", "E=2", "D=2", "N=1..16"), ("list", "counts")),
    "graph twice": (("on_two.chim", "N=1..16"), ("functions",)),
}
"""Directories and options of runs of a hundred updates of up to 16 micro-batches."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("shapes")
    (folder / "on_two.chim").write_text(ON_TWO)

    def job(name: str, updates: str, words: tuple[str, ...], asked: tuple[str, ...]) -> Job:
        scheme = str(folder / words[0]) if words[0].endswith(".chim") else words[0]
        return Job(name, LOOP, (str(compiled(folder, scheme, asked=words[1:])), updates, *asked), None)

    jobs = [job(name, UPDATES, *run) for name, run in RUNS.items()]
    jobs += [job(f"long {name}", MANY, *run) for name, run in LONG.items()]
    return run_all(folder, 4, jobs)


@pytest.mark.parametrize("name", RUNS)
def test_micro_batches_of_random_shapes_train_as_in_one_process(name: str, outcomes: dict[str, Outcome]) -> None:
    outcomes[name].assert_passed()
    assert f"{UPDATES} updates as in one process" in "".join(outcomes[name].said)


@pytest.mark.parametrize("name", LONG)
def test_a_hundred_updates_of_random_numbers_and_shapes_are_those_of_one_process(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    outcomes[f"long {name}"].assert_passed()
    assert f"{MANY} updates as in one process" in "".join(outcomes[f"long {name}"].said)
