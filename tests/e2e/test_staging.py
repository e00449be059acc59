"""``--device cuda --backend gloo`` on a model of a GPU: programs train as one process does. No GPU has run it."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.e2e.ranks import MODELS, Job, Outcome, compiled, run_all, torchrun

STEPS = 6
SIZE = ("--micro-batch-size", "2")
TRAINED = {
    "dapple": ("dapple", {"D": 2, "N": 4}, "zoo", ()),
    "chimera": ("chimera", {"D": 2, "N": 4}, "zoo", ()),
    "sharded": ("chimera", {"D": 2, "N": 4}, "plain", ("--shard-optimizer",)),
    "halves": ("zb_h1", {"D": 2, "N": 4}, "plain", ()),
    "stream": ("pipedream_2bw", {"D": 2, "N": 4}, "zoo", ()),
}


def jobs(folder: Path) -> Iterator[Job]:
    for name, (scheme, sizes, model, options) in TRAINED.items():
        notes = folder / f"{name}-notes"
        notes.mkdir()
        program = compiled(folder, scheme, **sizes)
        environment = {"STAGED": model, "STAGED_NOTES": str(notes)}
        arguments = (*SIZE, "--check", "--steps", str(STEPS), *options)
        yield Job(name, program, arguments, "staged.py", environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("staging")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    return run_all(folder, 2, list(jobs(folder)))


@pytest.mark.parametrize("name", TRAINED)
def test_a_program_whose_messages_and_sums_are_staged_trains_as_one_process_does(
    outcomes: dict[str, Outcome], name: str
) -> None:
    outcomes[name].assert_passed()
    assert "check: passed" in outcomes[name].said[0]


@pytest.mark.parametrize("name", TRAINED)
def test_the_host_waits_for_no_gpu_and_takes_no_more_pinned_memory(
    outcomes: dict[str, Outcome], folder: Path, name: str
) -> None:
    """The thread that posts waits as often in each update."""
    outcomes[name].assert_passed()
    for rank in range(2):
        lines = (folder / f"{name}-notes" / f"{rank}.txt").read_text().splitlines()
        host, thread, rooms = zip(*[map(int, line.split()) for line in lines], strict=True)
        assert len(lines) == STEPS
        assert {*host} == {0}
        assert thread[0] > 0
        if name != "stream":
            assert len({later - before for before, later in pairwise(thread[1:])}) == 1
        assert rooms[1] == rooms[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_message(tmp_path: Path) -> None:
    program = compiled(tmp_path, "dapple", D=2, N=4)
    for options, words in {
        ("--device", "cuda"): "--device cuda needs a GPU, and ",
        ("--memory-limit", "device"): "--memory-limit device: the ranks are on the CPU; give a size, as in",
        ("--device", "cpu", "--backend", "nccl"): "--device cpu --backend nccl: NCCL is for GPUs; leave --device out",
    }.items():
        done = torchrun(program, 2, "--model", str(MODELS / "zoo.py"), *options)
        (message,) = [line for line in done.stderr.splitlines() if line.startswith("train.py:")]
        assert message.startswith(f"train.py: {words}")
        assert done.returncode != 0
