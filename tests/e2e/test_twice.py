"""Programs that run forwards again train as those that do not, whatever changes between two runs, or say why not."""

import pytest

from tests.e2e.ranks import HERE, Job, Outcome, compiled, run_all

DAPPLE = ("dapple", {"D": 2, "N": 4}, ())
AGAIN = ("dapple", {"D": 2, "N": 4}, ("--recompute",))
STREAM = ("pipedream_2bw", {"D": 2, "N": 2}, ())
AGAIN_IN_A_STREAM = ("pipedream_2bw", {"D": 2, "N": 2}, ("--recompute",))
CHIMERA = ("chimera", {"D": 2, "N": 4}, ())
DOUBLED = ("chimera_doubling", {"D": 2, "N": 4}, ())
FOUR = ("interleaved", {"P": 2, "v": 2, "N": 4}, ())
OVERLAP = ("interleaved_overlap", {"P": 2, "v": 2, "N": 4}, ())
DUALPIPE = ("dualpipe_v", {"P": 2, "N": 8}, ())
WAVE = ("zb_v", {"P": 2, "N": 8}, ())

JOBS = {
    "containers": (DAPPLE, AGAIN, ("containers",)),
    "a statistic": (DAPPLE, AGAIN, ("statistic",)),
    "generators": (DAPPLE, AGAIN, ("generators",)),
    "containers in a stream": (STREAM, AGAIN_IN_A_STREAM, ("containers", "stream")),
    "a statistic in a stream": (STREAM, AGAIN_IN_A_STREAM, ("statistic", "stream")),
    "containers and doubled forwards": (CHIMERA, DOUBLED, ("containers",)),
    "checkpoints in pairs": (FOUR, OVERLAP, ("checkpoint",)),
    "checkpoints in pairs of both ways": (WAVE, DUALPIPE, ("checkpoint",)),
    "influence and doubled forwards": (CHIMERA, DOUBLED, ("influence",)),
}
"""Two programs, and the words of the loop."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("twice")

    def out(scheme: str, sizes: dict[str, int], asked: tuple[str, ...]) -> str:
        return str(compiled(folder, scheme, asked=asked, **sizes))

    loop = HERE / "loops" / "twice.py"
    jobs = [
        Job(name, loop, (out(*plain), out(*again), *words), model=None) for name, (plain, again, words) in JOBS.items()
    ]
    return run_all(folder, 2, jobs)


@pytest.mark.parametrize("name", [name for name in JOBS if "influence" not in name])
def test_both_train_the_same(outcomes: dict[str, Outcome], name: str) -> None:
    outcomes[name].assert_passed()


def test_items_that_influence_each_other_are_an_error_where_forwards_are_doubled(outcomes: dict[str, Outcome]) -> None:
    said = "".join(outcomes["influence and doubled forwards"].said)
    assert "of update 1 alone than together with 1 other, by more than rounding" in said
