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


# Models of several parts.

PARTS = f"""
import torch
from torch import nn

class Part(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.linear = nn.Linear({WIDTH}, {WIDTH}, bias=False)

    def forward(self, *values, waves=None):
        return self.linear(sum(values) if waves is None else sum(values) + waves)

MAKE

loss = nn.functional.mse_loss

class Clips(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.full(({WIDTH},), float(i))
        return {{"image": x, "sound": x}}, torch.zeros({WIDTH})

dataset = Clips

def optimizer(parameters):
    return torch.optim.Adam(parameters)
"""
STAGES = "def build_stage(stage, num_stages):\n    return Part(stage)"
FROZEN = f"{STAGES}.requires_grad_(stage > 0)"
IN_LAYERS = "def layers():\n    return [lambda: Part(0)] * 4"
TOWERS = """
scheme towers(a = 1, D = 2, N = 2)
feeds image[a-1] -> text[0]
feeds sound[0] -> text[0] as waves
workers a + 1 + D
pipe down {
  stages image[i in 0..a] on i
  stages sound[j in 0..1] on a
  stages text[s in 0..D] on a + 1 + s
  micros m in 0..N
  F(m, image[i]) prefer N + m
  B(m, image[i]) prefer m
  F(m, sound[j]) prefer N + m
  B(m, sound[j]) prefer m
  F(m, text[s]) prefer N + m
  B(m, text[s]) prefer m
}
"""
ON_TOWERS = ("--scheme", "towers.chim", "--micro-batch-size", "4", "--count", "--out", "p.toml")


@pytest.fixture
def towers(tmp_path: Path) -> Path:
    """The directory of a scheme and of model files of two encoders and a text."""
    for name, make in (("parts", STAGES), ("frozen", FROZEN), ("in_layers", IN_LAYERS)):
        (tmp_path / f"{name}.py").write_text(PARTS.replace("MAKE", make))
    (tmp_path / "towers.chim").write_text(TOWERS)
    return tmp_path


def assert_parts(found: ModelProfile, of: str) -> None:
    """Each part is a product, and the first of the text gets two messages."""
    product, message = 2 * 4 * WIDTH * WIDTH, 4 * WIDTH * 4
    for name, group in found.groups.items():
        for stages in group.depths.values() if of == "depths" else [group.layers]:
            for number, stage in enumerate(stages):
                at, last = stage.at[4], name == "text" and number == len(stages) - 1
                is_source = name != "text" and number == 0
                assert (at.times["F"], at.times["B"]) == (product, (1 if is_source else 2) * product)
                assert (at.output, at.gradient) == ((0, 0) if last else (message, message))
                received = 2 if (name, number) == ("text", 0) else 1
                assert at.kept.input == (received + last) * message


def test_each_group_of_a_graph_is_measured_in_each_of_its_depths(profile: Run, towers: Path) -> None:
    ended = profile("stages", "parts.py", *ON_TOWERS, "--set", "a=1,2", "--set", "D=2,4")
    assert ended == Ended(0, "", "")
    found = read(towers / "p.toml").counts
    assert {name: [*group.depths] for name, group in found.groups.items()} == {
        "image": [1, 2],
        "sound": [1],
        "text": [2, 4],
    }
    assert (found.depths, found.layers) == ({}, ())
    assert_parts(found, "depths")


def test_the_layers_of_a_graph_are_those_of_its_groups(profile: Run, towers: Path) -> None:
    assert profile("layers", "in_layers.py", *ON_TOWERS) == Ended(0, "", "")
    found = read(towers / "p.toml").counts
    assert {name: len(group.layers) for name, group in found.groups.items()} == {"image": 1, "sound": 1, "text": 2}
    assert_parts(found, "layers")


def test_a_stage_of_a_graph_takes_time(profile: Run, towers: Path) -> None:
    words = (word for word in ON_TOWERS if word != "--count")
    assert profile("stages", "parts.py", *words, "--rounds", "5", "-q").status == 0
    found = read(towers / "p.toml")
    assert all(stage.at[4].times["B"] > 0 and stage.step > 0 for stage in found.parts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("stages", "parts.py", *ON_TOWERS, "--stages", "4"), "--scheme: it says how many stages there are"),
        (("stages", "parts.py", *ON_TOWERS[2:], "--stages", "4", "--set", "D=2"), "--set D: it goes with --scheme"),
        (("stages", "parts.py", *ON_TOWERS, "--set", "d=2"), "no parameter d"),
        (("stages", "parts.py", *ON_TOWERS[2:], "--scheme", "nosuch"), "nosuch"),
        (("stages", "in_layers.py", *ON_TOWERS), "has layers(): measure these"),
        (("layers", "parts.py", *ON_TOWERS), "has build_stage, which makes whole stages"),
        (("layers", "in_layers.py", *ON_TOWERS, "--set", "D=2,3"), "--set: the layers are those of one size"),
        (("layers", "in_layers.py", *ON_TOWERS, "--set", "D=3"), "has 5 stages, and"),
        (("stages", "parts.py", *ON_TOWERS, "--scheme", "cold.chim"), "image[0] is frozen in cold(a=1, D=2, N=2), and"),
    ],
)
def test_a_graph_that_is_not_that_of_the_model_is_refused(
    profile: Run, towers: Path, arguments: tuple[str, ...], words: str
) -> None:
    text = (
        TOWERS.replace("towers(", "cold(")
        .replace("workers", "frozen image\nworkers")
        .replace("  B(m, image[i]) prefer m\n", "")
    )
    (towers / "cold.chim").write_text(text)
    profile(*arguments).assert_refused(WRONG_COMMAND, words)
    assert not (towers / "p.toml").exists()


def test_an_item_without_an_input_for_a_group_is_refused(profile: Run, towers: Path) -> None:
    lacking = PARTS.replace("MAKE", STAGES).replace('"image": x, ', "")
    (towers / "parts.py").write_text(lacking)
    ended = profile("stages", "parts.py", *ON_TOWERS)
    ended.assert_refused(WRONG_COMMAND, "micro-batch 0 has no input for image: measure on items that have one for each")


def test_a_frozen_encoder_keeps_nothing_and_gets_no_gradients(profile: Run, towers: Path) -> None:
    text = TOWERS.replace("workers", "frozen image\nworkers").replace("  B(m, image[i]) prefer m\n", "")
    (towers / "towers.chim").write_text(text)
    assert profile("stages", "frozen.py", *ON_TOWERS) == Ended(0, "", "")
    (image,) = read(towers / "p.toml").counts.groups["image"].depths[1]
    assert (image.gradients, image.at[4].kept.activations, image.at[4].gradient) == (0, 0, 0)
    assert image.at[4].output == 4 * WIDTH * 4
