"""How a job ends that is ended from outside, or by the user's code: promptly, once told, with nothing left behind."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests import forkserver
from tests.e2e.ranks import (
    HERE,
    MODELS,
    PATIENCE,
    Job,
    compiled,
    environment,
    interrupted,
    launched,
    left_in,
    run_all,
    signalled,
)

LOOP = HERE / "loops" / "ends.py"
PROMPTLY = 8.0
"""Seconds on a busy machine; torchrun itself waits for 30 before it kills."""

HELPED = """
import helper
from torch import nn

class Stage(nn.Linear):
    def forward(self, x):
        return helper.scaled(super().forward(x))

def build_stage(stage, num_stages):
    return Stage(4, 4)

def loss(output, target):
    return helper.judged(output, target)

def dataset():
    return [(helper.torch.full((4,), float(i)), helper.torch.zeros(4)) for i in range(8)]

def optimizer(parameters):
    return helper.torch.optim.SGD(parameters, lr=0.01)
"""

HELPER = """
import os
import torch
CALLS = {"scaled": 0}

def scaled(x):
    CALLS["scaled"] += 1
    if CALLS["scaled"] > 2 and os.environ["RANK"] == "1" and "ROOM" in os.environ:
        torch.empty(1 << 50)
    return x

def judged(output, target):
    if CALLS["scaled"] > 2 and "ROOM" not in os.environ:
        raise ValueError("cannot judge")
    return (output - target).square().mean()
"""


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("ends"), "dapple", D=2, N=2)


def ended(
    directory: Path, number: signal.Signals, *arguments: str, model: str = "failing.py", to_all: bool = False
) -> tuple[int, str, float]:
    """A signal to torchrun in the third update, as `interrupted` has it."""
    words = ("--model", str(MODELS / model), "--steps", "1000000", *arguments)
    return interrupted(directory, 2, *words, when=" 3/1000000", number=number, to_all=to_all)


def test_sigterm_to_torchrun_ends_all_ranks_at_once_and_is_called_what_it_is(two_stages: Path) -> None:
    status, said, seconds = ended(two_stages, signal.SIGTERM)
    assert status != 0
    (message,) = (line for line in said.splitlines() if line.startswith("train.py:"))
    assert message.startswith("train.py: terminated: SIGTERM came to torchrun")
    assert seconds < PROMPTLY
    assert not left_in(two_stages.parent)


def test_a_torchrun_that_is_killed_leaves_no_rank_behind(two_stages: Path, tmp_path: Path) -> None:
    file = tmp_path / "metrics.json"
    _, said, seconds = ended(two_stages, signal.SIGKILL, "--metrics", str(file))
    assert [line for line in said.splitlines() if line.startswith("train.py:")] == [
        "train.py: torchrun has died, and its ranks end"
    ]
    assert seconds < PROMPTLY
    assert not left_in(two_stages.parent, seconds=1)
    assert len(json.loads(file.read_text())["loss"]) >= 3


def test_torchruns_summary_has_the_users_traceback_as_the_cause(two_stages: Path) -> None:
    """It takes the rank for the cause whose error came first."""
    arguments = ("--model", str(MODELS / "raising.py"), "--micro-batch-size", "2")
    done = launched(two_stages, 2, (), arguments, {"RAISE": "forward:plain:4:1"})
    _, cause = done.stderr.split("Root Cause (first observed failure):")
    assert "rank      : 1 " in cause
    words = "rank 1 (worker 1): the forward of stage 1 (micro-batch 0 of update 2, F m0 s1): "
    assert f"train.py: {words}" in cause
    assert "raising.py" in cause
    assert "ValueError: went wrong" in cause
    assert "To enable traceback" not in done.stderr


def test_an_error_in_what_the_model_file_imports_and_one_for_lack_of_memory_are_told_with_all_that_helps(
    two_stages: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(HELPED)
    (tmp_path / "helper.py").write_text(HELPER)
    model = str(tmp_path / "model.py")
    outcomes = run_all(
        tmp_path, 2, [Job("judged", two_stages, (), model), Job("room", two_stages, (), model, {"ROOM": ""})]
    )
    said = outcomes["judged"].said[1]
    place = f"{tmp_path}/helper.py:14 in judged (from {tmp_path}/model.py:13 in loss)"
    operation = "micro-batch 1 of update 1, F m1 s1"
    assert said.startswith(f"train.py: rank 1 (worker 1): the loss ({operation}): {place}: ValueError: cannot judge\n")
    assert said.count("cannot judge") == 3, "the headline, the line that raised it, and the end of the traceback"
    assert outcomes["judged"].statuses[1] == "1"
    said = outcomes["room"].said[1]
    assert "DefaultCPUAllocator: can't allocate memory" in said
    *_, last = said.splitlines()
    assert last.startswith("memory: this process has used at most ")
    assert (
        "the schedule keeps 1 x M_theta of weights here (stage 1: 1) and up to 1 x M_a of activations (stage 1: 1)"
        in last
    )


def test_nan_ends_the_job_where_that_is_asked_for_and_the_log_has_every_update(
    two_stages: Path, tmp_path: Path
) -> None:
    """The model file takes arguments, and names of parameters; norms are those of the whole model."""
    common = ("--steps", "5", "--clip-norm", "0.5")
    listed = [
        Job(
            "stopped",
            two_stages,
            (*common, "--stop-on-nan", "--log-file", str(tmp_path / "stopped.jsonl")),
            "ruined.py",
        ),
        Job("on", two_stages, (*common, "--log-file", str(tmp_path / "on.jsonl"), "--", "--bias"), "ruined.py"),
    ]
    outcomes = run_all(tmp_path, 2, listed)
    said = "".join(outcomes["stopped"].said)
    assert [line for line in said.splitlines() if line.startswith("train.py:")] == [
        "train.py: --stop-on-nan: the loss of update 3 is nan"
    ]
    assert outcomes["stopped"].statuses[0] == "1"
    assert outcomes["stopped"].statuses[1] != "0"
    outcomes["on"].assert_passed()
    lines = [json.loads(line) for line in (tmp_path / "on.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["loss"] is None for line in lines] == [False, False, True, True, True]
    assert all(line["norm"] > 0 and line["learning_rates"] == {"0": [0.1]} for line in lines[:2])
    assert len((tmp_path / "stopped.jsonl").read_text().splitlines()) >= 3


def in_a_loop(folder: Path, directory: Path, case: str, *options: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The words of torchrun for a case of the loop, and its environment."""
    words = (*options, "--nproc-per-node=2", str(LOOP), str(directory), case, str(folder))
    return words, environment() | {"PYTHONPATH": str(HERE.parents[1])}


def test_a_loop_of_ones_own_is_started_again_and_resumes_with_a_store_of_its_own(
    two_stages: Path, tmp_path: Path
) -> None:
    words, variables = in_a_loop(tmp_path, two_stages, "restarts", "--standalone", "--max-restarts=1")
    done = forkserver.run(("-m", "torch.distributed.run", *words), variables, tmp_path, PATIENCE)
    assert done.returncode == 0, done.stderr
    first, second = sorted(re.findall(r"rank \d: resumed[^\n]*?(?=rank \d:|\n|\Z)", done.stdout))  # maybe on one line
    assert first.startswith("rank 0: resumed after 2, ")
    assert second == first.replace("rank 0", "rank 1")


def test_ranks_of_a_loop_of_ones_own_end_with_an_error_when_torchrun_is_killed(
    two_stages: Path, tmp_path: Path
) -> None:
    """No process stays behind, which `signalled` sees to."""
    words, variables = in_a_loop(tmp_path, two_stages, "goes on")
    done, seconds = signalled(words, variables, tmp_path, signal.SIGKILL, "3 updates")
    assert seconds < PROMPTLY
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} (worker {rank}): torchrun has died, and its ranks end" for rank in range(2)]


def test_in_a_loop_of_ones_own_an_error_is_the_users_line_and_a_message_that_says_what_each_rank_waits_for(
    two_stages: Path, tmp_path: Path
) -> None:
    """It is chance which rank gives up first; the other one finds its connection closed, in place of no answer."""
    job = Job("messages", LOOP, (str(two_stages), "messages", str(tmp_path)), None)
    outcome = run_all(tmp_path, 2, [job])["messages"]
    outcome.assert_passed()
    of_0, of_1 = outcome.said
    start = "the backward of stage 1: "
    assert f"rank 1 has failed: {start}" in of_0
    assert f"rank 1 (worker 1): {start}" in of_1
    assert "ValueError: no gradient" in of_1
    assert "rank 1 is in no call of the pipeline that has timed out: it may be stopped, in code of its own" in of_0
    assert "at the same time: rank 1 (worker 1): wait for the norm of the gradients: rank 0: " in of_0
    assert "rank 1 (worker 1): wait for the norm of the gradients: rank 0: " in of_1
    traces = of_0.split("Traceback (most recent call last):")[1:]
    assert len(traces) == 3
    assert all(trace.count("  File ") <= 3 and "--timeout" not in trace for trace in traces)
