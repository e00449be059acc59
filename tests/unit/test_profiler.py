"""chimera-profile as a user calls it, in one process."""

import importlib.util
import stat
import sys
from pathlib import Path

import pytest

from chimera_ir import progress
from chimera_ir.commands import common, profile_command
from chimera_ir.commands.common import INTERRUPTED, WRONG_COMMAND
from chimera_ir.measure import stages as samples
from chimera_ir.profile.costs import ModelProfile, WorkProfile, stages_of
from chimera_ir.profile.document import warnings
from chimera_ir.profile.read import read_profile
from chimera_ir.source import Source
from tests.unit.command import Ended, Run, on_a_terminal
from tests.unit.conftest import calling
from tests.unit.test_measure import LAYERS as MODEL_LAYERS
from tests.unit.test_measure import LINEAR, WIDTH, assert_linear

COUNTED = ("stages", "linear.py", "--stages", "2", "--micro-batch-size", "4", "--count", "--out", "p.toml")
ROOT = Path(__file__).resolve().parents[2]
RAISING = ROOT / "tests" / "e2e" / "models" / "raising.py"
TIMED = ("stages", str(RAISING), "--stages", "2", "--micro-batch-size", "4", "--rounds", "5", "--out", "p.toml")
FUNCTIONS = {"import": "<module>", "to": "_apply"} | {
    name: name
    for name in (
        *("build_stage", "dataset", "__len__", "__getitem__", "optimizer"),
        *("step", "forward", "backward", "loss"),
    )
}
"""Where raising.py can raise an error, and the function that is running then."""


@pytest.fixture
def profile(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Calls `chimera-profile` in a directory with two model files."""
    (tmp_path / "linear.py").write_text(LINEAR)
    (tmp_path / "layers.py").write_text("from functools import partial\n" + LAYERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(progress, "EVERY", 3600.0)
    return calling(profile_command.main, "chimera-profile", capsys, monkeypatch)


def read(file: Path) -> ModelProfile | WorkProfile:
    return read_profile(Source(file.name, file.read_text()))


def test_a_counted_profile_reads_back(profile: Run, tmp_path: Path) -> None:
    ended = profile(*COUNTED, "--stages", "1,3", "--micro-batch-size", "1, 2")
    assert ended == Ended(0, "", "")
    found = read(tmp_path / "p.toml")
    assert found.counts.name == "linear"
    assert sorted(found.counts.depths) == [1, 2, 3]
    for depth, stages in found.counts.depths.items():
        for number, stage in enumerate(stages):
            assert sorted(stage.at) == [1, 2, 4]
            assert_linear(stage, number == depth - 1, number == 0)


LAYERS = LINEAR.replace(
    "def build_stage(stage, num_stages):\n    return nn.Sequential(*(", "def layers():\n    return [partial("
).replace(
    f"nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({MODEL_LAYERS})))",
    f"nn.Linear, {WIDTH}, {WIDTH}, bias=False)] * 6",
)
BY_LAYER = ("layers", "layers.py", "--micro-batch-size", "4,8", "--out", "p.toml")


def test_stages_follow_from_counted_layers_to_the_byte_and_the_operation(profile: Run, tmp_path: Path) -> None:
    assert profile(*BY_LAYER, "--count") == Ended(0, "", "")
    whole = read(tmp_path / "p.toml")
    assert (whole.counts.depths, len(whole.counts.layers)) == ({}, 6)
    sizes = ("--micro-batch-size", "4,8", "--out", "s.toml", "--count")
    assert profile("stages", "layers.py", "--stages", "2,3", *sizes) == Ended(0, "", "")
    cut = read(tmp_path / "s.toml")
    for depth, split in ((2, (0, 3)), (3, (0, 2, 4))):
        assert stages_of(whole.counts.layers, split) == cut.counts.depths[depth]
        assert cut.counts.splits[depth] == split


def test_stages_of_a_split_are_those_of_its_layers_and_a_plan_of_them_says_so(profile: Run, tmp_path: Path) -> None:
    assert profile(*BY_LAYER, "--count") == Ended(0, "", "")
    whole = read(tmp_path / "p.toml")
    sizes = ("--micro-batch-size", "4,8", "--out", "s.toml", "--count")
    assert profile("stages", "layers.py", "--split", "0,1,5", *sizes) == Ended(0, "", "")
    cut = read(tmp_path / "s.toml")
    assert cut.counts.depths == {3: stages_of(whole.counts.layers, (0, 1, 5))}
    assert cut.counts.splits == {3: (0, 1, 5)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "Missing option '--stages', or '--split' for a file with layers()"),
        (("--split", "0,2", "--stages", "3"), "--split 0,2: it begins 2 stages; leave --stages out"),
        (("--split", "0;2"), "--split 0;2: list the first layer of each stage"),
        (("--split", "1,2"), "split 1,2: it lists the first layer of each stage, so it begins with 0"),
        (("--split", "0,9"), "split 0,9: there is no layer 9; there are the layers 0 to 5"),
    ],
)
def test_what_is_no_split_is_refused(profile: Run, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    refused = profile("stages", "layers.py", *options, "--micro-batch-size", "4", "--count", "--out", "p.toml")
    refused.assert_refused(WRONG_COMMAND, words)


def test_timed_layers_are_timed_one_by_one(profile: Run, tmp_path: Path) -> None:
    ended = profile(*BY_LAYER, "--rounds", "5")
    assert ended.status == 0
    assert all(line.startswith("warning: too noisy to use: ") for line in ended.err.splitlines())
    found = read(tmp_path / "p.toml")
    assert len(found.layers) == 6
    assert min(found.overhead["F"], found.overhead["B"]) > 0
    assert found.overhead["recomputing"] > found.overhead["B"]
    for layer in found.layers:
        assert layer.weights == WIDTH * WIDTH * 4
        assert layer.step > 0
        for at in layer.at.values():
            assert min(at.times["F"], at.times["B"], at.times["recomputing"]) > 0


def test_layers_of_a_file_with_stages_are_refused(profile: Run) -> None:
    refused = profile("layers", "linear.py", "--micro-batch-size", "4", "--count", "--out", "p.toml")
    refused.assert_refused(WRONG_COMMAND, "has build_stage, which makes whole stages: layers are those of")


def test_a_timed_profile_reads_back_and_only_warns_of_noise(profile: Run, tmp_path: Path) -> None:
    arguments = [each for each in COUNTED if each != "--count"]
    ended = profile(*arguments, "--rounds", "5", "--threads", "1")
    assert (ended.status, ended.out) == (0, "")
    assert all(line.startswith("warning: too noisy to use: ") for line in ended.err.splitlines())
    found = read(tmp_path / "p.toml")
    assert "1 thread," in found.note
    for number, stage in enumerate(found.depths[2]):
        assert_linear(stage, number == 1, number == 0)
        assert stage.at[4].noise is not None
        assert stage.step > 0
        assert stage.step_noise is not None


def test_what_is_too_noisy_is_marked_for_whoever_reads_the_file(
    profile: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "NOISY", -1.0)
    ended = profile(*(each for each in COUNTED if each != "--count"), "--rounds", "5")
    (said,) = ended.err.splitlines()
    assert said.startswith("warning: too noisy to use: 17 of 17 figures, "), "5 passes of 3 stages, and two steps"
    text = (tmp_path / "p.toml").read_text()
    (written,) = warnings(Source("p", text))
    assert said == f"warning: {written.removeprefix('p: ')}; p.toml lists them"
    assert sum(line.startswith("# ") and " of stage 1 of 2: " in line for line in text.splitlines()) == 1
    assert sum(" of stage 1 of 2, micro-batch size 4: " in line for line in text.splitlines()) == 5


def test_what_is_freed_is_kept_as_by_a_rank(profile: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    monkeypatch.setattr("chimera_ir.measure.stages.keep_memory", lambda: kept.append(True))
    assert profile(*COUNTED).status == 0
    assert not kept
    assert profile(*(each for each in COUNTED if each != "--count"), "--rounds", "5").status == 0
    assert kept


def test_its_own_file_is_written_over_and_no_other_without_force(profile: Run, tmp_path: Path) -> None:
    out = tmp_path / "p.toml"
    out.write_text("# by hand\n")
    profile(*COUNTED).assert_refused(WRONG_COMMAND, "--out p.toml: exists", "--force")
    assert out.read_text() == "# by hand\n"
    assert profile(*COUNTED, "--force").status == 0
    first = out.read_text()
    assert first.startswith("# Written by `chimera profile`")
    assert profile(*COUNTED).status == 0
    assert out.read_text() == first
    out.write_text(first.split("\n", 1)[1])
    assert profile(*COUNTED).status == WRONG_COMMAND, "whoever takes the first line away keeps the file"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["layers.py", "linear.py", "p.toml"]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(profile: Run, tmp_path: Path) -> None:
    (tmp_path / "linear.py").write_text("raise SystemExit('was run')")
    profile(*COUNTED[:-1], "no/such/folder.toml").assert_refused(WRONG_COMMAND, "folder.toml", "No such file")
    assert not (tmp_path / "no").exists()


def test_a_written_file_has_the_usual_rights(profile: Run, tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    assert profile(*COUNTED).status == 0
    assert stat.S_IMODE((tmp_path / "p.toml").stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)


def test_a_model_file_with_a_mistake_is_told_by_its_line(profile: Run, tmp_path: Path) -> None:
    (tmp_path / "linear.py").write_text("import torch\nx = torch.nothing\n")
    ended = profile(*COUNTED)
    assert (ended.status, ended.out) == (WRONG_COMMAND, "")
    assert ended.err.startswith(
        f"Error: importing the model file: {tmp_path}/linear.py:2 in <module>: AttributeError: "
    )
    (tmp_path / "linear.py").write_text(LINEAR.replace("def loss", "def lost"))
    profile(*COUNTED).assert_refused(WRONG_COMMAND, "lacks the function loss(output, target)")


@pytest.mark.parametrize("kind", ["plain", "exit", "unprintable"])
@pytest.mark.parametrize("where", FUNCTIONS)
def test_an_error_in_any_function_of_the_model_file_is_told_with_the_users_traceback(
    profile: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, kind: str
) -> None:
    monkeypatch.setenv("RAISE", f"{where}:{kind}")
    ended = profile(*TIMED)
    assert (ended.status, ended.out) == (WRONG_COMMAND, "")
    headline, *trace = ended.err.splitlines()
    assert headline.startswith("Error: ")
    assert f"{RAISING}:" in headline
    assert trace[0] == "Traceback (most recent call last):"
    assert f"in {FUNCTIONS[where]}" in trace[1]
    assert ended.err.count("Traceback") == 1
    assert not (tmp_path / "p.toml").exists()


@pytest.mark.parametrize("where", FUNCTIONS)
def test_ctrl_c_in_any_function_of_the_model_file_ends_it(
    profile: Run, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("RAISE", f"{where}:interrupt")
    assert profile(*TIMED) == Ended(INTERRUPTED, "", "\n")


@pytest.mark.parametrize("what", ["collate", "rate", "shape"])
def test_an_error_of_torch_in_what_the_model_file_gives_it_is_the_model_files(
    profile: Run, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("RAISE", what)
    ended = profile(*TIMED)
    assert (ended.status, ended.out) == (WRONG_COMMAND, "")
    assert "fault of the compiler" not in ended.err


@pytest.mark.parametrize("value", ["0", "x", "1.5", "-2", "4;8"])
def test_sizes_are_positive_whole_numbers(profile: Run, value: str) -> None:
    profile(*COUNTED, "--micro-batch-size", value).assert_refused(WRONG_COMMAND, "--micro-batch-size", "4,8")


def test_links_without_torchrun_say_how_to_start_them(profile: Run) -> None:
    profile("links", "--out", "c.toml").assert_refused(
        WRONG_COMMAND, "torchrun --nproc-per-node=4 --no-python chimera-profile links --out cluster.toml"
    )


def test_without_torch_the_extra_is_named(profile: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(common, "find_spec", lambda name: None if name == "torch" else found(name))
    profile(*COUNTED).assert_refused(WRONG_COMMAND, "pip install 'chimera_ir[train]'")


def test_who_measures_on_a_terminal_sees_how_far_it_is_and_a_pipe_sees_nothing(tmp_path: Path) -> None:
    (tmp_path / "linear.py").write_text(LINEAR)
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from chimera_ir.start import profile; profile()"
    ended = on_a_terminal(program, *COUNTED, cwd=tmp_path, env={"TERM": "xterm-256color"})
    assert ended.status == 0
    assert "6/6" in ended.out
    assert "stage 0 of 2, optimizer" in ended.out
