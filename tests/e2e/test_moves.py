"""Moves to the host at run time: programs with them train as one process does; checkpoints have none of it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from chimera_ir.commands.trace_command import trace_command
from tests.e2e.ranks import Job, Outcome, compiled, run_all
from tests.e2e.test_strict import STRICT

PIPE = """pipe {name} {{
  stages s in 0..2 on {on}
  micros m in {micros}
  {more}F(m, s) @ {late}3*m + s
  offload(m, s) @ {late}3*m + s + 1{when}
  reload(m, s) @ {late}3*m + 3{when}
{backward}
}}
"""
WHOLE = "  B(m, s) @ {late}3*m + 4 - s"
HALVES = """  I(m, s) @ {late}3*m + 4 - s
  W(m, s) @ {late}3*m + 5"""
OPERANDS = """  I(m, s) @ {late}3*m + 4 - s
  offload_operands(m, s) @ {late}3*m + 20 - s
  reload_operands(m, s) @ {late}3*m + 40
  W(m, s) @ {late}3*m + 41"""


def pipe(name: str, on: str, micros: str, backward: str = WHOLE, late: str = "", more: str = "", when: str = "") -> str:
    of_backward = backward.format(late=late)
    return PIPE.format(name=name, on=on, micros=micros, backward=of_backward, late=late, more=more, when=when)


DOWN, EARLY = pipe("down", "s", "0..4"), pipe("down", "s", "0..2", HALVES)
UP = pipe("up", "1 - s", "2..4", OPERANDS, late="1000 + ")
AGAIN = pipe("down", "s", "0..4", more="recompute when s == 1\n  ", when=" when s == 0")
STREAM = pipe("down", "s", "0..", more="reads version max(0, m/2 - 1)\n  ")
SCHEMES = {
    "down": f"scheme down(D = 2, N = 4)\n{DOWN}",
    "both": f"scheme both(D = 2, N = 4)\n{EARLY}{UP}",
    "again": f"scheme again(D = 2, N = 4)\n{AGAIN}",
    "heavy": """scheme heavy(D = 2, N = 6)
pipe down {
  stages s in 0..D on s
  micros m in 0..N
  F(m, s) @ m + s
  offload(m, s) @ m + s + 1
  reload(m, s) @ 100 + 2*m - s
  B(m, s) @ 101 + 2*m - s
}
""",
    "stream": f"scheme stream(D = 2, N = 2)\nupdate every N\n{STREAM}",
}
TRAINING = ("--micro-batch-size", "8", "--steps", "4")
MIB = 2**20
FULL = ("--peak-memory", "--memory-limit", "1GiB")


def jobs(folder: Path) -> Iterator[Job]:
    for name, text in SCHEMES.items():
        (folder / f"{name}.chim").write_text(text)
        (folder / f"{name}_stays.chim").write_text(re.sub(r"^  (offload|reload).*\n", "", text, flags=re.M))
    programs = {name: compiled(folder, str(folder / f"{name}.chim")) for name in SCHEMES}
    stays = compiled(folder, str(folder / "both_stays.chim"))
    saved = str(folder / "saved")
    traced = ("--trace", str(folder / "trace"))
    for name, options in (("down", (*FULL, *traced)), ("both", ()), ("again", ("--autocast", "bf16")), ("stream", ())):
        yield Job(name, programs[name], (*TRAINING, "--check", *options))
    for name in ("heavy", "heavy_stays"):
        directory = compiled(folder, str(folder / f"{name}.chim"))
        yield Job(name, directory, (*TRAINING, "--peak-memory"), "heavy.py", {"MALLOC_MMAP_THRESHOLD_": f"{2**20}"})
    yield Job("tied", compiled(folder, str(folder / "both.chim"), ("first,last",)), ("--check-only",), "tied.py")
    strict = {"STRICT_DELAY": "0.003", "STRICT_SEED": "1", "STRICT_QUEUES": "8", "STRICT_ALONE": "1"}
    yield Job("strict", programs["both"], STRICT, environment=strict)
    yield Job("slept", programs["down"], ("--rehearse", "F=0.001,B=0.002,offload=0.02,reload=0.001", "--steps", "2"))
    yield Job("saves", programs["both"], (*TRAINING[:2], "--steps", "2", "--save", saved))
    for name, directory in (("resumes", programs["both"]), ("stays", stays)):
        yield Job(name, directory, (*TRAINING, "--resume", saved))
    yield Job("undisturbed", stays, TRAINING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moves")


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[str, Outcome]:
    outcomes = run_all(folder, 2, [*jobs(folder)])
    for outcome in outcomes.values():
        outcome.assert_passed()
    return outcomes


@pytest.mark.parametrize("name", ["down", "both", "again", "stream", "tied", "strict"])
def test_what_moves_trains_as_one_process_does(ran: dict[str, Outcome], name: str) -> None:
    assert "check: passed" in ran[name].said[0]


def losses(outcome: Outcome) -> list[str]:
    return re.findall(r"loss ([\d.]+)", outcome.said[0])


def test_a_run_resumes_where_it_ended_and_its_checkpoint_has_nothing_of_moves(ran: dict[str, Outcome]) -> None:
    """A checkpoint is read by the schedule without moves as well."""
    assert len(losses(ran["undisturbed"])) == 4
    assert losses(ran["saves"]) == losses(ran["undisturbed"])[:2]
    assert losses(ran["resumes"]) == losses(ran["stays"]) == losses(ran["undisturbed"])[2:]


def test_host_memory_is_told_as_it_is_used(ran: dict[str, Outcome]) -> None:
    """Two micro-batches of stage 0 are on the host at a time; of each the numbers that dropout has drawn."""
    said = ran["down"].said[0]
    assert re.search(r"^memory: of 1 GiB, rank 1 .*, and 10\.9 KiB of host memory$", said, re.M)
    table = said.split("what is on the host apart)\n")[1].splitlines()
    assert table[0].split()[4:] == ["used", "needs", "on", "host", "used", "on", "host"]
    assert table[1].split()[-4:] == ["3.75", "KiB", "3.75", "KiB"]
    assert 2 * 8 * 5 * 6 * 8 == 3.75 * 1024


def bytes_of(figures: list[str]) -> list[int]:
    """The figures of a rank in the table of peak memory, which end with what it needs and has used."""
    units = {"B": 1, "KiB": 2**10, "MiB": MIB}
    return [round(float(number) * units[unit]) for number, unit in zip(figures[3::2], figures[4::2], strict=True)]


def test_memory_that_was_moved_is_no_longer_used(ran: dict[str, Outcome]) -> None:
    """Of six micro-batches with 12 MiB each, one is on the worker and one on its way: 48 MiB fewer, as planned."""
    rows = {name: [line.split() for line in ran[name].said[0].splitlines()[-2:]] for name in ("heavy", "heavy_stays")}
    for of_rank, stays in zip(rows["heavy"], rows["heavy_stays"], strict=True):
        needs, used, *on_host = bytes_of(of_rank)
        needs_all, used_all = bytes_of(stays)
        assert on_host == [72 * MIB, 72 * MIB]
        assert needs_all - needs == pytest.approx(48 * MIB, rel=0.01)
        assert used_all - used == pytest.approx(48 * MIB, rel=0.15)


@pytest.mark.usefixtures("ran")
def test_a_recorded_run_tells_its_waits_for_moves(folder: Path) -> None:
    said = CliRunner().invoke(trace_command, [str(folder / "trace")])
    assert said.exit_code == 0, said.output
    assert re.search(r"^ worker 0: wait for the offload of stage 0 +0\.000 +\d", said.output, re.M)
    assert re.search(r"^ worker 0: host +3\.75 KiB", said.output, re.M), "as --peak-memory says"
    assert "wait reload m0 s0" in (folder / "trace" / "view" / "trace.json").read_text(encoding="utf-8")
    assert "waits for a send or for the host" in (folder / "trace" / "view" / "compare.svg").read_text(encoding="utf-8")


def test_a_rehearsal_waits_for_moves_as_for_a_link_that_takes_its_time(ran: dict[str, Outcome]) -> None:
    """Four micro-batches, of which each waits 20 ms for its way out before it comes back."""
    seconds = [float(figure) for figure in re.findall(r"^step \d/2 .*? ([\d.]+) s\b", ran["slept"].said[0], re.M)]
    assert len(seconds) == 2
    assert min(seconds) > 4 * 0.019
