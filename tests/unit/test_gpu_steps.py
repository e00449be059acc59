"""The steps of `make gpu`: how a command is judged, ended and reported, and which steps a machine gets."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gpu import __main__ as program
from tests.gpu import report
from tests.gpu.commands import CommandEnd, CommandLine, run
from tests.gpu.ladder import FAILURES, steps
from tests.gpu.machine import RANKS_OF_ONE_DEVICE, ground
from tests.gpu.steps import Finding, Trial, Verdict, attempt, ends_with_one_message, succeeds
from tests.sizes import chains

CPU = ground(2, None, pretended=True)


def python(text: str) -> CommandLine:
    return CommandLine((sys.executable, "-c", text))


def ended(status: int | None, said: str = "") -> CommandEnd:
    return CommandEnd(status, said, 0.0, 0)


# Commands.


def test_a_command_tells_its_status_and_what_it_said() -> None:
    end = run(python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"), 60)
    assert (end.status, sorted(end.said.split()), end.left) == (3, ["err", "out"], 0)


@pytest.mark.full
def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started() -> None:
    """Its child has a session of its own, as ranks of torchrun have."""
    asleep = "import time; time.sleep(600)"
    child = f"subprocess.Popen([sys.executable, '-c', {asleep!r}], start_new_session=True)"
    end = run(python(f"import subprocess, sys\nprint({child}.pid, flush=True)\n{asleep}"), 6)
    assert end.status is None
    assert end.left == 2
    assert has_ended(int(end.said))
    assert end.seconds < 60


def has_ended(number: int, seconds: float = 10) -> bool:
    """Whether a process ends within some time; one that nobody has asked about is a zombie."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_step_that_hangs_fails_and_says_so() -> None:
    finding = attempt(Trial("slow", python("import time; time.sleep(600)"), succeeds("")), 0.5)
    assert finding.verdict is Verdict.FAILED
    assert finding.why == "hangs: ended after 0.5 s"


def test_a_command_line_reads_back_as_a_shell_takes_it() -> None:
    command = CommandLine((sys.executable, "-c", "import os; print(os.environ['WHAT'])"), {"WHAT": "two words"})
    done = subprocess.run(["bash", "-c", command.text], capture_output=True, text=True, check=True)
    assert done.stdout == run(command, 60).said == "two words\n"


# Verdicts.


def test_a_program_has_to_end_well_and_to_say_what_is_wanted() -> None:
    judge = succeeds("check: passed")
    assert judge(ended(0, "check: passed\n")) == ""
    assert judge(ended(1, "check: passed\n")) == "ended with 1"
    assert judge(ended(0, "nothing")) == "ended with 0 and said nothing like 'check: passed'"


@pytest.mark.parametrize(
    ("status", "said", "wrong"),
    [
        (1, "noise\ntrain.py: rank 0: wait recv m0 s0->s1: rank 1: it has died\n", ""),
        (0, "train.py: rank 1: it has died\n", "ended with 0, though a rank had failed"),
        (1, "Traceback\n", "said 0 messages, not one"),
        (1, "train.py: rank 1\ntrain.py: rank 1\n", "said 2 messages, not one"),
        (1, "train.py: rank 10 is gone\n", "said nothing like"),
    ],
)
def test_where_a_rank_fails_the_others_end_with_one_message(status: int, said: str, wrong: str) -> None:
    _, _, needed = FAILURES[0]
    found = ends_with_one_message(needed)(ended(status, said))
    assert found.startswith(wrong)
    assert bool(found) == bool(wrong)


def test_a_hang_is_told_from_another_failure() -> None:
    _, _, needed = FAILURES[1]
    judge = ends_with_one_message(needed)
    assert not judge(ended(1, "train.py: rank 0: wait recv: rank 1: no answer within 20 s (timeout); it may be\n"))
    assert judge(ended(1, "train.py: rank 0: wait recv: rank 1: the connection was closed\n"))


# Which steps there are.


def test_one_device_is_shared_and_of_several_each_has_a_rank() -> None:
    alone, several = ground(1, None, pretended=False), ground(8, None, pretended=False)
    assert alone.ranks == RANKS_OF_ONE_DEVICE
    assert alone.options == ("--backend", "gloo", "--device", "cuda")
    assert (several.ranks, several.options) == (8, ("--backend", "nccl"))
    assert ground(4, "strict", pretended=True).options[:2] == ("--backend", "strict")


def test_every_scheme_is_tried_at_every_size_that_fits_with_all_devices(tmp_path: Path) -> None:
    names = [name for name, _ in steps(ground(8, None, pretended=False), tmp_path)]
    assert len(set(names)) == len(names)
    for scheme in chains():
        assert [f"{scheme} on {d} workers, W = {8 // d}" for d in (2, 4, 8)] == [
            name for name in names if name.startswith(f"{scheme} on")
        ]
    assert not any("on 4 workers" in name for name, _ in steps(ground(2, None, pretended=False), tmp_path))


def test_a_step_has_a_program_and_starts_a_rank_for_each_device(tmp_path: Path) -> None:
    made = dict(steps(ground(4, None, pretended=False), tmp_path))["dapple on 2 workers, W = 2"]("dapple")
    assert "--nproc-per-node=4" in made.command.words
    assert made.command.words[-2:] == ("--backend", "nccl")
    (program_file,) = (word for word in made.command.words if word.endswith("train.py"))
    assert Path(program_file).exists()
    assert made.prepared == f"chimera compile dapple --set D=2 --set N=8 --out {Path(program_file).parent}"


def test_what_says_nothing_of_a_machine_is_skipped_with_the_reason(tmp_path: Path) -> None:
    name, made = list(steps(ground(1, None, pretended=False), tmp_path))[-1]
    finding = attempt(made(name), 60)
    assert (finding.verdict, finding.why[:30]) == (Verdict.SKIPPED, "ranks that share a device wait")


# The report and the status.


def test_the_report_has_commands_and_the_end_of_what_a_failed_step_said() -> None:
    good = Finding(Trial("good", CommandLine(("true",)), succeeds("")), Verdict.PASSED, "", 1.0, "hidden")
    said = "\n".join(f"line {number}" for number in range(99))
    bad = Finding(Trial("bad", CommandLine(("false",)), succeeds(""), "prepare"), Verdict.FAILED, "a|b", 2.0, said)
    text = report.text(CPU, [("torch", "2")], [good, bad])
    assert "1 passed, 1 failed, 0 skipped." in text
    assert "| bad | failed | 2.0 | a\\|b |" in text
    assert "    prepare\n    false\n" in text
    assert "line 98" in text
    assert "line 0\n" not in text
    assert "hidden" not in text


@pytest.mark.parametrize(("code", "status"), [("print('well')", 0), ("raise SystemExit(4)", 1)])
def test_a_step_that_fails_makes_the_status_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, status: int
) -> None:
    def sample(*_: object) -> list[object]:
        return [("step", lambda name: Trial(name, python(code), succeeds("well")))]

    monkeypatch.setattr(program, "steps", sample)
    file = tmp_path / "report.md"
    assert program.main(["--pretend", "2", "--report", str(file)]) == status
    assert f"| step | {'failed' if status else 'passed'} |" in file.read_text()


def test_a_pattern_without_a_step_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--pretend", "2", "--only", "nothing", "--report", str(tmp_path / "report.md")]) == 2
    assert capsys.readouterr().err == "--only nothing: no step has such a name\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_what_can_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([]) == 2
    assert "no GPU that torch can use: --pretend 4" in capsys.readouterr().err
