"""When something fails, the user reads one message, every rank ends, and nothing hangs."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from chimera_ir.commands import trace_command
from tests import forkserver
from tests.e2e.ranks import (
    HERE,
    MODELS,
    PATIENCE,
    SCRIPT,
    Job,
    compiled,
    environment,
    interrupted,
    launched,
    left_in,
    run_all,
    torchrun,
)
from tests.repeatable import part
from tests.unit.test_page_tables import document_in

FAILING = str(MODELS / "failing.py")
FILES_OF_RANK_0 = ("rank_0.txt", "rank_0.json")


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("failures"), "chimera", D=2, N=4)


def ours(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("train.py:")]


@pytest.mark.parametrize("phase", ["forward", "backward", "all-reduce"])
def test_a_rank_that_is_killed_ends_the_others_with_one_message(two_stages: Path, tmp_path: Path, phase: str) -> None:
    width = "3000" if phase == "all-reduce" else "4"
    file = tmp_path / "metrics.json"
    arguments = ("--model", FAILING, "--steps", "500", "--metrics", str(file))
    done = torchrun(two_stages, 2, *arguments, FAIL=f"kill-in-{phase}:1:6", WIDTH=width)
    assert done.returncode != 0
    assert 1 <= len(metrics(file)) <= 6, "those that were over are in the file"
    (message,) = ours(done)
    assert message.startswith("train.py: rank 0 (worker 0): wait ")
    assert "rank 1: the connection was closed" in message


def test_a_rank_that_is_killed_while_all_wait_for_the_last_losses_is_named(two_stages: Path) -> None:
    done = torchrun(two_stages, 2, "--model", FAILING, "--steps", "5", FAIL="kill-in-step:1:9")
    assert done.returncode != 0
    (message,) = ours(done)
    words = "wait for the losses and times of a step: rank 1: the connection was closed; it has died or ended"
    assert message == f"train.py: rank 0 (worker 0): {words}"


def test_a_rank_that_dies_while_the_other_computes_is_named_and_the_other_leaves_a_bundle(
    two_stages: Path, tmp_path: Path
) -> None:
    arguments = ("--model", FAILING, "--steps", "9", "--bundle", str(tmp_path / "bundle.zip"))
    done = torchrun(two_stages, 2, *arguments, FAIL="kill-while-the-other-computes:1:2")
    assert done.returncode != 0
    message, hint = ours(done)
    assert "rank 1: the connection was closed" in message
    assert hint == f"train.py: for a bug report there is {tmp_path / 'bundle.zip'}"
    with zipfile.ZipFile(tmp_path / "bundle.zip") as archive:
        assert {*archive.namelist()} == {"about.json", "schedule.sir", "program.json", "report.json", *FILES_OF_RANK_0}
        account = archive.read("rank_0.txt").decode()
    last, _, stacks = account.partition("the last lines that it wrote:")[2].partition("thread MainThread:")
    assert message in account
    assert "rank 1: the connection was closed" in last
    assert "train.py" in stacks


def test_the_rank_that_hangs_is_named_and_its_bundle_shows_where_the_others_waited_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for rank 1, and that for rank 2. torchrun kills what does not end, here sooner than after 30 s."""
    variables = {"FAIL": "stop-in-forward:2:2", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}
    four_stages, bundle = compiled(tmp_path, "dapple", D=4, N=4), tmp_path / "bug.zip"
    arguments = ("--model", FAILING, "--steps", "9", "--timeout", "12", "--bundle", str(bundle))
    done = torchrun(four_stages, 4, *arguments, **variables)
    assert done.returncode != 0
    message, _ = ours(done)
    neighbour = re.match(
        r"train\.py: rank [13] \(worker [13]\): wait \w+ [^:]*: rank 2: no answer within 12 s", message
    )
    assert neighbour is not None, message
    monkeypatch.setattr(sys, "argv", ["chimera-trace", str(bundle), "--json"])
    with pytest.raises(SystemExit) as end:
        trace_command.main()
    assert end.value.code is None
    stops = json.loads(capsys.readouterr().out)["ranks"]
    assert [stop["line"] for stop in stops] == [
        *("wait recv m0 s1->s0", "wait recv m0 s2->s1", None, "wait recv m0 s2->s3")
    ]
    assert [stop["update"] for stop in stops] == [2, 2, None, 2]
    assert [stop["seconds"] for stop in stops if stop["rank"] in (1, 3)] == [12, 12]
    assert stops[2]["message"].endswith("; ranks 1, 3 waited for it")
    assert len(document_in((tmp_path / "bug.view" / "trace.html").read_text())["trace"]["hang"]) == 4


def test_where_gloo_does_not_keep_the_time_a_rank_that_hangs_is_named_as_well(two_stages: Path) -> None:
    """By the monitor, before the backend says anything: here it would after 30 s."""
    variables = {"FAIL": "stop-in-forward:1:2", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}
    backend = ("--backend", "strict", "--backend-module", str(HERE / "strict.py"))
    done = torchrun(two_stages, 2, "--model", FAILING, "--steps", "9", "--timeout", "12", *backend, **variables)
    assert done.returncode != 0
    (message,) = ours(done)
    assert re.match(r"train\.py: rank 0 \(worker 0\): wait \w+ [^:]*: rank 1: no answer within 12 s", message)


def test_in_a_loop_of_ones_own_it_is_an_exception_where_the_backend_lets_go_of_what_it_waits_for(
    tmp_path: Path,
) -> None:
    program = compiled(tmp_path, "dapple", D=2, N=2)
    job = Job("late", HERE / "loops" / "late.py", (str(program),), model=None)
    outcome = run_all(tmp_path, 2, [job])["late"]
    outcome.assert_passed()
    lost, again = (line for line in outcome.said[0].splitlines() if not line.startswith("[Gloo]"))
    assert lost.startswith("rank 0 (worker 0): wait ")
    assert lost.endswith("rank 1: no answer within 8 s (timeout); it may be stuck, or slower than that")
    assert again == lost


def test_scripts_of_different_programs_are_one_message(two_stages: Path, tmp_path: Path) -> None:
    other = compiled(tmp_path, "chimera", D=2, N=2)
    mixed = Path(shutil.copytree(two_stages, tmp_path / "mixed"))
    shutil.copy(other / "rank_1.py", mixed)
    done = torchrun(mixed, 2, "--model", FAILING)
    assert done.returncode != 0
    (message,) = ours(done)
    assert message.startswith(f"train.py: {mixed / 'rank_1.py'} is of another program than program.json: compile again")


def test_ctrl_c_ends_cleanly_and_keeps_the_metrics(two_stages: Path, tmp_path: Path) -> None:
    file = tmp_path / "metrics.json"
    arguments = ("--model", FAILING, "--steps", "100000", "--metrics", str(file))
    status, said, _ = interrupted(two_stages, 2, *arguments, when=" 5/100000")
    assert status != 0
    assert said.count("train.py: interrupted") == 1
    assert "rank_0.py" not in said, "no traceback of ours"
    assert len(metrics(file)) >= 5
    assert not left_in(two_stages.parent)


MISTAKES = {
    "change-shape:0:2": "stage 0 returned for micro-batch 0: tensor 0 is (2, 4) torch.float32 and was (1, 4)",
    "build-returns-none": "build_stage(0, 2) returned None, not a torch.nn.Module",
    "returns-set": "stage 0 returned a set; return a tensor, or tensors in tuples, lists and dicts",
    "returns-sparse": "stage 0 returned a tensor of layout torch.sparse_coo, which is no message: return a dense one",
    "returns-elsewhere": "stage 0 returned a tensor on meta, and its rank computes on cpu: make what a forward makes",
    "loss-of-two": "loss returned a tensor of shape (2,); return the mean over the micro-batch",
    "few-items": "the dataset has 3 items and one update takes B*N*W = 1*4*1 = 4",
    "no-map": "the dataset, of type tuple_iterator, is none: a map-style one has __len__ and __getitem__",
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


SPECIAL = {
    "plain": "ValueError: went wrong",
    "exit": "SystemExit: 0",
    "interrupt": "KeyboardInterrupt",
    "unprintable": "Unprintable: (its message cannot be shown: __str__ raises an error)",
    "chained": "Custom: went wrong",
}

RAISING = {
    "import": ("importing the model file", "<module>", 2),
    "build_stage": ("build_stage(1, 2)", "build_stage", 2),
    "to": ("placing stage 1 on cpu", "_apply", 2),
    "dataset": ("dataset()", "dataset", 2),
    "__len__": ("the length of the dataset", "__len__", 2),
    "__getitem__": ("item ", "__getitem__", 2),
    "optimizer": ("optimizer(parameters)", "optimizer", 2),
    "step": ("the optimizer's step", "step", 1),
    "forward": ("the forward of stage 1", "forward", 1),
    "backward": ("the backward of stage 1", "backward", 1),
    "loss": ("the loss", "loss", 1),
}
"""Every function of the model file: what is said of an error in it, the function's name, and how the rank ends."""

OPERATION = {
    "step": "update 3, step s1",
    "forward": "micro-batch 1 of update 3, F m1 s1",
    "backward": "micro-batch 1 of update 3, B m1 s1",
    "loss": "micro-batch 1 of update 3, F m1 s1",
}
"""In which operation those are called that are called while training, in the calls of `LATER`."""

LATER = {"__getitem__": 12, "step": 3, "forward": 11, "backward": 11, "loss": 11}
"""The call in which those that are called while training raise theirs."""

ELSEWHERE = {
    "collate": ("default_collate of a micro-batch: RuntimeError: stack expects each tensor to be equal size", 2),
    "rate": ("optimizer(parameters): ", 2),
    "shape": ("the forward of stage 0: ", 1),
}
"""Errors that torch raises in what it is given by the model file."""


def test_an_error_in_any_function_of_the_model_file_is_told_with_the_users_traceback(tmp_path: Path) -> None:
    """On one rank of two: once, with the rank; the other one ends as well."""
    directory = compiled(tmp_path, "dapple", D=2, N=4)
    special = [(where, list(SPECIAL)[1 + number % 4], 1) for number, where in enumerate(RAISING)]
    cases = [*((where, "plain", LATER.get(where, 1)) for where in RAISING), *part(special, 3)]
    arguments = ("--steps", "9", "--micro-batch-size", "2")
    listed = [
        Job(f"{where}-{kind}", directory, arguments, "raising.py", {"RAISE": f"{where}:{kind}:{call}:1"})
        for where, kind, call in cases
    ]
    outcomes = run_all(tmp_path, 2, listed)
    for job, (where, kind, _) in zip(listed, cases, strict=True):
        outcome = outcomes[job.name]
        doing, function, status = RAISING[where]
        said = "".join(outcome.said)
        assert said.count("train.py:") == 1, f"{job.name}: {said}"
        (headline,) = (line for line in said.splitlines() if line.startswith("train.py:"))
        known = f"{doing} ({OPERATION[where]}): " if kind == "plain" and where in OPERATION else doing
        assert headline.startswith(f"train.py: rank 1 (worker 1): {known}"), headline
        assert headline.endswith(f"raising.py:{line_of(kind)} in reach: {SPECIAL[kind]}"), headline
        assert said.count("Traceback") == (2 if kind == "chained" else 1), said
        assert f"in {function}\n    reach(" in said, said
        assert "chimera_runtime/" not in said, f"{job.name}: frames of ours: {said}"
        assert outcome.statuses[1] == str(status), f"{job.name}: {outcome.statuses}"
        assert outcome.statuses[0] != "0", f"{job.name}: {outcome.statuses}"


def line_of(kind: str) -> int:
    """Where raising.py raises an error of a kind."""
    raises = {"exit": "SystemExit(0)", "interrupt": "KeyboardInterrupt", "unprintable": "Unprintable"}
    wanted = raises.get(kind, 'Custom("went' if kind == "chained" else 'ValueError("went')
    lines = (MODELS / "raising.py").read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.strip().startswith(f"raise {wanted}"))
    return number


def test_errors_of_torch_in_what_the_model_file_gives_it_are_the_model_files(two_stages: Path, tmp_path: Path) -> None:
    arguments = ("--steps", "9", "--micro-batch-size", "2")
    listed = [Job(name, two_stages, arguments, "raising.py", {"RAISE": f"{name}:plain:1:0"}) for name in ELSEWHERE]
    for name, outcome in run_all(tmp_path, 2, listed).items():
        words, status = ELSEWHERE[name]
        said = "".join(outcome.said)
        assert words in said, f"{name}: {said}"
        assert said.count("train.py:") == 1, said
        assert "fault of the generated program" not in said
        assert str(status) in outcome.statuses
        assert "0" not in outcome.statuses


def metrics(path: Path) -> list[float]:
    """The losses in a file of metrics, which is whole."""
    numbers = json.loads(path.read_text())
    assert list(numbers) == ["loss", "step_seconds", "cpu_seconds"]
    assert len({len(column) for column in numbers.values()}) == 1
    losses: list[float] = numbers["loss"]
    return losses


def test_metrics_that_cannot_be_written_at_the_end_are_a_message_after_training(
    two_stages: Path, tmp_path: Path
) -> None:
    """Their directory goes away while the ranks train: these train on, and rank 0 says so at the end."""
    gone = tmp_path / "gone"
    gone.mkdir()
    arguments = ("--steps", "9", "--metrics", str(gone / "metrics.json"))
    environment = {"RAISE": "step:remove:9:1", "GONE": str(gone)}
    (outcome,) = run_all(tmp_path, 2, [Job("gone", two_stages, arguments, "raising.py", environment)]).values()
    status, other = outcome.statuses
    assert (status, other) in (("2", "0"), ("2", "143")), "torchrun ends the other rank if it is not through yet"
    assert "step 9/9" in outcome.said[0]
    assert outcome.said[0].splitlines()[-1].startswith(f"train.py: --metrics {gone}/metrics.json: No such file")


WITHOUT = {
    "2>&-": "import os, sys; os.close(2); sys.stderr = None",
    ">&- 2>&-": "import os, sys; os.close(1); os.close(2); sys.stdout = sys.stderr = None",
    ">/dev/full 2>&1": "import os; full = os.open('/dev/full', os.O_WRONLY); os.dup2(full, 1); os.dup2(full, 2)",
    "> >(true)": "import os; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)",
}
"""Lines with the effect of a redirection on a Python that runs."""


@pytest.mark.parametrize(
    ("redirected", "steps", "status", "updates"),
    [
        ("2>&-", "none", 2, None),
        (">/dev/full 2>&1", "none", 2, None),
        (">/dev/full", "3", 2, 3),
        (">&- 2>&-", "3", 2, 3),
        ("> >(true)", "3", 0, 3),
    ],
)
def test_a_rank_trains_on_without_standard_streams_and_ends_with_its_status(
    tmp_path: Path, redirected: str, steps: str, status: int, updates: int | None
) -> None:
    """It alone is all ranks of the job. Once it is an interpreter of its own, which flushes at its end."""
    directory, file = compiled(tmp_path, "dapple", D=1, N=1), tmp_path / "metrics.json"
    words = (str(directory / "train.py"), "--model", FAILING, "--steps", steps, "--metrics", str(file))
    variables = environment() | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if redirected in WITHOUT:
        program = ("-c", f"{WITHOUT[redirected]}\n{SCRIPT}", *words)
        done = forkserver.run(program, variables, tmp_path, PATIENCE)
    else:
        command = ["bash", "-c", f'exec "$@" {redirected}', "bash", sys.executable, *words]
        done = subprocess.run(command, env=variables, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == status
    assert updates is None or len(metrics(file)) == updates


def test_a_world_of_the_wrong_size_is_one_clear_message(two_stages: Path) -> None:
    done = torchrun(two_stages, 3, "--model", FAILING)
    assert done.returncode != 0
    (message,) = ours(done)
    assert "runs on 2 workers and there are 3 ranks" in message
    assert "--nproc-per-node=2 or 4" in message


def test_a_rank_that_has_lost_another_in_a_sum_can_end(two_stages: Path) -> None:
    """Ranks end as interpreters do, as only that destroys communicators."""
    loop = shutil.copy(HERE / "loops" / "stuck.py", two_stages.parent / "train.py")
    done = launched(Path(loop).parent, 2, (), (str(two_stages),), {"PYTHONPATH": str(two_stages)})
    assert done.returncode == 1
    assert "PeerLost: rank 1 (worker 1): wait for the norm of the gradients" in done.stderr
