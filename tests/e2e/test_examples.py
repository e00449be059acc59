"""The paper's networks train under schemes of the library as one process does; all schemes train in test_ties."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import chimera_ir
from tests.e2e.ranks import Job, Outcome, compiled, run_all, torchrun, torchrun_script
from tests.repeatable import also, searching
from tests.sizes import chains, on_workers, with_a_flush

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
SAMPLE = ("chimera", "interleaved", "pipedream", "zb_h1")
NETWORKS = {
    "bert48": also(("dapple", "zb_h1"), ("chimera", "pipedream_2bw")),
    "gpt2": chains() if searching() else SAMPLE,
}
"""With the schemes that each is trained under."""


def settings(layers: int, *more: str) -> dict[str, str]:
    """The tiny network, with so many layers and a short text."""
    return {"MODEL_SETTINGS": ",".join(("tiny,dtype=float64,text=30000", f"layers={layers}", *more))}


def stages(scheme: str) -> int:
    return chimera_ir.compile(scheme, **on_workers(scheme, 4, 4)).schedule.header.stages


def four_ranks(folder: Path) -> Iterator[Job]:
    """Four workers; D=2 with two copies; without dropout, so that a forward may run over two at once.

    A stage has a layer, two where there are two stages. The words of GPT-2 are tied, as in the original, wherever that
    can be.
    """
    tied = "words=tied"
    for network in NETWORKS:
        model = str(EXAMPLES / f"{network}.py")
        for scheme in NETWORKS[network]:
            metrics = ("--metrics", str(folder / f"{network}-{scheme}.json"))
            arguments = ("--check", "--steps", "4", "--micro-batch-size", "2", *metrics)
            is_tied = network == "gpt2" and scheme != "pipedream"  # its stages read different versions
            directory = compiled(folder, scheme, ("first,last",) if is_tied else (), **on_workers(scheme, 4, 4))
            size = settings(stages(scheme), *[tied] * is_tied)
            yield Job(f"{network}-{scheme}", directory, arguments, model, size)
        shared = compiled(folder, "chimera", ("first,last",), D=4, N=4)
        if network != "gpt2":  # gpt2-chimera is that
            yield Job(f"{network}-tied", shared, ("--check-only", "--micro-batch-size", "2"), model, settings(4, tied))
        if network == "gpt2":
            split = ("--check-only", "--micro-batch-size", "2", "--split", "0,2,3,5")
            yield Job("gpt2-layers-tied", shared, split, str(EXAMPLES / "gpt2_layers.py"), settings(4, tied))
    halves, doubling = compiled(folder, "chimera", D=2, N=2), compiled(folder, "chimera_doubling", D=4, N=8)
    for network in also(("bert48",), ("gpt2",)):
        model, arguments = str(EXAMPLES / f"{network}.py"), ("--check-only", "--micro-batch-size", "2")
        yield Job(f"{network}-D2-W2", halves, arguments, model, settings(4))
        yield Job(f"{network}-dry", doubling, arguments, model, settings(4, "dropout=0"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Outcome]]:
    folder = tmp_path_factory.mktemp("examples")
    return folder, run_all(folder, 4, list(four_ranks(folder)))


def losses(folder: Path, network: str, scheme: str) -> list[float]:
    found: list[float] = json.loads((folder / f"{network}-{scheme}.json").read_text())["loss"]
    return found


def test_the_networks_compute_what_one_process_computes(four: tuple[Path, dict[str, Outcome]]) -> None:
    for name, outcome in four[1].items():
        outcome.assert_passed()
        assert "check: passed" in outcome.said[0], name


@pytest.mark.parametrize("network", NETWORKS)
def test_all_stages_of_the_networks_can_be_split(four: tuple[Path, dict[str, Outcome]], network: str) -> None:
    assert "its I is a whole backward" not in "".join(four[1][f"{network}-zb_h1"].said)


@pytest.mark.parametrize("network", NETWORKS)
def test_they_learn_and_every_synchronous_scheme_takes_the_same_steps(
    four: tuple[Path, dict[str, Outcome]], network: str
) -> None:
    """Stages begin with other weights where there are more of them; halves draw other numbers for dropout."""
    first: dict[int, list[float]] = {}
    for scheme in NETWORKS[network]:
        steps = losses(four[0], network, scheme)
        assert steps[-1] < 0.97 * steps[0], scheme
        if scheme in with_a_flush() and scheme != "chimera_halving":
            assert steps == pytest.approx(first.setdefault(stages(scheme), steps), rel=1e-9), scheme
    assert first.keys() == ({4, 8} if network == "gpt2" else {4})


def test_stages_that_cannot_share_the_layers_are_refused_in_one_line(tmp_path: Path) -> None:
    done = torchrun(
        compiled(tmp_path, "dapple", D=3, N=3), 3, "--model", str(EXAMPLES / "gpt2.py"), MODEL_SETTINGS="tiny"
    )
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("train.py:")]
    assert "transformer.py:" in line
    assert "gpt2.py:" in line
    assert "in build_stage): ValueError: 3 stages cannot share 8 layers evenly" in line


def test_the_vision_language_model_is_tuned_as_in_one_process(tmp_path: Path) -> None:
    """Frozen stages, adapters, micro-batches without pictures, and patches whose first dimension counts no items."""
    script = EXAMPLES / "vision_language.py"
    directory = compiled(tmp_path, str(script.with_suffix(".chim")))
    ranks, alone = torchrun_script(script, 4, str(directory)), torchrun_script(script, 1, "--alone")
    assert (ranks.returncode, alone.returncode) == (0, 0), ranks.stderr + alone.stderr
    losses = [[float(line.split()[-1]) for line in each.stdout.splitlines()] for each in (ranks, alone)]
    assert len(losses[0]) == 20
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert losses[0][-1] < 0.9 * losses[0][0]


@pytest.mark.parametrize(("example", "workers"), [("rollouts", 2), ("packed", 4)])
def test_updates_of_other_numbers_of_micro_batches_are_those_of_one_process(
    example: str, workers: int, tmp_path: Path
) -> None:
    """Rollouts differ in number, and by copy; packed documents in number and in length."""
    script = EXAMPLES / f"{example}.py"
    directory = compiled(tmp_path, "dapple", asked=(f"D={workers}", "N=1..8"))
    ranks, alone = torchrun_script(script, 4, str(directory)), torchrun_script(script, 1, "--alone")
    assert (ranks.returncode, alone.returncode) == (0, 0), ranks.stderr + alone.stderr
    (here, there) = (
        [[float(number) for number in re.findall(r"-?[\d.]+", line.partition(":")[2])] for line in each.splitlines()]
        for each in (ranks.stdout, alone.stdout)
    )
    assert len(here) >= 20
    assert len({numbers for numbers, *_ in here}) > 2
    assert [row[:-1] for row in here] == [row[:-1] for row in there]
    assert [row[-1] for row in here] == pytest.approx([row[-1] for row in there], rel=1e-9)
