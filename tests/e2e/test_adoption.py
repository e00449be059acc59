"""The scripts that the pages show run, and do what the pages say; what a stage may do inside changes no result."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import chimera_ir
from tests.e2e.ranks import Job, Outcome, compiled, run_all
from tests.pages import page_text
from tests.repeatable import also, searching

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ROOT / "docs" / "examples" / "from_pipelining"
EXAMPLES = ROOT / "docs" / "examples"
LOOP = EXAMPLES / "loop.py"
OWN_LOOP = EXAMPLES / "train_cnn.py"
RUNS = {
    "chimera": ("--steps", "30", "--save", "runs/cnn"),
    "dapple": ("--steps", "60", "--resume", "runs/cnn"),
    "valley": ("--steps", "1", "--check"),
}
"""The runs of the tutorial's network: one schedule, then another that continues it, and the reader's own."""
IN_TORCH = Path(__file__).resolve().parent / "loops" / "in_torch.py"
WRITTEN: tuple[tuple[str, dict[str, int]], ...] = (
    *((scheme, {}) for scheme in ("breadth_first", "dapple", "dualpipe_v", "gpipe", "interleaved", "waves", "zb_v")),
    *((scheme, {}) for scheme in ("interleaved_overlap", "v_half", "v_min", "zb_h1", "zb_h2")),
    ("dualpipe_v", {"P": 2}),
    ("interleaved", {"P": 2, "v": 5}),
)
"""Schemes that torch runs on its own runtime; those for two ranks run twice, with FSDP: five stages take turns.

Every second one is written without messages, which torch adds, and the others with them; in a search all are both.
"""
PAGES = ("micro_batches", "coupled_optimizers")
"""Pages whose first block is a script; their programs are among those of `jobs`."""
INSIDE = Path(__file__).resolve().parent / "loops" / "inside.py"
EXACT = also(("checkpoint", "wrapped"), ("aot_eager",))
CAST = ("autocast inside", "autocast around")


def blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page_text(name), re.M | re.S)


def scripts(name: str) -> list[str]:
    """The Python of a page: what begins with an import begins a script."""
    together = "".join(f"\n{block}" for block in blocks(name))
    return [script for script in re.split(r"^(?=import torch\n)", together, flags=re.M) if script.strip()]


def with_one_line_changed() -> str:
    """The script for torch with the line that the page gives in place of the one that makes the schedule."""
    (line,) = (block for block in blocks("from_pipelining.md") if block.startswith("from chimera_runtime import Comp"))
    changed, count = re.subn(r"^schedule = .*$", line, (SCRIPTS / "theirs.py").read_text(), flags=re.M)
    assert count == 1
    return changed


def jobs(folder: Path) -> Iterator[Job]:
    sizes = {"chimera": (4, 4), "dapple": (4, 4), "gpipe": (4, 4), "schedule": (4, 8), "two": (2, 4)}
    for out, (depth, micro_batches) in sizes.items():
        scheme = out if out in ("chimera", "gpipe") else "dapple"
        compiled(folder, scheme, D=depth, N=micro_batches).rename(folder / f"{out}.out")
    compiled(folder, "dapple", asked=("D=4", "N=1..8")).rename(folder / "several.out")
    averages = next(block for block in blocks("checkpoints.md") if "averages=" in block)
    for page in PAGES:
        script, *_ = blocks(f"{page}.md")
        (folder / f"{page}.py").write_text(script)
        yield Job(page, folder / f"{page}.py", (), model=None)
    for number, script in enumerate(scripts("loop.md")):
        file = folder / f"page{number}.py"
        file.write_text(script.replace("other.close()\n", f"{averages}other.close()\n"))
        yield Job(f"page{number}", file, (), model=None)
    for whose in ("theirs", "ours"):
        yield Job(whose, SCRIPTS / f"{whose}.py", (), model=None)
    (folder / "model.py").write_text((SCRIPTS / "model.py").read_text())
    (folder / "one_line.py").write_text(with_one_line_changed())
    yield Job("one_line", folder / "one_line.py", (), model=None)
    yield Job("loop", LOOP, (), model=None)
    yield Job("own_loop", OWN_LOOP, (), model=None)
    compiled(folder, str(EXAMPLES / "valley.chim"), P=4, N=8).rename(folder / "valley.out")
    for out, options in RUNS.items():
        arguments = ("--micro-batch-size", "8", *options, "--log-file", f"{out}.jsonl")
        yield Job(out, folder / f"{out}.out", arguments, model=str(EXAMPLES / "cnn.py"))
    files = tuple(written(folder))
    yield Job("in_torch", IN_TORCH, files, model=None)
    yield Job("from_torch", compiled(folder, next(file for file in files if "dualpipe_v2.compute_comms" in file)))
    for way in (*EXACT, *CAST):
        yield Job(way, INSIDE, (way, str(folder / "dapple.out")), model=None)


def written(folder: Path) -> Iterator[str]:
    """The arguments of IN_TORCH: schedules written for torch, each after the form of its file."""
    for number, (scheme, size) in enumerate(WRITTEN):
        compilation = chimera_ir.compile(scheme, N=8, **size)
        texts = {"compute_only": compilation.torch_csv, "compute_comms": compilation.torch_csv_comms}
        usual, other = [*texts][:: 1 if number % 2 else -1]
        for form in also((usual,), (other,)):
            file = folder / f"{scheme}{number}.{form}.csv"
            file.write_text(texts[form])
            yield from (form, str(file))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("pages")
    return run_all(folder, 4, list(jobs(folder)))


@pytest.mark.parametrize("script", ["page0", "page1", *PAGES])
def test_what_the_pages_on_training_show_runs(runs: dict[str, Outcome], script: str) -> None:
    """The scripts assert what they claim; before the end of the first, the page on checkpoints continues it."""
    runs[script].assert_passed()


def test_torch_trains_with_what_is_written_for_it_as_one_process_does(runs: dict[str, Outcome]) -> None:
    runs["in_torch"].assert_passed()
    assert [said.count(": equal") for said in runs["in_torch"].said] == [(2 if searching() else 1) * len(WRITTEN)] * 4


def test_a_schedule_in_torchs_text_trains_as_one_process_does(runs: dict[str, Outcome]) -> None:
    runs["from_torch"].assert_passed()


def test_the_page_on_training_has_two_scripts() -> None:
    assert len(scripts("loop.md")) == 2


def test_the_loop_of_the_readme_prints_a_line_for_each_update_on_one_rank(runs: dict[str, Outcome]) -> None:
    runs["loop"].assert_passed()
    printed = [said.splitlines() for said in runs["loop"].said]
    assert [len(lines) for lines in printed] == [4, 0, 0, 0]
    assert all(line.startswith("loss ") for line in printed[0])


def assert_says(printed: Sequence[str], shown: Sequence[str]) -> None:
    """Compares lines with those of a page, whose numbers another processor may round otherwise: float32 adds up."""
    number = r"\d+\.\d+"
    assert [re.sub(number, "number", line) for line in printed] == [re.sub(number, "number", line) for line in shown]
    numbers, expected = ([float(text) for text in re.findall(number, "\n".join(lines))] for lines in (printed, shown))
    assert numbers == pytest.approx(expected, rel=0.02)


def test_all_scripts_print_what_the_page_says(runs: dict[str, Outcome]) -> None:
    (printed,) = re.findall(r"^```console\n(step.*?)^```$", page_text("from_pipelining.md"), re.M | re.S)
    for whose in ("theirs", "one_line", "ours"):
        runs[whose].assert_passed()
        lines = [line for line in runs[whose].said[0].splitlines() if line.startswith("step ")]
        assert_says(lines, printed.splitlines())


def test_the_loop_of_the_tutorial_prints_what_the_page_says(runs: dict[str, Outcome]) -> None:
    runs["own_loop"].assert_passed()
    lines = [line for line in runs["own_loop"].said[0].splitlines() if line.startswith("update ")]
    assert_says(lines, re.findall(r"^update .*$", page_text("your_loop.md"), re.M))


def test_the_network_of_the_tutorial_continues_under_another_schedule_as_the_page_says(
    runs: dict[str, Outcome],
) -> None:
    for out in RUNS:
        runs[out].assert_passed()
    shown = dict(re.findall(r"^step +(\d+)/60  loss (\S+)", page_text("your_model.md"), re.M))
    printed = {
        step: loss
        for out in ("chimera", "dapple")
        for step, loss in re.findall(r"^step +(\d+)/\d+  loss (\S+)", runs[out].said[0], re.M)
    }
    assert shown.keys() == {"1", "60"}
    losses = {step: float(loss) for step, loss in printed.items() if step in shown}
    assert losses == pytest.approx({step: float(loss) for step, loss in shown.items()}, rel=0.02)


def test_the_schedule_of_the_tutorial_trains_what_one_process_trains(runs: dict[str, Outcome]) -> None:
    assert "check: passed" in runs["valley"].said[0]


def off(outcome: Outcome) -> Iterator[tuple[float, float]]:
    """How far weights and losses are off on each rank."""
    outcome.assert_passed()
    for printed in outcome.said:
        ((weights, losses),) = re.findall(r"weights off by (\S+), losses by (\S+)$", printed, re.M)
        yield float(weights), float(losses)


@pytest.mark.parametrize("way", EXACT)
def test_checkpointed_and_compiled_stages_train_as_plain_ones(runs: dict[str, Outcome], way: str) -> None:
    assert set(off(runs[way])) == {(0.0, 0.0)}


@pytest.mark.parametrize("way", CAST)
def test_autocast_is_on_in_the_stages(runs: dict[str, Outcome], way: str) -> None:
    """As far off as bfloat16 rounds, and not at all if it were off."""
    assert all(0 < weights < 0.01 and 0 < losses < 0.02 for weights, losses in off(runs[way]))
