"""A rank from its command line to its end, alone: one worker that holds both stages, started as torchrun starts it."""

import json
import os
import subprocess
import zipfile
from dataclasses import asdict
from inspect import getsource
from pathlib import Path

import pytest
import torch.distributed as dist
from jinja2 import Environment

from chimera_ir.ir.levels import Header
from chimera_runtime.blame import ModelError
from chimera_runtime.errors import FAILED, MISUSED, OUR_FAULT, Misuse
from chimera_runtime.program.compiled_program import INTERFACE
from chimera_runtime.program.rank_facts import VALUES
from chimera_runtime.tools.launch import register_backend
from tests import forkserver
from tests.patience import PATIENCE
from tests.programs import free_port
from tests.unit.runtime.models import facts, sequential
from tests.unit.runtime.thread_ranks import alone_job

ROOT = Path(__file__).resolve().parents[4]

TRAIN = """
import importlib.util, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])  # as for any script, where it lies
path = Path(sys.argv.pop(1), "train.py")
spec = importlib.util.spec_from_file_location("__main__", path)
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""

TEMPLATE = Environment(keep_trailing_newline=True).from_string((ROOT / "templates" / "train.py.j2").read_text())
"""The loop itself, as it is written into every directory."""

SCRIPT = f"""
INTERFACE = {INTERFACE}
PROGRAM = "ours"

{getsource(sequential).replace("sequential(lane: Lane)", "update(lane)")}
"""

MODEL = """
import torch
import train  # beside the model
from rank_0 import MINE  # elsewhere on the path
from torch import nn

def build_stage(stage, num_stages):
    return nn.Linear(2, 2 - stage)

def loss(output, target):
    return (output - target).square().mean()

def dataset():
    return [(torch.ones(2) * i, torch.ones(1)) for i in range(8)]

def optimizer(parameters, args):
    return torch.optim.SGD(parameters, lr=0.01)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Compiles a program, and writes a model with modules of names that lie there too."""
    compiled = tmp_path / "compiled"
    compiled.mkdir()
    rank = asdict(facts(0, 1, kept=()))
    for stage in rank["stages"].values():
        stage |= {VALUES[letter].slots: sizes for letter, sizes in stage.pop("slots").items()}
        stage["sending"] = [*stage["sending"].values()]
    program = {"interface": INTERFACE, **asdict(alone_job()), "ranks": [rank]}
    (compiled / "program.json").write_text(json.dumps(program))
    (compiled / "rank_0.py").write_text(SCRIPT)
    (compiled / "schedule.sir").write_text("a program\n")
    header = Header("alone", (), 1, 1, 1, ())
    (compiled / "train.py").write_text(TEMPLATE.render(header=header, workers="1 worker", digest="ours"))
    (tmp_path / "elsewhere").mkdir()
    for name, text in (("model", MODEL), ("train", ""), ("elsewhere/rank_0", "MINE = 1")):
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def started(directory: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    plain = {name: value for name, value in os.environ.items() if name not in ranks}
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(directory / "elsewhere")]), "OMP_NUM_THREADS": "1"}
    words = ("-c", TRAIN, str(directory / "compiled"), "--model", str(directory / "model.py"), *options)
    return forkserver.run(words, plain | paths | (environment or ranks), directory, PATIENCE)


def test_a_run_is_checked_measured_recorded_and_trained(directory: Path) -> None:
    """Uses every option."""
    options = ("--check", "--steps=3", "--metrics=m.json", "--trace=trace", "--memory-limit=1GiB")
    done = started(directory, *options)
    assert (done.returncode, done.stderr) == (0, "")
    memory, announced, verdict, *rest = done.stdout.splitlines()
    assert memory.startswith("memory: of 1 GiB, rank 0 (worker 0) needs ")
    assert announced == "checking 3 updates against training in one process .."
    assert verdict == "check: passed"
    steps = [line.split()[:3] for line in rest if line.startswith("step")]
    assert steps == [["step", f"{number}/3", "loss"] for number in (1, 2, 3)]
    losses = json.loads((directory / "m.json").read_text())["loss"]
    assert [f"{loss:.6f}" for loss in losses] == [line.split()[3] for line in rest if line.startswith("step")]
    end = json.loads((directory / "trace" / "rank_0.jsonl").read_text().splitlines()[-1])
    assert end["ended"] is None


def test_a_program_that_was_replaced_since_it_was_compiled_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHIMERA_PROGRAM", "theirs")
    done = started(directory)
    assert done.returncode == MISUSED
    assert "since this run compiled: give each run its --out" in done.stderr


def test_a_run_that_fails_leaves_a_bundle_for_a_bug_report(directory: Path) -> None:
    (directory / "compiled" / "rank_0.py").write_text(SCRIPT + "    lane.no_such_thing")
    (directory / "compiled" / "report.json").write_text("{}")
    assert "; to report it, start again with --bundle FILE\n" in started(directory).stderr
    done = started(directory, "--steps=2", "--bundle=b.zip", "--", "--password", "swordfish")
    assert done.returncode == OUR_FAULT
    assert done.stderr.endswith("train.py: for a bug report there is b.zip\n")
    with zipfile.ZipFile(directory / "b.zip") as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert {*texts} == {"about.json", "program.json", "report.json", "schedule.sir", "rank_0.txt", "rank_0.json"}
    assert "no_such_thing" in texts["rank_0.txt"].partition("at its end:")[2]
    assert "--steps=2" in texts["about.json"]
    assert not any("swordfish" in text for text in texts.values())


def test_without_torchrun_a_rank_says_how_to_start(directory: Path) -> None:
    done = started(directory, NOTHING="")
    assert done.returncode == MISUSED
    assert done.stderr.startswith("train.py: start the program with torchrun, as in: torchrun --nproc-per-node")


SPOILED = {
    "wrong option": (("--steps=0",), {}, MISUSED, "train.py: argument --steps: '0' is not a positive whole number"),
    "other program": ((), {"rank_0.py": SCRIPT.replace("ours", "theirs")}, MISUSED, "rank_0.py is of another program"),
    "small dataset": ((), {"../model.py": MODEL.replace("range(8)", "range(1)")}, MISUSED, "the dataset has 1 item"),
    "our fault": ((), {"rank_0.py": SCRIPT + "    lane.no_such_thing"}, OUR_FAULT, "a fault of the generated program"),
    "failing loss": ((), {"../model.py": MODEL.replace("square()", "squares()")}, FAILED, "the loss: "),
}


@pytest.mark.parametrize(("options", "files", "status", "words"), SPOILED.values(), ids=SPOILED)
def test_whatever_goes_wrong_is_one_message_and_a_status(
    directory: Path, options: tuple[str, ...], files: dict[str, str], status: int, words: str
) -> None:
    for name, text in files.items():
        (directory / "compiled" / name).write_text(text)
    done = started(directory, *options)
    assert done.returncode == status
    assert done.stderr.startswith("train.py: ")
    assert words in done.stderr
    assert ("Traceback" in done.stderr) == (status in (OUR_FAULT, FAILED))


# ``--backend`` and ``--backend-module``: mistakes are one message each.

MADE = """
import torch.distributed as dist

dist.Backend.register_backend("made_up", lambda *_: None, devices=["cpu"])
"""


def module(folder: Path, text: str) -> Path:
    file = folder / "made.py"
    file.write_text(text)
    return file


def test_a_file_registers_a_backend(tmp_path: Path) -> None:
    assert "made_up" not in dist.Backend.backend_list
    register_backend("made_up", module(tmp_path, MADE))
    assert "made_up" in dist.Backend.backend_list
    assert dist.Backend.backend_capability["made_up"] == ["cpu"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.py", None, "absent.py: there is no such file"),
        ("made.txt", "", r"not a Python file \(its name must end in .py\)"),
        ("made.py", "", "registers no backend of that name; it has to call torch.distributed.Backend.register_backend"),
    ],
)
def test_a_file_that_registers_none_is_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(Misuse, match=message):
        register_backend("nowhere", file)


def test_a_file_that_fails_is_blamed(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        register_backend("nowhere", module(tmp_path, "raise ValueError('not today')"))
    assert caught.value.status == MISUSED
    assert isinstance(caught.value.__cause__, ValueError)
