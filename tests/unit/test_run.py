"""``chimera run`` up to the moment in which it becomes torchrun; tests/e2e/test_run.py goes on from there."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from torch.distributed.run import parse_args

from chimera_ir.commands import common, group
from chimera_ir.commands.common import WRONG_COMMAND, WRONG_TEXT
from chimera_ir.commands.run_command import run_command
from chimera_runtime.tools.command import options
from tests.patience import PATIENCE
from tests.unit.command import Ended, contents
from tests.unit.conftest import calling

TORCHRUN = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
MODEL = ("--model", "model.py")
COMPLETE = """
from elsewhere import layers, loss
optimizer = None
if True:
    def dataset(): ...
"""

Chimera = Callable[..., Ended]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that this process would have become."""
    lines: list[list[str]] = []

    def execute(path: str, words: list[str], environment: dict[str, str]) -> None:
        assert path == words[0]
        script = next(word for word in words if word.endswith("train.py"))
        assert environment["CHIMERA_PROGRAM"] in Path(script).read_text()
        lines.append(words)
        sys.exit(7)

    monkeypatch.setattr(os, "execve", execute)
    return lines


@pytest.fixture
def chimera(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Chimera:
    """Calls ``chimera`` in a directory with a model file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(COMPLETE)
    return calling(lambda: group.main(group.NAME), group.NAME, capsys, monkeypatch)


def test_it_becomes_torchrun_with_a_rank_for_each_worker_of_each_copy(
    chimera: Chimera, started: list[list[str]]
) -> None:
    ended = chimera("run", "chimera", "--set", "D=6", *MODEL)
    assert (ended.status, ended.err) == (7, "")
    chimera("run", "chimera", *MODEL, "--copies", "3", "--out", "o")
    assert started == [
        [*TORCHRUN, "--nproc-per-node=6", "chimera.out/train.py", "--model=model.py"],
        [*TORCHRUN, "--nproc-per-node=12", "o/train.py", "--model=model.py"],
    ]


@pytest.mark.parametrize(("given", "threads"), [(None, "1"), ("3", "3")])
def test_each_of_several_ranks_has_one_thread_unless_the_user_says_otherwise(
    chimera: Chimera, monkeypatch: pytest.MonkeyPatch, given: str | None, threads: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    environments: list[dict[str, str]] = []

    def execute(path: str, words: list[str], environment: dict[str, str]) -> None:
        environments.append(environment)
        sys.exit(7)

    monkeypatch.setattr(os, "execve", execute)
    chimera("run", "chimera", *MODEL)
    assert [environment["OMP_NUM_THREADS"] for environment in environments] == [threads]


def test_it_compiles_as_compile_does_and_says_what_it_starts(
    chimera: Chimera, started: list[list[str]], tmp_path: Path
) -> None:
    words = ("gems", "--set", "N=6", "--cost", "B=3", "--recompute", "--sync", "lazy")
    compiled, run = chimera("compile", *words, "--out", "compiled"), chimera("run", *words, *MODEL, "--out", "a b")
    assert contents(tmp_path / "a b") == contents(tmp_path / "compiled")
    report = compiled.out.partition("wrote ")[0]
    assert run.out == (
        f"{report}wrote a b, running\n  torchrun --standalone --nproc-per-node=4 'a b/train.py' --model=model.py\n"
    )
    assert len(started) == 1


def test_train_py_gets_its_options_as_they_were_given(chimera: Chimera, started: list[list[str]]) -> None:
    given = {"steps": "3", "micro-batch-size": "2", "seed": "0", "metrics": "-m.json", "trace": "t", "timeout": "2.5"}
    given |= {"memory-limit": "16GiB", "backend": "nccl", "device": "cuda", "layout": "replica", "model": "model.py"}
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    chimera("run", "gpipe", *words, "--check")
    said = [word for word in started[0] if word.startswith("--")][2:]
    assert {*said} == {f"--{name}={value}" for name, value in given.items()} | {"--check"}
    parsed = options.parse(said)
    assert (parsed.steps, parsed.seed, parsed.metrics, parsed.check) == (3, 0, Path("-m.json"), True)
    for mode in (["--check-only"], ["--rehearse", "F=0.5,B=1"]):
        chimera("run", "gpipe", *MODEL, *mode)
        assert options.parse(started[-1][7:])


def test_it_compiles_for_the_communicators_that_train_py_gets(
    chimera: Chimera, started: list[list[str]], tmp_path: Path
) -> None:
    chimera("run", "dapple", *MODEL, "--backend", "nccl", "--communicators", "pair")
    assert json.loads((tmp_path / "dapple.out" / "program.json").read_text())["communicators"][:2] == [
        "directed",
        "pair",
    ]
    assert options.parse(started[0][7:]).communicators == "pair"
    chimera("run", "dapple", *MODEL)
    assert json.loads((tmp_path / "dapple.out" / "program.json").read_text())["communicators"] == ["directed"]
    assert options.parse(started[1][7:]).communicators is None


def test_keep_is_of_checkpoints_and_with_a_stage_of_what_it_keeps(
    chimera: Chimera, started: list[list[str]], tmp_path: Path
) -> None:
    chimera("run", "two_encoders", *MODEL, "--keep", "2", "--keep", "image=1/4", "--save", "there")
    assert options.parse(started[0][7:]).keep == 2
    assert "keep" in chimera("compile", "two_encoders", "--keep", "image=1/4", "--emit", "schedule").out
    shares = json.loads((tmp_path / "two_encoders.out" / "report.json").read_text())["activations"]
    assert shares == [1.25, 1.0, 4, 3, 2, 1]


def test_what_follows_two_dashes_is_the_model_files(chimera: Chimera, started: list[list[str]]) -> None:
    given = ["--steps", "3", "--", "a b", "-h"]
    ended = chimera("run", "gpipe", *MODEL, "--steps", "2", "--", *given)
    assert ended.out.endswith("gpipe.out/train.py --model=model.py --steps=2 -- --steps 3 -- 'a b' -h\n")
    handed_on = parse_args(started[0][4:]).training_script_args
    parsed = options.parse(handed_on)
    assert (parsed.steps, parsed.args) == (2, given)
    chimera("run", "gpipe", *MODEL, "--")
    assert started[1][7:] == ["--model=model.py"]


def test_it_takes_every_option_of_train_py_with_the_same_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["--help"])
    trains_with = capsys.readouterr().out
    own = {parameter.name: parameter for parameter in run_command.params}
    compiling = "set cost recompute offload slice_lengths stage_costs sync out max_operations library tied copies"
    for name in (*compiling.split(), "quiet", "version"):
        own.pop({"set": "settings", "cost": "costs"}.get(name, name))
    visible = [option for option in own.values() if isinstance(option, click.Option) and not option.hidden]
    usage = trains_with.split("\n\n")[0]
    assert {option.opts[0] for option in visible} == {
        word.strip("[]|()") for word in usage.split() if word.strip("[(").startswith("--")
    }
    for option in visible:
        if isinstance(option.type, click.Choice):
            assert f"{option.opts[0]} {{{','.join(option.type.choices)}}}" in usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing argument 'SCHEME'"),
        (("gems",), "required: --model, or --hf and --text"),
        (("gems", "--model", "nowhere.py"), "nowhere.py"),
        (("gems", "--model", "."), "is a directory"),
        (("gems", *MODEL, "--steps", "0"), "--steps"),
        (("gems", *MODEL, "--timeout", "0"), "--timeout"),
        (("gems", *MODEL, "--timeout", "inf"), "argument --timeout: 'inf' is not a positive number of seconds"),
        (("gems", *MODEL, "--copies", "0"), "--copies"),
        (("gems", *MODEL, "--keep", "three"), "argument --keep: "),
        (("gems", *MODEL, "--keep", "7=1/4"), "--keep 7=1/4: gems(D=4, N=4) has the stages 0 to 3"),
        (("gems", *MODEL, "--keep", "profile"), "--keep profile: run reads no profile; chimera compile with --emit"),
        (("gems", *MODEL, "--emit", "report"), "No such option"),
        (("gems", *MODEL, "--step", "3"), "--step"),
        (("gems", *MODEL, "more"), "unexpected word 'more'"),
        ((*MODEL, "--", "gems"), "Missing argument 'SCHEME'"),
        (("gems", *MODEL, "--check", "--check-only"), "--check-only: not allowed with argument --check"),
        (("gems", *MODEL, "--split", "a,b"), "--split: 'a,b' does not list the first layer of each stage"),
        (("gems", *MODEL, "--save-every", "3"), "--save-every says when: give --save DIR to say where"),
        (("gems", *MODEL, "--check-only", "--trace", "t"), "give --check instead"),
        (("gems", *MODEL, "--nnodes", "2"), "--nnodes: run starts every rank on this machine"),
        (("gems", *MODEL, "--rdzv-endpoint=a:1"), "start torchrun there"),
        (("nosuch", *MODEL), "no library scheme is called 'nosuch'"),
        (("gems", *MODEL, "--set", "X=1"), "no parameter X"),
        (("gems", *MODEL, "--out", "model.py"), "not a directory"),
        (("pipedream", *MODEL, "--clip-norm", "1"), "--clip-norm: pipedream(D=4) has no flush"),
        (("chimera_halving", *MODEL), "--micro-batch-size 1: chimera_halving(D=4, N=8) cuts every micro-batch into 2"),
        (("zb_h1", *MODEL, "--rehearse", "F=0.1,B=0.2"), "--rehearse lacks I and W: zb_h1(D=4, N=8)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_nothing_is_written_or_started_where_the_command_line_is_wrong(
    chimera: Chimera, started: list[list[str]], tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    chimera("run", *arguments).assert_refused(WRONG_COMMAND, words)
    assert started == []
    assert [*contents(tmp_path)] == ["model.py"]


def test_a_scheme_that_is_rejected_starts_nothing(chimera: Chimera, started: list[list[str]]) -> None:
    chimera("run", "chimera", "--set", "D=3", *MODEL).assert_refused(WRONG_TEXT, "must split evenly")
    assert started == []


def test_without_torch_nothing_is_compiled_and_the_extra_is_named(
    chimera: Chimera, started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(common, "find_spec", lambda name: None if name == "torch" else find(name))
    chimera("run", "gems", *MODEL).assert_refused(
        WRONG_COMMAND, "training needs torch", "pip install 'chimera_ir[train]'"
    )
    assert started == []
    assert [*contents(tmp_path)] == ["model.py"]


def test_an_interpreter_that_cannot_be_started_is_named(chimera: Chimera, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    ended = chimera("run", "gems", *MODEL)
    assert ended.status == WRONG_COMMAND
    assert ended.err == "Error: /nowhere/python: No such file or directory\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_nothing_is_started_where_nothing_can_be_printed(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(COMPLETE)
    program = "import os; from chimera_ir.start import chimera\nos.execve = lambda *_: os._exit(7)\nchimera()"
    command = [sys.executable, "-c", program, "run", "gems", *MODEL]
    for target, status in (("/dev/full", WRONG_COMMAND), (os.devnull, 7)):
        with Path(target).open("w") as output:
            done = subprocess.run(
                command, cwd=tmp_path, stdout=output, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False
            )
        assert done.returncode == status
        assert ("standard output: " in done.stderr) == (status == WRONG_COMMAND)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def loss(output, target)\n    pass\n", "model.py:1: SyntaxError: expected ':'\n  def loss(output, target)\n"),
        (COMPLETE.replace("dataset", "data"), "model.py lacks the function dataset() -> torch.utils.data.Dataset"),
    ],
)
def test_a_model_file_whose_text_is_wrong_is_refused_before_anything_is_written(
    chimera: Chimera, started: list[list[str]], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "model.py").write_text(text)
    ended = chimera("run", "chimera", *MODEL)
    assert ended.status == WRONG_TEXT
    assert message in ended.err
    assert started == []
    assert not (tmp_path / "chimera.out").exists()
