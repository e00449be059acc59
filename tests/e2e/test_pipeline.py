"""`Pipeline` in loops of one's own: training as in one process, and what a loop may do."""

from pathlib import Path

import pytest

from tests.agreement import Case, beyond, measured
from tests.e2e.ranks import Job, Outcome, compiled, run_all
from tests.repeatable import also

LOOPS = Path(__file__).resolve().parent / "loops"
SAMPLE = also(
    (
        *(Case("dapple", 2, 1), Case("chimera", 2, 2), Case("chimera_halving", 2, 2)),
        *(Case("chimera", 4, 1, tied=True), Case("interleaved", 4, 1, tied=True)),
    ),
    (
        *(Case("chimera", 4, 1), Case("gems", 4, 1), Case("dapple", 2, 2, tied=True)),
        *(Case("chimera_doubling", 4, 1), Case("interleaved", 4, 1), Case("waves", 4, 1)),
    ),
)
"""One pipe, two in copies, halves of micro-batches; ties of stages on workers of their own and of one."""


@pytest.fixture(scope="module")
def agreement(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, float]]:
    return dict(measured(SAMPLE, tmp_path_factory.mktemp("agreement")))


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_clipped_training_is_that_of_one_process(agreement: dict[Case, dict[str, float]], case: Case) -> None:
    assert beyond(agreement[case]) == []
    assert agreement[case]["clipped"] > 0, "or clipping is not tested"


CHECKED: tuple[tuple[str, dict[str, int], tuple[str, ...]], ...] = (
    *(("chimera", {"D": 4, "N": 4}, ("0,3",)), ("pipedream_2bw", {"D": 4, "N": 4}, ())),
    *(("seq1f1b", {"D": 4, "N": 4}, ()), ("zb_h1", {"D": 2, "N": 4}, ())),
)
"""Programs that loops check: two replicas of each stage with a tie, a stream, slices, and split backwards in copies."""

CASES = {
    "interleaved": ("pipelines.py", "chimera", "gpipe"),
    "norms": ("pipelines.py", "chimera"),
    "infinite": ("pipelines.py", "chimera"),
    "mesh": ("pipelines.py", "dapple"),
    "closed": ("pipelines.py", "chimera", "pipedream_2bw"),
    "frozen": ("pipelines.py", "chimera", "dapple"),
    "encoded": ("pipelines.py", "chimera"),
    "failing": ("pipelines.py", "dapple"),
    "from_function": ("refusals.py", "dapple"),
    "frozen_later": ("refusals.py", "dapple"),
    "on_all": ("refusals.py", "dapple"),
    "without_data": ("refusals.py", "dapple"),
    "first_batch": ("refusals.py", "dapple"),
    "kept": ("gradients.py", "dapple", "chimera", "pipedream_2bw"),
    "windows": ("gradients.py", "dapple", "chimera"),
    "in_part": ("gradients.py", "chimera"),
    "several": ("gradients.py", "chimera", "chimera N=8"),
    "replicas": ("losses.py", "chimera"),
    "behind_torch": ("losses.py", "chimera"),
    "reports": ("losses.py", "dapple", "chimera"),
}


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("loops")

    def job(name: str) -> Job:
        depth = 2 if name == "mesh" else 4
        script, *schemes = CASES[name]
        sizes = [(scheme.split()[0], 8 if scheme.endswith("N=8") else 4) for scheme in schemes]
        directories = [str(compiled(folder, scheme, D=depth, N=number)) for scheme, number in sizes]
        return Job(name, LOOPS / script, (name, *directories), model=None)

    checked = [str(compiled(folder, scheme, tied, **sizes)) for scheme, sizes, tied in CHECKED]
    checks = Job("checks", LOOPS / "pipelines.py", ("checks", *checked), model=None)
    return run_all(folder, 4, [*map(job, CASES), checks])


@pytest.mark.parametrize("case", [*CASES, "checks"])
def test_a_loop_of_ones_own(loops: dict[str, Outcome], case: str) -> None:
    loops[case].assert_passed()
