"""Programs under a backend that keeps NCCL's rules: the library trains, and what would hang or mix up on GPUs fails.

The whole library at several sizes: `strict_matrix`. Programs that were changed at random: `strict_mutants`. Mistakes
that others made: `test_old_bugs`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.ranks import HERE, Job, Outcome, compiled, run_all
from tests.repeatable import also, either
from tests.sizes import on_workers

STRICT = ("--check-only", "--micro-batch-size", "2", "--backend", "strict", "--backend-module", str(HERE / "strict.py"))
SAMPLE = also(("chimera", "pipedream_2bw", "interleaved", "seq1f1b_zb"), ("chimera_halving", "zb_v"))
"""Two directions, a stream, a ring of workers, and slices with split backwards."""
PAIRED = also(("chimera", "pipedream_2bw"), ("dapple",))
SLICED = ("seq1f1b_zb",)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("strict")
    environment = {"STRICT_DELAY": "0.003", "STRICT_SEED": "1", "STRICT_QUEUES": "8", "STRICT_ALONE": "1"}
    jobs = []
    for number, scheme in enumerate(SAMPLE):
        late = {"STRICT_LATE": "1"} if number % 2 else {}
        size = on_workers(scheme, 4, 6 if scheme == "chimera" else 4) | (
            {"k": either(2, 4)} if scheme in SLICED else {}
        )
        program = compiled(folder, scheme, **size)
        model = "carried.py" if scheme in SLICED else "zoo.py"
        jobs.append(Job(scheme, program, STRICT, model, environment | late))
    return run_all(folder, 4, jobs)


@pytest.mark.parametrize("scheme", SAMPLE)
def test_a_library_scheme_trains_by_the_rules_of_nccl(trained: dict[str, Outcome], scheme: str) -> None:
    trained[scheme].assert_passed()
    assert "check: passed" in trained[scheme].said[0]


def lines_of(text: str, change: Callable[[list[str]], list[str]]) -> str:
    """A script with other lines in its update, or its turn."""
    begin = re.search(r"^def (update|turn)\(.*\n", text, re.MULTILINE)
    body, end, tail = text[begin.end() :].partition("\n\n\ndef evaluate")
    return text[: begin.end()] + "\n".join(change(body.split("\n"))) + end + tail


def sends_first(lines: list[str]) -> list[str]:
    """Waits for each send as soon as it is posted, and posts each receive when it is needed."""
    receives = {(match[1], match[2]): line for line in lines if (match := re.match(RECEIVE, line))}
    changed: list[str] = []
    for line in lines:
        if re.match(r"    out_\w+\.wait\(", line) or re.match(RECEIVE, line):
            continue
        if wanted := re.match(r"    (in_\w+)\.wait\((\w+)\)", line):
            changed.append(receives[wanted[1], wanted[2]])
        changed.append(line)
        if sent := re.match(r"    (out_\w+)\.isend\((\w+),", line):
            changed.append(f"    {sent[1]}.wait({sent[2]})")
    return changed


def second_first(pattern: str) -> Callable[[list[str]], list[str]]:
    """Moves the second line that matches before the first one."""

    def change(lines: list[str]) -> list[str]:
        first, second, *_ = (place for place, line in enumerate(lines) if re.match(pattern, line))
        return [*lines[:first], lines[second], *lines[first:second], *lines[second + 1 :]]

    return change


def sent_twice(lines: list[str]) -> list[str]:
    """Sends a message twice: the second time a message of the next update is expected there."""
    sent = "    out_s0_s1.isend(0, "
    (place,) = (place for place, line in enumerate(lines) if line.startswith(sent))
    return [
        *lines[:place],
        "    outputs = stage0.outputs(0)",
        f"{sent}outputs)",
        f"{sent}outputs)",
        *lines[place + 1 :],
    ]


RECEIVE = r"    (in_\w+)\.irecv\((\w+),"


@dataclass(frozen=True)
class Bug:
    """A mistake in files of a compiled scheme, what the strict backend says of it, and whether gloo lets it pass.

    ``forgiven`` is None where no line that gloo runs is changed.
    """

    scheme: str
    file: str
    change: Callable[[str], str]
    said: str
    forgiven: bool | None = True
    micro_batches: int = 4
    meeting: str = "30"

    def inflict(self, directory: Path) -> None:
        for script in directory.glob(self.file):
            text = script.read_text()
            changed = self.change(text)
            assert changed != text, f"{script} has changed"
            script.write_text(changed)


BUGS = {
    "both ends send first and wait for it": Bug(
        "chimera",
        "rank_*.py",
        lambda text: lines_of(text, sends_first),
        r"hangs; at the heads of the streams: .*send|\(m\d .*\) meets \(m\d ",
        forgiven=False,
    ),
    "messages are received in another order than they are sent": Bug(
        "chimera",
        "rank_1.py",
        lambda text: lines_of(text, second_first(r"    in_s0_s1\.irecv\(")),
        r"on rank 1 \(m\d s0->s1 of update 0: .*\) meets \(m\d s0->s1 of update 0: ",
    ),
    "a sum is launched in another order than by its other rank": Bug(
        "chimera",
        "rank_1.py",
        lambda text: lines_of(text, second_first(r"    stage\d\.all_reduce\(")),
        "hangs; .*all_reduce",
    ),
    "a message of an update comes in the next one": Bug(
        "dapple",
        "rank_0.py",
        lambda text: lines_of(text, sent_twice),
        r"on rank 1 \(m0 s0->s1 of update 0: .*\) meets \(m0 s0->s1 of update 1: ",
        forgiven=False,
        micro_batches=1,
    ),
    "the first message of a communicator makes it": Bug(
        "chimera",
        "chimera_runtime/ranks/world.py",
        lambda text: text.replace('    if backend != "gloo":\n        _warm_up(world)\n', ""),
        "the first operation of a communicator of ranks .* blocks the host",
        forgiven=None,
        meeting="3",
    ),
}


PAIR = (*STRICT, "--communicators", "pair")


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Runs with one communicator for both directions: compiled for it, not compiled for it, not but called so."""
    folder = tmp_path_factory.mktemp("paired")
    forced = compiled(folder / "forced", "dapple", D=4, N=4)
    program = forced / "program.json"
    text = program.read_text()
    program.write_text(text.replace('"communicators": ["directed"]', '"communicators": ["directed", "pair"]'))
    assert program.read_text() != text
    environment = {"STRICT_PATIENCE": "3"}
    slow = {"STRICT_DELAY": "0.003", "STRICT_SEED": "1", "STRICT_QUEUES": "8", "STRICT_ALONE": "1"}
    jobs = [
        *(
            Job(scheme, compiled(folder, scheme, asked=("--communicators", "pair"), D=4, N=4), STRICT, environment=slow)
            for scheme in PAIRED
        ),
        Job("refused", compiled(folder, "dapple", D=4, N=4), PAIR),
        Job("forced", forced, PAIR, environment=environment),
    ]
    return run_all(folder, 4, jobs)


@pytest.mark.parametrize("scheme", PAIRED)
def test_a_program_that_is_compiled_for_it_trains_with_one_communicator_for_both_directions(
    paired: dict[str, Outcome], scheme: str
) -> None:
    paired[scheme].assert_passed()
    assert "check: passed" in paired[scheme].said[0]


def test_a_program_that_is_not_proven_for_it_is_refused(paired: dict[str, Outcome]) -> None:
    assert "2" in paired["refused"].statuses
    assert "0" not in paired["refused"].statuses
    assert "communicators pair: dapple(D=4, N=4) could wait for ever" in "\n".join(paired["refused"].said)


def test_a_program_that_is_not_proven_for_it_would_hang(paired: dict[str, Outcome]) -> None:
    assert "0" not in paired["forced"].statuses
    said = "\n".join(paired["forced"].said)
    assert re.search(
        r"hangs; at the heads of the streams: computations: wait (send|recv) m\d+ s\d->s\d of update \d+ .*; "
        r"communicator of ranks \[\d, \d\]: (send|recv) m\d+ s\d->s\d of update",
        said,
    ), said


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("spoiled")
    jobs: list[Job] = []
    for number, (name, bug) in enumerate(BUGS.items()):
        directory = compiled(folder / str(number), bug.scheme, D=4, N=bug.micro_batches)
        bug.inflict(directory)
        environment = {"STRICT_PATIENCE": "3", "STRICT_MEETING": bug.meeting, "STRICT_ALONE": "1"}
        if bug.forgiven is not None:
            jobs.append(Job(f"gloo {name}", directory, ("--check-only", "--timeout", "60" if bug.forgiven else "2")))
        jobs.append(Job(f"strict {name}", directory, STRICT, environment=environment))
    return run_all(folder, 4, jobs)


@pytest.mark.parametrize("name", BUGS)
def test_a_mistake_fails_by_the_rules_of_nccl(spoiled: dict[str, Outcome], name: str) -> None:
    if BUGS[name].forgiven is not None:
        assert (set(spoiled[f"gloo {name}"].statuses) == {"0"}) == BUGS[name].forgiven
    strict = spoiled[f"strict {name}"]
    assert "0" not in strict.statuses
    assert re.search(BUGS[name].said, "\n".join(strict.said)), strict.said
