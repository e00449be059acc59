"""The benchmarks run and fill their tables. How fast anything is cannot be tested beside other work."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests import forkserver
from tests.e2e.ranks import PATIENCE, SCRIPT, environment

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
SMALL = "--model", str(BENCHMARKS.parent / "docs" / "examples" / "cnn.py")
"""A model that is trained in less time than the benchmarks' own."""

RATIO = re.compile(r"\d+\.\d+ \(\d+\.\d+\.\.\d+\.\d+\)")
"""A median and its interval, as in ``0.913 (0.850..0.960)``."""

PROGRAM = """
import os, sys
from pathlib import Path
import commands
from tests.e2e.ranks import torchrun_script

def torchrun(words, variables={}):
    ranks, script, *arguments = words
    variables = {"PYTHONPATH": os.environ["PYTHONPATH"], **variables}
    done = torchrun_script(Path(script), int(ranks.removeprefix("--nproc-per-node=")), *arguments, **variables)
    print(done.stdout)
    print(done.stderr, file=sys.stderr)
    done.check_returncode()

commands.torchrun = torchrun
"""
"""Runs a benchmark whose ranks have imported torch."""


def table(name: str, *arguments: str) -> list[dict[str, str]]:
    """The rows of the table that a benchmark prints, by the heads of their columns."""
    path = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)])
    words = ("-c", PROGRAM + SCRIPT, str(BENCHMARKS / name), *arguments)
    done = forkserver.run(words, environment() | {"PYTHONPATH": path}, BENCHMARKS, PATIENCE)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    heads, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_step_times_stand_beside_those_of_torch() -> None:
    rows = table("runtime.py", "--rounds", "1", "--forward", "5", "--micro-batches", "4", "--parts", "steps")
    assert [(row[""], row["message"], row["N"]) for row in rows] == [("dapple", "256 B", "4"), ("gpipe", "256 B", "4")]
    for row in rows:
        assert RATIO.fullmatch(row["ours / torch"])
        assert RATIO.fullmatch(row["CPU ours / torch"])
        assert float(row["ours / ideal"]) > 0


def test_steps_whose_number_changes_stand_beside_those_of_one_number() -> None:
    (row,) = table("loop.py", "--parts", "numbers", "--rounds", "1")
    assert row[""] == "dapple"
    assert RATIO.fullmatch(row["N = 6, 10 in turn / N = 8"])


def test_steps_behind_the_interface_of_torch_stand_beside_those_of_a_pipeline_and_of_torch() -> None:
    rows = table("interface.py", "--rounds", "1", "--micro-batch-size", "1", *SMALL)
    assert [row["interface beside"] for row in rows] == ["Pipeline", "torch"]
    assert all(RATIO.fullmatch(row["step"]) for row in rows)


def test_predictions_stand_beside_what_was_measured() -> None:
    rows = table(
        *("accuracy.py", "--parts", "rehearsal", "--depths", "2", "--times", "1", "--forward", "5", "--steps", "1"),
        *("--turns", "1", "--schemes", "dapple", "pipedream"),
    )
    assert [(row[""], row["D"], row["N"], row["F, ms"]) for row in rows] == [
        ("dapple", "2", "2", "5"),
        ("pipedream", "2", "1", "5"),
    ]
    for row, least in zip(rows, (3 * 15, 15), strict=True):
        assert float(row["replay, ms"]) >= least
        assert float(row["equation 1, ms"]) >= least
        assert float(row["measured, ms"].split()[0]) > 0


def test_halves_of_backwards_stand_beside_whole_ones() -> None:
    (row,) = table("halves.py", "--parts", "stages", "--rounds", "1", "--kinds", "perceptron")
    assert row[""] == "perceptron"
    assert RATIO.fullmatch(row["(I + W) / B"])
    assert float(row["kept from I to W / M_a"]) > 1
    rows = table("halves.py", "--parts", "pipelines", "--rounds", "1", "--depths", "2", "--micro-batches", "4", *SMALL)
    assert [row[""] for row in rows] == ["dapple", "zb_h1", "torch Schedule1F1B"]
    assert all(RATIO.fullmatch(row["over dapple"]) for row in rows)


def test_limited_links_are_skipped_with_a_message_where_they_cannot_be_made() -> None:
    asked = "--parts", "links", "--depths", "2", "--times", "1", "--forward", "5", "--schemes", "dapple"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "accuracy.py"), *asked],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=os.environ | {"PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert "Skipped, for this machine does not permit it: there is no command ip" in done.stdout


def test_a_real_model_runs_in_every_contender() -> None:
    rows = table("compute.py", "--rounds", "1", "--stages", "2", "--micro-batches", "2", *SMALL)
    assert len(rows) == len({row[""] for row in rows}) == 5
    for row in rows:
        assert RATIO.fullmatch(row["over torch Schedule1F1B"])
        assert RATIO.fullmatch(row["over torch's"])


def test_split_backwards_stand_beside_those_of_torch() -> None:
    rows = table("zero_bubble.py", "--rounds", "1", "--forward", "5", "--micro-batches", "8")
    assert [row[""] for row in rows] == ["zb_h1", "zb_v", "v_half", "v_min", "dualpipe_v"]
    for row in rows:
        assert RATIO.fullmatch(row["ours / torch"])
        assert float(row["ours / predicted"]) > 0


def test_host_time_stands_beside_that_of_torch() -> None:
    """The benchmark compares the gradients of both itself, before it measures."""
    jobs = "zb_h1 D=2", "dapple D=2, keywords, two outputs"
    rows = table("host_time.py", "--rounds", "1", "--jobs", *jobs)
    assert [(row[""], row["messages"], row["rank"]) for row in rows] == [
        (job, messages, rank) for job in jobs for messages in ("fake", "gloo") for rank in "01"
    ]
    for row in rows:
        assert RATIO.fullmatch(row["ours / torch"])
        assert float(row["bare, us"]) > 0
        assert float(row["torch's calls"]) > 1
