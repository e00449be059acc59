"""When something fails, the user reads one message, every rank ends, and nothing hangs."""

import subprocess
from pathlib import Path

import pytest

from tests.e2e.ranks import MODELS, Job, compiled, interrupted, over_gloo, ranks_left, run_all, torchrun

FAILING = str(MODELS / "failing.py")

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("failures"), "chimera", D=2, N=4)


@pytest.fixture(scope="module")
def two_over_gloo(two_stages: Path) -> Path:
    return over_gloo(two_stages)


def ours(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("train.py:")]


@pytest.mark.parametrize("phase", ["forward", "backward", "all-reduce"])
def test_a_rank_that_is_killed_ends_the_others_with_one_message(two_stages: Path, phase: str) -> None:
    width = "3000" if phase == "all-reduce" else "4"
    arguments = ("--model", FAILING, "--steps", "500", "--timeout", "20")
    done = torchrun(two_stages, 2, *arguments, FAIL=f"kill-in-{phase}:1:2", WIDTH=width)
    assert done.returncode != 0
    (message,) = ours(done)
    assert message.startswith("train.py: rank 0 (worker 0): wait ")
    assert "rank 1: the connection was closed" in message
    assert not ranks_left(two_stages)


@pytest.mark.parametrize(
    ("fault", "timeout", "cause"),
    [
        ("kill-in-forward", "20", "the connection was closed"),
        ("stop-in-forward", "3", "no answer within 3 s (--timeout)"),
    ],
)
def test_a_rank_whose_messages_are_gloos_is_named_too(
    two_over_gloo: Path, fault: str, timeout: str, cause: str
) -> None:
    arguments = ("--model", FAILING, "--steps", "500", "--timeout", timeout)
    done = torchrun(two_over_gloo, 2, *arguments, FAIL=f"{fault}:1:2")
    assert done.returncode != 0
    (message,) = ours(done)
    assert message.startswith("train.py: rank 0 (worker 0): wait ")
    assert f"rank 1: {cause}" in message
    assert not ranks_left(two_over_gloo)


def test_a_rank_that_dies_while_the_other_computes_is_named(two_stages: Path) -> None:
    arguments = ("--model", FAILING, "--steps", "9", "--timeout", "20")
    done = torchrun(two_stages, 2, *arguments, FAIL="kill-while-the-other-computes:1:2")
    assert done.returncode != 0
    (message,) = ours(done)
    assert "rank 1: the connection was closed" in message
    assert not ranks_left(two_stages)


def test_a_rank_that_hangs_is_named_when_the_time_is_up(two_stages: Path) -> None:
    done = torchrun(two_stages, 2, "--model", FAILING, "--steps", "9", "--timeout", "3", FAIL="stop-in-forward:1:2")
    assert done.returncode != 0
    (message,) = ours(done)
    assert message.startswith("train.py: rank 0 (worker 0): wait ")
    assert "rank 1: no answer within 3 s (--timeout)" in message
    assert not ranks_left(two_stages)


def test_ctrl_c_ends_cleanly_and_keeps_the_metrics(two_stages: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.json"
    arguments = ("--model", FAILING, "--steps", "100000", "--metrics", str(metrics))
    status, said = interrupted(two_stages, 2, *arguments, when=" 5/100000")
    assert status != 0
    assert said.count("train.py: interrupted") == 1
    assert "rank_0.py" not in said, "no traceback of ours"
    assert '"loss": [' in metrics.read_text()
    assert not ranks_left(two_stages)


MISTAKES = {
    "raise-in-forward:1:2": "failing.py:57 in forward: ValueError: forward went wrong",
    "raise-in-backward:1:2": "failing.py:36 in backward: ValueError: backward went wrong",
    "change-shape:0:2": "stage 0 returned for micro-batch 0: tensor 0 is (2, 4) torch.float32 and was (1, 4)",
    "build-raises": "failing.py:76 in build_stage: KeyError: 'no such layer'",
    "build-returns-none": "build_stage(0, 2) returned None, not a torch.nn.Module",
    "returns-list": "stage 0 returned a list; return a tensor or a tuple of tensors",
    "loss-of-two": "loss returned a tensor of shape (2,); return the mean over the micro-batch",
    "few-items": "the dataset has 3 items and one update takes B*N*W = 1*4*1 = 4",
    "no-map": "dataset() must return a map-style dataset",
    "no-pairs": "item 35 of the dataset is a dict, not a pair (input, target)",
    "no-optimizer": "optimizer returned None, not a torch.optim.Optimizer",
    "own-randomness": "starts with other weights on rank 1 than on rank 0",
    "tied": "stages 0 and 1 share the parameter linear.weight",
    "lazy": "stage 0 has lazy parameters; give every layer its sizes",
}

OPTIONS = {
    ("--steps", "0"): "argument --steps: '0' is not a positive whole number",
    ("--nonsense",): "unrecognized arguments: --nonsense",
    ("--timeout", "soon"): "'soon' is not a positive number of seconds",
    ("--rehearse", "F=1"): "'F=1' needs both F and B",
    ("--model", "nowhere.py"): "model file nowhere.py: No such file or directory",
    ("--model", str(MODELS / "empty.py")): "lacks the functions build_stage(stage: int, num_stages: int)",
    ("--model", str(MODELS / "broken.py")): "broken.py:3: SyntaxError: ",
    ("--metrics", "/nowhere/metrics.json"): "--metrics /nowhere/metrics.json: No such file or directory",
    ("--backend", "nccl"): "--backend nccl needs one GPU per rank",
}


def test_mistakes_of_the_model_and_the_command_line_are_one_clear_message(two_stages: Path, tmp_path: Path) -> None:
    jobs = {
        f"model-{n}": (Job(f"model-{n}", two_stages, ("--steps", "3"), "failing.py", {"FAIL": what}), said)
        for n, (what, said) in enumerate(MISTAKES.items())
    }
    jobs |= {
        f"option-{n}": (Job(f"option-{n}", two_stages, option, "failing.py"), said)
        for n, (option, said) in enumerate(OPTIONS.items())
    }
    outcomes = run_all(tmp_path, 2, [job for job, _ in jobs.values()])
    for name, (_, expected) in jobs.items():
        outcome = outcomes[name]
        said = "".join(outcome.said)
        assert expected in said, f"{name}: {said}"
        assert said.count("train.py:") == 1, f"{name}: one message on one rank: {said}"
        assert "Traceback" not in said, name
        assert "0" not in outcome.statuses, f"{name}: {outcome.statuses}"


def test_a_world_of_the_wrong_size_is_one_clear_message(two_stages: Path) -> None:
    done = torchrun(two_stages, 3, "--model", FAILING)
    assert done.returncode != 0
    (message,) = ours(done)
    assert "runs on 2 workers and torchrun started 3 ranks" in message
    assert "--nproc-per-node=2 or 4" in message
