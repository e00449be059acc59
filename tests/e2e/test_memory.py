"""Memory is what the report says: measured while the generated loops train, with torch's hooks for saved tensors."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import chimera_ir
from chimera_runtime.program.compiled_program import load
from chimera_runtime.program.rank_facts import RankFacts, spread
from tests.e2e.ranks import PATIENCE, Job, compiled, run_all
from tests.repeatable import also

OF_SEARCH: dict[str, dict[str, int]] = {"gpipe": {"N": 6}, "gems": {"N": 4}, "chimera": {"N": 8}, "zb_h2": {"N": 8}}
SCHEMES: dict[str, dict[str, int]] = {
    "dapple": {"N": 6},
    "chimera_doubling": {"N": 8},
    "chimera_halving": {"N": 8},
    "pipedream": {},
    "pipedream_2bw": {},
    "zb_h1": {"N": 6},
} | dict(also((), OF_SEARCH.items()))
"""Whole backwards, forwards of two micro-batches, backwards of half a one, halves of backwards; many versions and two.

`chimera` itself is in each run, with stages that differ: "growing".
"""

SPLIT = also(("zb_h1",), ("zb_h2",))
ROWS, WIDTH, BYTES = 8, 32, 8
INPUT = ROWS * WIDTH * BYTES
RANKS = range(4)
MODEL = Path(__file__).parent / "models" / "measured.py"
CLUSTER = Path(__file__).parent.parent.parent / "docs" / "examples" / "small.cluster.toml"


def job(folder: Path, name: str, scheme: str, parameters: dict[str, int], **variables: str) -> Job:
    (folder / name).mkdir()
    steps = {"pipedream": "10", "pipedream_2bw": "4"}.get(scheme, "2")
    arguments = ("--steps", steps, "--micro-batch-size", str(ROWS), "--memory-limit", "1GiB")
    environment = {"MEASURED": str(folder / name), **variables}
    return Job(name, compiled(folder / name, scheme, D=4, **parameters), arguments, "measured.py", environment)


def jobs(folder: Path) -> Iterator[Job]:
    for scheme, parameters in SCHEMES.items():
        yield job(folder, scheme, scheme, parameters)
    yield job(folder, "growing", "chimera", {"N": 8}, GROWING="1")


@dataclass(frozen=True)
class Seen:
    """A scheme's report, its program and the facts of its ranks, what each measured of itself, and what rank 0 said.

    ``lanes`` are the compute operations of its workers: kind, micro-batch and stage.
    """

    report: dict[str, Any]
    lag: int
    facts: tuple[RankFacts, ...]
    ranks: list[dict[str, Any]]
    said: str
    lanes: list[list[tuple[str, int, int]]]


def computed(text: str) -> list[list[tuple[str, int, int]]]:
    """The operations of each worker that are over one micro-batch."""
    return [
        [
            (kind, int(micro), int(stage))
            for kind, micro, stage in re.findall(r"^ *([FBIW]) m(\d+) s(\d+)\b", lane, re.M)
        ]
        for lane in re.split(r"^worker \d+:$", text, flags=re.M)[1:]
    ]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    folder = tmp_path_factory.mktemp("memory")
    listed = list(jobs(folder))
    outcomes = run_all(folder, 4, listed)
    found = {}
    for each in listed:
        outcomes[each.name].assert_passed()
        report = json.loads((each.directory / "report.json").read_text())
        ranks = [json.loads((folder / each.name / f"{rank}.json").read_text()) for rank in RANKS]
        program = load(each.directory)
        lanes = computed((each.directory / "schedule.sir").read_text())
        found[each.name] = Seen(report, program.job.lag, program.ranks, ranks, outcomes[each.name].said[0], lanes)
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_peak_of_what_is_saved_is_what_the_report_says(seen: dict[str, Seen], scheme: str) -> None:
    """To the byte; where forwards are run again, one at a time counts M_a, of which its input is there already."""
    found = seen[scheme]
    for rank, activations, inputs in zip(
        found.ranks, found.report["activations"], found.report["stashed_inputs"], strict=True
    ):
        (m_a,) = set(rank["M_a"].values())
        assert rank["kept"] == activations * m_a + inputs * INPUT - (INPUT if inputs else 0)
        assert rank["stashed"] == inputs
        if not inputs:
            assert rank["saved"] == rank["kept"]


@pytest.mark.parametrize("scheme", SPLIT)
def test_what_is_kept_between_the_halves_of_a_backward_is_what_the_report_says(
    seen: dict[str, Seen], scheme: str
) -> None:
    """To the byte, after each half: the first lets go of nothing, as a layer keeps the whole graph before it.

    It leaves the gradients of the results of both layers; on stage 0, which does all in the second half, the one that
    it was given.
    """
    found = seen[scheme]
    for rank, lane, facts in zip(found.ranks, found.lanes, found.facts, strict=True):
        ((_, m_a),) = rank["M_a"].items()
        kept, begun, expected = 0, 0, []
        for kind, micro, stage in lane:
            kept += {"F": 1, "I": 0, "W": -1}[kind]
            begun += {"F": 0, "I": 1, "W": -1}[kind]
            if kind != "F":
                expected.append([kind, micro, stage, kept * m_a, begun * INPUT * (2 if stage else 1)])
        assert rank["halves"] == expected * 2, "in two updates"
        moments = [(of_stage.activations, of_stage.begun) for (of_stage,) in facts.kept]
        assert max(map(sum, moments)) * m_a == rank["kept"]
        assert max(g for *_, g in expected) == max(g for _, g in moments) * INPUT * (2 if facts.kept[0][0].stage else 1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_there_are_as_many_copies_of_the_weights_as_the_report_says(seen: dict[str, Seen], scheme: str) -> None:
    assert [rank["copies"] for rank in seen[scheme].ranks] == seen[scheme].report["weights"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_receive_buffers_are_as_many_as_the_program_says(seen: dict[str, Seen], scheme: str) -> None:
    for rank, facts in zip(seen[scheme].ranks, seen[scheme].facts, strict=True):
        said = {str(s): [sum(map(len, of.slots[letter])) for letter in ("y", "dx")] for s, of in facts.stages.items()}
        assert rank["buffers"] == said


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the malloc of the GNU C library")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_a_rank_frees_it_keeps(seen: dict[str, Seen], scheme: str) -> None:
    """While it trains malloc maps nothing on its own, however large."""
    assert [rank["mapped"] for rank in seen[scheme].ranks] == [0] * len(RANKS)


def test_where_stages_differ_it_counts_which_are_kept_at_the_same_time(seen: dict[str, Seen]) -> None:
    found = seen["growing"]
    m_a = {int(stage): size for rank in found.ranks for stage, size in rank["M_a"].items()}
    assert len(set(m_a.values())) == 4
    for rank, facts in zip(found.ranks, found.facts, strict=True):
        moments = [sum(each.activations * m_a[each.stage] for each in moment) for moment in facts.kept]
        assert rank["kept"] == max(moments)


@pytest.mark.parametrize("scheme", [*SCHEMES, "growing"])
def test_the_need_that_is_told_is_that_of_training(seen: dict[str, Seen], scheme: str) -> None:
    """It is hardly more than all memory that operations touch, and no less, mini-batches aside that are loaded."""
    told = re.search(r"^memory: of 1 GiB, rank (\d) \(worker \1\) needs ([\d.]+) KiB: ", seen[scheme].said, re.M)
    assert told is not None, seen[scheme].said
    rank = int(told[1])
    alive, need = seen[scheme].ranks[rank]["alive"], float(told[2]) * 1024
    facts, updates = seen[scheme].facts[rank], 1 + seen[scheme].lag
    loaded = updates * INPUT * sum(len([*spread(each)]) for each in (facts.inputs, facts.targets))
    assert alive <= need * 1.01 + loaded
    assert need <= alive * 1.25


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same stages as a profile, measured in one process."""
    folder = tmp_path_factory.mktemp("profile")
    words = ("profile", "stages", str(MODEL), "--stages", "4", "--micro-batch-size", str(ROWS), "--rounds", "5")
    environment = {**os.environ, "MEASURED": str(folder), "RANK": "0"}
    command = [sys.executable, "-m", "chimera_ir", *words, "--out", str(folder / "p.toml")]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=PATIENCE)
    return folder / "p.toml"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_need_that_is_predicted_is_that_of_training(seen: dict[str, Seen], profile: Path, scheme: str) -> None:
    """On every rank hardly more than all memory that operations touch, and no less: `--require-fit` can be believed."""
    options = chimera_ir.Options(profile=profile, cluster=CLUSTER, micro_batch_size=ROWS)
    prediction = chimera_ir.compile(scheme, D=4, options=options, **SCHEMES[scheme]).prediction
    found = seen[scheme]
    for need, rank, facts in zip(prediction.memory, found.ranks, found.facts, strict=True):
        loaded = (1 + found.lag) * INPUT * sum(len([*spread(each)]) for each in (facts.inputs, facts.targets))
        assert rank["alive"] <= need.total * 1.01 + loaded
        assert need.total <= rank["alive"] * 1.25


def test_a_model_beyond_the_limit_is_refused_before_training(tmp_path: Path) -> None:
    directory = compiled(tmp_path, "dapple", D=2, N=4)
    arguments = ("--micro-batch-size", str(ROWS), "--memory-limit", "64KiB")
    job = Job("beyond", directory, arguments, "measured.py", {"MEASURED": str(tmp_path)})
    outcome = run_all(tmp_path, 2, [job])[job.name]
    assert outcome.statuses == ("2", "2"), "misuse, on both ranks"
    said = "".join(outcome.said).splitlines()
    assert not any(line.startswith("step") for line in said)
    (message,) = (line for line in said if line.startswith("train.py:"))
    assert re.fullmatch(
        r"train.py: --memory-limit 64 KiB: rank 0 \(worker 0\) needs \S+ KiB: weights 16.5 KiB, gradients 33 KiB, "
        r"optimizer 33 KiB, messages \d+ KiB, activations 8 KiB \(stage 0: 1 x M_theta = 16.5 KiB, 2 x M_a = 4 KiB\)"
        r"; 1 other rank needs too much as well; choose a smaller --micro-batch-size, .*",
        message,
    ), message
