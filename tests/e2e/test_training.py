"""Training with generated scripts: every library scheme computes what one process computes, for any number of copies.

A run has each reason for a case once: a scheme of each kind, a number of copies, a layout, a number of micro-batches,
eight ranks. A search has every scheme with each of them. All schemes of the library train in `test_ties`.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ranks import MODELS, Job, Outcome, compiled, run_all, torchrun
from tests.repeatable import also, searching

SCHEMES = Path(__file__).resolve().parent / "schemes"
LIBRARY = also(("dapple", "chimera"), ("gpipe", "gems"))
"""Schemes with one pipe, and with two: replicas of a stage are then in copies alone, or in both pipes of each."""
SECTION_3_5 = ("chimera_doubling", "chimera_halving")


def four_ranks(folder: Path) -> Iterator[Job]:
    """D=4 with one copy, D=2 with two, D=1 with four; training after the check, to compare losses."""
    for scheme in LIBRARY:
        arguments = ("--check", "--steps", "2", "--micro-batch-size", "2", "--metrics", str(folder / f"{scheme}.json"))
        yield Job(f"{scheme}-D4", compiled(folder, scheme, D=4, N=4), arguments)
    usual = (("dapple", "replica"), ("chimera", "pipeline"))
    searched = (("dapple", "pipeline"), ("chimera", "replica"), ("gpipe", "replica"), ("gems", "pipeline"))
    for scheme, layout in also(usual, searched):
        name = f"{scheme}-D2-W2-{layout}"
        (folder / f"witness-{name}").mkdir()
        arguments = ("--check", "--steps", "3", "--seed", "7", "--layout", layout)
        witness = {"WITNESS": str(folder / f"witness-{name}")}
        yield Job(name, compiled(folder, scheme, D=2, N=3), arguments, environment=witness)
    for parameters in also(({"N": 5, "f": 2},), ({"N": 1}, {"N": 3}, {"N": 6})):
        directory = compiled(folder, "chimera", D=4, **parameters)
        yield Job(f"bidirectional-{parameters}", directory)
    for scheme, micro_batches in also((("chimera", 20),), (("dapple", 8), ("gpipe", 16), ("chimera", 24))):
        yield Job(f"{scheme}-loop-{micro_batches}", compiled(folder, scheme, D=4, N=micro_batches))
    yield Job("alone", compiled(folder, "dapple", D=1, N=2), ("--check-only", "--micro-batch-size", "2"))
    for scheme in ("wave", "shared", "crossed", "again", "bubble"):
        yield Job(scheme, compiled(folder, str(SCHEMES / f"{scheme}.chim")))
    yield from several_at_once(folder)
    yield from several_stages(folder)
    for items in also(("4",), ("1", "2")):
        arguments = ("--check-only", "--micro-batch-size", items)
        yield Job(f"wide-{items}", compiled(folder, "chimera", D=4, N=4), arguments, "wide.py")


def several_at_once(folder: Path) -> Iterator[Job]:
    """Operations over several micro-batches: one by one for the model with dropout, at once for the one without."""
    for scheme in SECTION_3_5:
        directory = compiled(folder, scheme, D=4, N=12)
        yield Job(f"{scheme}-plain", directory, ("--check-only", "--micro-batch-size", "2"), "plain.py")
        eight = compiled(folder, scheme, D=4, N=8)
        yield Job(f"{scheme}-D4", eight, ("--check-only", "--micro-batch-size", "2"))
        for micro_batch_size in also(("2",) if scheme == "chimera_doubling" else (), ("4",)):
            arguments = ("--check-only", "--seed", "7", "--micro-batch-size", micro_batch_size)
            yield Job(f"{scheme}-D2-W2-{micro_batch_size}", compiled(folder, scheme, D=2, N=4), arguments)
    rehearse = ("--rehearse", "F=0.002,B=0.004", "--steps", "2", "--micro-batch-size", "2")
    for scheme in also(SECTION_3_5[:1], SECTION_3_5[1:]):
        yield Job(f"{scheme}-rehearsed", compiled(folder, scheme, D=4, N=8), rehearse)
    groups = compiled(folder, str(SCHEMES / "groups.chim"))
    yield Job("groups", groups)
    yield Job("groups-plain", groups, ("--check-only", "--micro-batch-size", "3"), "plain.py")
    yield Job("again-plain", compiled(folder, str(SCHEMES / "again.chim"), N=8), model="plain.py")


def several_stages(folder: Path) -> Iterator[Job]:
    """Workers with several stages of a pipe, neighbours and others, and split backwards; N that is no whole unit."""
    usual = (
        ("interleaved", {"P": 2, "v": 3, "N": 4, "hop": 2}),
        ("dualpipe_v", {"P": 4, "N": 9}),
        ("interleaved_overlap", {"P": 4, "N": 10}),
    )
    searched = (
        ("breadth_first", {"P": 4, "N": 3}),
        ("bitpipe", {"P": 4, "N": 6}),
        ("waves", {"P": 2, "w": 2, "N": 3}),
        ("zb_h1", {"D": 4, "N": 5}),
        ("interleaved", {"P": 4, "N": 5}),
        ("waves", {"P": 4, "N": 6}),
        ("dualpipe", {"D": 4, "N": 8}),
        ("interleaved_overlap", {"P": 4, "v": 1, "N": 5}),
    )
    for scheme, parameters in also(usual, searched):
        yield Job(f"{scheme}-{parameters}", compiled(folder, scheme, **parameters))


def two_ranks(folder: Path) -> Iterator[Job]:
    """Gradients that are none or sparse; buffers that come late; results that are only marked conjugate.

    Under chimera gradients are summed over two ranks, under dapple they are not.
    """
    gradients, values = ("unused-output", "sparse", "frozen-0"), ("late-buffer", "conjugate", "frozen-1")
    usual = [*((what, "dapple") for what in gradients), *((what, "chimera") for what in (*gradients, *values))]
    for what, scheme in also(usual, ((what, "dapple") for what in values)):
        directory = compiled(folder, scheme, D=2, N=2)
        yield Job(f"{what}-{scheme}", directory, ("--check", "--steps", "2"), "vary.py", {"VARY": what})


def eight_ranks(folder: Path) -> Iterator[Job]:
    """Two pipes of D=4 in two copies; in a search also one pipe, D=2 with four copies, and D=8."""
    for scheme in also(("chimera",), ("dapple", "gpipe", "gems")):
        directory = compiled(folder, scheme, D=4, N=2)
        yield Job(f"{scheme}-D4-W2", directory, ("--check-only", "--micro-batch-size", "2"))
    if not searching():
        return
    for number, scheme in enumerate(("gems", "chimera_halving", *LIBRARY[:3], "chimera_doubling")):
        layout = ("pipeline", "replica")[number % 2]
        arguments = ("--check-only", "--layout", layout, "--micro-batch-size", "2")
        yield Job(f"{scheme}-D2-W4-{layout}", compiled(folder, scheme, D=2, N=4), arguments)
    for scheme in SECTION_3_5:
        yield Job(f"{scheme}-D8", compiled(folder, scheme, D=8, N=16), ("--check-only", "--micro-batch-size", "2"))
    yield Job("chimera-D8", compiled(folder, "chimera", D=8, N=8, f=2))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Outcome]]:
    folder = tmp_path_factory.mktemp("four")
    return folder, run_all(folder, 4, list(four_ranks(folder)))


def losses(folder: Path, scheme: str) -> list[float]:
    metrics = json.loads((folder / f"{scheme}.json").read_text())
    assert len(metrics["loss"]) == len(metrics["step_seconds"]) == len(metrics["cpu_seconds"])
    found: list[float] = metrics["loss"]
    return found


def weights(folder: Path, name: str, steps: int) -> dict[str, set[tuple[str, ...]]]:
    """The digests of the weights after every step, by stage, as every rank saw them.

    Before them are those of the check; on rank 0 also those of stages that it does not hold.
    """
    seen: dict[str, set[tuple[str, ...]]] = {}
    for log in sorted((folder / f"witness-{name}").iterdir()):
        by_stage: dict[str, list[str]] = {}
        for line in log.read_text().splitlines():
            stage, digest = line.split()
            by_stage.setdefault(stage, []).append(digest)
        for stage, digests in by_stage.items():
            if len(digests) > steps:
                seen.setdefault(stage, set()).add(tuple(digests[-steps:]))
    return seen


def test_four_ranks_compute_the_gradients_of_one_process(four: tuple[Path, dict[str, Outcome]]) -> None:
    for name, outcome in four[1].items():
        outcome.assert_passed()
        assert "check: passed" in outcome.said[0] or name.endswith("-rehearsed"), name


def test_stages_run_several_micro_batches_at_once_exactly_if_that_changes_nothing(
    four: tuple[Path, dict[str, Outcome]],
) -> None:
    """Rank 0 says once of each stage that recomputes why it does not; the others say nothing."""
    said = {name: [text.count("one micro-batch at a time") for text in each.said] for name, each in four[1].items()}
    assert said["chimera_doubling-D4"] == [4, 0, 0, 0]
    assert said["chimera_doubling-plain"] == said["chimera_halving-D4"] == said["groups-plain"] == [0, 0, 0, 0]
    assert said["groups"] == [2, 0, 0, 0]
    assert "stage 2 draws random numbers" in four[1]["chimera_doubling-D4"].said[0]


def test_an_odd_micro_batch_has_no_halves(tmp_path: Path) -> None:
    done = torchrun(compiled(tmp_path, "chimera_halving", D=2, N=2), 2, "--model", str(MODELS / "zoo.py"))
    assert done.returncode != 0
    assert "--micro-batch-size 1: chimera_halving(D=2, N=2) cuts every micro-batch into 2 halves" in done.stderr


def test_two_ranks_leave_gradients_alone_that_one_process_has_not(tmp_path: Path) -> None:
    for name, outcome in run_all(tmp_path, 2, list(two_ranks(tmp_path))).items():
        outcome.assert_passed()
        assert "check: passed" in outcome.said[0], name


def test_eight_ranks_compute_the_gradients_of_one_process(tmp_path: Path) -> None:
    for name, outcome in run_all(tmp_path, 8, list(eight_ranks(tmp_path))).items():
        outcome.assert_passed()
        assert "check: passed" in outcome.said[0], name


def test_every_synchronous_scheme_takes_the_same_steps(four: tuple[Path, dict[str, Outcome]]) -> None:
    first, *others = (losses(four[0], scheme) for scheme in LIBRARY)
    assert len(first) == 2
    for other in others:
        assert other == pytest.approx(first, rel=1e-9)


@pytest.mark.parametrize("name", ["dapple-D2-W2-replica", "chimera-D2-W2-pipeline"])
def test_replicas_of_a_stage_stay_bitwise_equal(four: tuple[Path, dict[str, Outcome]], name: str) -> None:
    seen = weights(four[0], name, 3)
    assert {stage: len(different) for stage, different in seen.items()} == dict.fromkeys("01", 1), "replicas drifted"
    assert all(len(set(digests)) == 3 for of_stage in seen.values() for digests in of_stage), "one digest per step"


NAMESAKES = ("train", "runtime", "rank_0", "program", "support/layers", "support/__init__", "links/stage")


def test_modules_beside_the_model_file_may_be_called_like_ours(tmp_path: Path) -> None:
    """Whatever lies beside train.py, or is part of the runtime, hides none of the user's modules."""
    beside = tmp_path / "mine"
    for name in NAMESAKES:
        module = beside / f"{name}.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(f"WHOSE = {str(module)!r}\n")
    modules = [name.replace("/", ".") for name in NAMESAKES if not name.endswith("__init__")]
    checks = "".join(f"import {name}\nassert {name}.WHOSE == {name}.__file__\n" for name in modules)
    (beside / "model.py").write_text((MODELS / "zoo.py").read_text() + f"\n\n{checks}")
    done = torchrun(compiled(tmp_path, "dapple", D=2, N=2), 2, "--model", str(beside / "model.py"), "--check-only")
    assert done.returncode == 0, done.stderr
    assert "check: passed" in done.stdout
