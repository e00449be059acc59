"""The commands for a first hour: a file to begin with, an explanation, a picture in a browser."""

import json
import runpy
import webbrowser
from pathlib import Path

import pytest
from click.testing import CliRunner

from chimera_ir import options
from chimera_ir.commands import view_command as viewing
from chimera_ir.commands.common import WRONG_COMMAND
from chimera_ir.commands.completion import exceptions
from chimera_ir.commands.explain_command import explain_command
from chimera_ir.commands.new_command import new_command
from chimera_ir.commands.view_command import PICTURES, view_command
from chimera_ir.diagnostics.model import example, messages
from tests.unit.command import Run

# chimera new


@pytest.fixture(autouse=True)
def _empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def new(name: str, status: int = 0) -> str:
    """What the command says of a file."""
    result = CliRunner().invoke(new_command, [name])
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize(("name", "scheme"), [("mine.chim", "mine"), ("a-b.chim", "a_b"), ("when.chim", "when_")])
def test_a_new_scheme_compiles_and_has_the_name_of_its_file(run: Run, name: str, scheme: str) -> None:
    assert f"chimera compile {name}" in new(name)
    ended = run(name, "D=2", "--emit", "plan")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith(f"plan {scheme}\n")
    assert f"chimera compile {name} " in Path(name).read_text()


def test_a_new_scheme_is_that_of_the_library_to_begin_with() -> None:
    new("mine.chim")
    mine, baseline = (options.compile(text).plan for text in (Path("mine.chim"), "1f1b"))
    assert mine.operations == baseline.operations


def test_a_new_model_has_everything_that_training_takes_and_learns() -> None:
    torch = pytest.importorskip("torch")
    assert "chimera run chimera --micro-batch-size 8 --model my_model.py" in new("my_model.py")
    assert "--model my_model.py" in Path("my_model.py").read_text()
    torch.manual_seed(0)
    model = runpy.run_path("my_model.py")
    stack = torch.nn.Sequential(*(layer() for layer in model["layers"]()))
    optimizer, items = model["optimizer"](stack.parameters()), model["dataset"]()
    losses = []
    for step in range(20):
        inputs, targets = zip(*(items[16 * step + i] for i in range(16)), strict=True)
        loss = model["loss"](stack(torch.stack(inputs)), torch.stack(targets))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 4


def test_a_loop_is_for_the_model_beside_it() -> None:
    assert "torchrun --nproc-per-node=4 loop.py" in new("loop.py")
    assert "from model import dataset, layers, loss, optimizer" in Path("loop.py").read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.py", "model.py exists already, and is not overwritten"),
        ("model.txt", "a model ends in .py, a scheme in .chim"),
        ("nowhere/model.py", "No such file or directory"),
        ("", "an empty path"),
    ],
)
def test_what_cannot_be_written_is_refused_and_nothing_changes(name: str, words: str) -> None:
    Path("model.py").write_text("mine")
    assert words in new(name, WRONG_COMMAND)
    assert Path("model.py").read_text() == "mine"
    assert [path.name for path in Path().iterdir()] == ["model.py"]


# chimera explain


def explain(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(explain_command, words)
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize("written", ["CH301", "ch301", "301", "error[CH301]"])
def test_a_code_is_explained_with_an_example_and_its_help(written: str) -> None:
    text = explain(written)
    assert text.startswith("error CH301\n\nTwo operations of one worker on one clock.\n")
    assert "    scheme conflict(D = 2, N = 2)\n" in text
    assert "    error[CH301]: worker 0 has two operations on clock 2" in text
    assert "= help: give one of the two another clock" in text
    assert "CH309" not in text


def test_a_message_that_no_short_text_gets_is_explained_by_its_pattern() -> None:
    text = explain("CH305")
    assert "It says: pipe <pipe> places stage <stage> on worker <worker>, but there are workers 0 to <last>" in text
    assert "To mend it: place it on one of the workers 0 to <last>" in text


def test_an_error_of_a_rank_is_explained_by_its_name() -> None:
    assert explain("peerlost").startswith("chimera_runtime.errors.PeerLost\n\nA wait for another rank failed")


@pytest.mark.parametrize(("code", "advice"), [("CH999", "chimera explain lists all"), ("PearLost", "PeerLost?")])
def test_an_unknown_code_is_refused(code: str, advice: str) -> None:
    assert f"no message has the code '{code}'" in (text := explain(code, status=WRONG_COMMAND))
    assert advice in text


def test_a_group_lists_its_codes() -> None:
    names = [line.split()[0] for line in explain("CH3").splitlines()]
    assert names == [code for code in messages() if code.startswith("CH3")]
    assert explain("ch3xx") == explain("CH3")


def test_without_a_code_every_message_and_error_is_listed() -> None:
    names = [line.split()[0] for line in explain().splitlines()]
    assert names == [*messages(), *exceptions()]
    assert [*json.loads(explain("--json"))] == names
    entry = json.loads(explain("CH301", "--json"))
    assert (entry["code"], entry["severity"], entry["example"]["file"]) == ("CH301", "error", "conflict.chim")


def test_an_example_gets_the_message_that_it_is_for() -> None:
    for code in ("CH101", "CH217", "CH318", "CH403", "CH501", "CH710"):
        shown = example(code)
        assert f"[{code}]" in shown.output.splitlines()[0]
        assert shown.text


# chimera view


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that a browser is asked to open."""
    addresses: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: addresses.append(address) or True)
    monkeypatch.setattr(viewing.sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    return addresses


def pictures(*names: str) -> None:
    for name in names:
        path = Path("some.out", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")


def test_a_browser_opens_the_best_picture_that_there_is(opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    for name in reversed(PICTURES):
        pictures(name)
        assert CliRunner().invoke(view_command, ["some.out"]).output == f"opened some.out/{name}\n"
        assert opened[-1] == Path("some.out", name).resolve().as_uri()
    assert CliRunner().invoke(view_command, ["some.out", "-q"]).output == ""


def test_without_a_display_the_path_is_printed(opened: list[str]) -> None:
    pictures("timeline.svg")
    assert CliRunner().invoke(view_command, ["some.out"]).output == "some.out/timeline.svg\n"
    assert CliRunner().invoke(view_command, ["some.out", "-q"]).output == "some.out/timeline.svg\n"
    assert opened == []


@pytest.mark.parametrize(
    ("directory", "words"),
    [
        ("some", "such as some.out"),
        ("other", "no such directory"),
        ("empty", "there is no picture in it"),
        ("", "empty"),
    ],
)
def test_where_there_is_no_picture_the_reason_is_said(opened: list[str], directory: str, words: str) -> None:
    pictures("timeline.svg")
    Path("empty").mkdir()
    result = CliRunner().invoke(view_command, [directory])
    assert (result.exit_code, opened) == (WRONG_COMMAND, [])
    assert words in result.output
