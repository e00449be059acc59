"""`CompiledSchedule` in scripts for torch.distributed.pipelining: one script, torch's schedules and compiled ones."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ranks import Job, Outcome, compiled, run_all

LOOPS = Path(__file__).resolve().parent / "loops"
SCRIPT, MESH = LOOPS / "torch_interface.py", LOOPS / "torch_mesh.py"
OF_TORCH = ("Schedule1F1B", "ScheduleInterleavedZeroBubble")
COMPILED = ("dapple", "zb_h1", "chimera", "dualpipe_v")
MESHES = ("ScheduleLoopedBFS", "dapple", "chimera")


def jobs(folder: Path) -> Iterator[Job]:
    for schedule in OF_TORCH:
        yield Job(schedule, SCRIPT, (schedule,), model=None)
    for scheme in COMPILED:
        directory = compiled(folder, scheme, **{"P" if scheme == "dualpipe_v" else "D": 4, "N": 8})
        yield Job(scheme, SCRIPT, (str(directory),), model=None)
    for name in MESHES:
        schedule = name if name.startswith("Schedule") else str(compiled(folder, name, D=2, N=4))
        yield Job(f"mesh-{name}", MESH, (schedule,), model=None)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("interface")
    return run_all(folder, 4, list(jobs(folder)))


def assert_equal_to_one_process(outcome: Outcome) -> None:
    outcome.assert_passed()
    for rank, printed in enumerate(outcome.said):
        line = re.search(rf"^rank {rank}: off by (\S+)$", printed, re.M)
        assert line is not None, printed
        assert float(line[1]) < 1e-12


@pytest.mark.parametrize("schedule", OF_TORCH + COMPILED)
def test_one_script_gives_the_losses_outputs_and_gradients_of_the_whole_model(
    scripts: dict[str, Outcome], schedule: str
) -> None:
    """Two tensors between stages, keyword arguments, gradients of means and of sums, accumulated, and evaluations."""
    assert_equal_to_one_process(scripts[schedule])


@pytest.mark.parametrize("schedule", MESHES)
def test_stages_sharded_by_fsdp2_train_as_one_process_does(scripts: dict[str, Outcome], schedule: str) -> None:
    assert_equal_to_one_process(scripts[f"mesh-{schedule}"])
