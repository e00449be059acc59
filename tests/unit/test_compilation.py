"""The levels from Python: made when they are asked for, the same as the command's, with errors that are complete."""

import json
import re
import subprocess
import sys
from fractions import Fraction
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import chimera_ir
from chimera_ir import library, notebook
from chimera_ir.answer import Level, produce
from chimera_ir.compilation import Compilation
from chimera_ir.errors import NoSuchLevel, OptionError, ParameterError, TextError, TooLarge, UnreadableText
from chimera_ir.ir.text.printer import show
from chimera_ir.lower import lower
from chimera_ir.options import Options
from chimera_ir.request import Request
from chimera_ir.source import Source
from chimera_ir.syntax import formatter
from tests.pages import SMALL
from tests.patience import PATIENCE
from tests.unit.command import TINY, Run, contents

ROOT = Path(__file__).resolve().parents[2]
LEVELS = ("scheme", "plan", "schedule", "program", "verified", "evaluation", "timeline", "report", "prediction")
LEVELS += ("summary", "replay", "scripts")
WARNED = "scheme warned(D = 2) workers D let unused = 3\n" + TINY.split("workers D", 1)[1]


def made(compilation: Compilation) -> set[str]:
    """What a compilation has made so far, its helpers aside."""
    return {name for name in vars(compilation) if not name.startswith("_")} - {"request", "warn", "tell"}


# Lazy.


def test_a_schedule_is_made_without_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "lower", lambda *_, **__: pytest.fail("lowered"))
    compilation = chimera_ir.compile("chimera", D=4)
    assert made(compilation) == set()
    assert compilation.plan.header == compilation.schedule.header
    assert made(compilation) == set()
    with pytest.raises(pytest.fail.Exception, match="lowered"):
        assert compilation.program


def test_each_level_is_made_once() -> None:
    compilation = chimera_ir.compile("chimera", D=4)
    for level in ("scheme", "plan", "schedule", "program", "verified", "timeline", "report", "files"):
        assert getattr(compilation, level) is getattr(compilation, level)


def test_a_compilation_cannot_be_changed() -> None:
    compilation: Any = chimera_ir.compile("chimera")
    with pytest.raises(AttributeError):
        compilation.request = Request(Source("a.chim", TINY))


def imported(program: str) -> set[str]:
    """The modules that a program imports."""
    command = [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    return set(done.stdout.split())


def test_the_package_by_itself_imports_nothing() -> None:
    assert {name for name in imported("import chimera_ir") if name.startswith("chimera_ir.")} == set()


@pytest.mark.full
def test_what_a_level_does_not_need_is_not_imported() -> None:
    schedule = imported("import chimera_ir; chimera_ir.compile('chimera', D=4).schedule")
    assert not schedule & {"rich", "jinja2", "click", "chimera_ir.codegen", "chimera_ir.predict", "chimera_ir.profile"}


# The same as the command.


def test_every_public_name_is_there() -> None:
    for name in chimera_ir.__all__:
        assert getattr(chimera_ir, name)
    assert {*chimera_ir.__all__} == {*dir(chimera_ir)}
    with pytest.raises(AttributeError, match="no attribute 'compiel'"):
        assert chimera_ir.compiel  # type: ignore[attr-defined]


@pytest.mark.full
@pytest.mark.parametrize("name", library.names())
def test_every_level_is_what_the_command_emits(run: Run, name: str) -> None:
    compilation = chimera_ir.compile(name)
    assert run(name, "--emit", "ast").out == formatter.show(compilation.scheme)
    assert run(name, "--emit", "plan").out == show(compilation.plan)
    assert run(name, "--emit", "schedule").out == show(compilation.schedule)
    assert run(name, "--emit", "program").out == show(compilation.program)
    assert run(name, "--emit", "report").out == compilation.report_json


@pytest.mark.parametrize(
    ("arguments", "parameters", "options"),
    [
        ((), {}, {}),
        (("--set", "D=2", "--set", "N=6"), {"D": 2, "N": 6}, {}),
        (
            ("--cost", "B=2.5", "--recompute", "--sync", "lazy"),
            {},
            {"costs": {"B": 2.5}, "recompute": True, "sync": "lazy"},
        ),
        (("--communicators", "pair"), {}, {"communicators": "pair"}),
        (
            ("--profile", SMALL["profile"], "--cluster", SMALL["cluster"], "--micro-batch-size", 8, "--copies", 2),
            {"N": 8},
            {**SMALL, "copies": 2},
        ),
    ],
    ids=["plain", "parameters", "options", "communicators", "predicted"],
)
def test_what_is_written_is_what_the_command_writes(
    run: Run, tmp_path: Path, arguments: tuple[object, ...], parameters: dict[str, int], options: dict[str, Any]
) -> None:
    settings = [word for name, value in parameters.items() for word in ("--set", f"{name}={value}")]
    assert run("chimera", *arguments, *([] if "--set" in arguments else settings), "--out", "a").status == 0
    compilation = chimera_ir.compile("chimera", options=Options(**options), **parameters)
    compilation.write("b")
    compilation.write(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert (compilation.prediction is None) == ("profile" not in options)
    assert {"schedule.html", "timeline.svg"} <= compilation.files.keys()


@pytest.mark.parametrize("level", ["plan", "schedule", "program"])
@pytest.mark.parametrize("name", ["chimera", "gpipe", "pipedream"])
def test_the_text_of_a_level_compiles_to_the_same(tmp_path: Path, name: str, level: str) -> None:
    compilation = chimera_ir.compile(name)
    (tmp_path / "a.sir").write_text(show(getattr(compilation, level)))
    for text in (tmp_path / "a.sir", str(tmp_path / "a.sir"), Source("a.sir", (tmp_path / "a.sir").read_text())):
        again = chimera_ir.compile(text)
        assert again.program == compilation.program
        assert again.timeline.makespan == compilation.report.makespan


@pytest.mark.parametrize(
    ("text", "missing"), [("plan", ["ast"]), ("schedule", ["ast", "plan"]), ("program", ["ast", "plan"])]
)
def test_a_level_above_the_one_of_the_text_is_refused(run: Run, tmp_path: Path, text: str, missing: list[str]) -> None:
    (tmp_path / "a.sir").write_text(show(getattr(chimera_ir.compile("chimera"), text)))
    compilation = chimera_ir.compile("a.sir")
    for level in {*Level} - {Level.TORCH_CSV, Level.TORCH_CSV_COMMS}:
        if level.value not in missing:
            assert produce(compilation, level)
            continue
        with pytest.raises(NoSuchLevel, match=f"^a.sir enters below the level {level.value}; ask for a later one$"):
            produce(compilation, level)
        assert (
            run("a.sir", "--emit", level.value).err == f"Error: --emit {level.value}: a.sir enters below that level\n"
        )


# What is shown.


def test_a_compilation_is_one_short_line_with_what_is_known_of_its_proof() -> None:
    compilation = chimera_ir.compile("chimera", D=8, N=16)
    assert repr(compilation) == "<Compilation of chimera.chim, D=8, N=16: not proven yet>"
    assert compilation.report
    assert repr(compilation) == "<Compilation of chimera.chim, D=8, N=16: proven>"
    assert repr(chimera_ir.compile(Source("a.chim", TINY))) == "<Compilation of a.chim: not proven yet>"
    by_turns = chimera_ir.compile("dapple", D=8, N=2048)
    assert by_turns.report
    assert repr(by_turns) == "<Compilation of dapple.chim, D=8, N=2048: proven>"
    refused = chimera_ir.compile("chimera", D=3)
    for _ in range(2):
        with pytest.raises(TextError):
            _ = refused.program
        assert repr(refused) == "<Compilation of chimera.chim, D=3: refused, CH233>"


@pytest.mark.parametrize("name", ["chimera", "pipedream"])
def test_each_level_is_one_short_line(name: str) -> None:
    compilation = chimera_ir.compile(name, options=Options(**SMALL))
    made = {name: getattr(compilation, name) for name in LEVELS}
    assert [name for name, level in made.items() if len(repr(level)) > 120 or "\n" in repr(level)] == []
    title = compilation.schedule.header.title
    assert [name for name, level in made.items() if title not in repr(level)] == ["scheme", "summary", "scripts"]


@pytest.mark.parametrize("name", library.names())
def test_every_name_in_report_json_is_an_attribute_of_the_report(name: str) -> None:
    report = chimera_ir.compile(name).report
    others = {"verified", "communicators", "synchronisation", "baseline", "groups", "feeds"}
    entries = {key: value for key, value in report.as_json().items() if key not in others}
    attributes = json.dumps({key: getattr(report, key) for key in entries}, default=float)
    assert json.loads(attributes) == entries
    for key, value in report.as_json()["baseline"].items():
        assert json.loads(json.dumps(getattr(report.baseline, key), default=float)) == value
    assert {*report.verified} == {rule.replace("_", "-") for rule in report.as_json()["verified"]}
    assert [choice.name for choice in report.communicators] == list(report.as_json()["communicators"])
    assert len(report.synchronisation) == len(report.as_json()["synchronisation"])


def test_warnings_are_those_that_the_command_prints(run: Run, tmp_path: Path) -> None:
    (tmp_path / "warned.chim").write_text(WARNED)
    compilation = chimera_ir.compile("warned.chim")
    assert re.match(r"warning\[CH217\]", compilation.warnings[0])
    assert run("warned.chim", "--emit", "plan").err == "".join(f"{warning}\n" for warning in compilation.warnings)
    assert chimera_ir.compile("chimera").warnings == ()


def test_warnings_are_told_even_where_an_error_follows() -> None:
    told: list[str] = []
    wrong = WARNED.replace("B(m, s) @ 2*D-1 - s", "B(m, s) @ s")
    compilation = Compilation(Request(Source("a.chim", wrong)), warn=lambda warning: told.append(warning.code))
    with pytest.raises(TextError):
        assert compilation.schedule
    assert told == ["CH217"]


# Errors.


def said(text: Any, options: Any = None, **parameters: Any) -> str:
    with pytest.raises(chimera_ir.CompileError) as error:
        assert chimera_ir.compile(text, options=options, **parameters).report
    return str(error.value)


def test_an_error_in_a_text_is_what_the_command_prints(run: Run) -> None:
    for path in sorted((ROOT / "tests" / "errors" / "middle").glob("*.*im"))[:12]:
        ended = run(path, "--emit", "program")
        if ended.status:
            assert ended.err.endswith(f"{said(str(path))}\n")
    assert run("chimera", "--set", "D=3").err == f"{said('chimera', D=3)}\n"


def test_an_error_has_its_diagnostics() -> None:
    with pytest.raises(TextError) as error:
        assert chimera_ir.compile("chimera", D=3).plan
    assert [diagnostic.code for diagnostic in error.value.diagnostics] == ["CH233"]
    assert "\033[" in error.value.rendered(color=True)


def test_an_error_in_a_profile_names_its_file() -> None:
    assert "small.profile.toml:" in said("chimera", Options(**SMALL), D=2)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"d": 8}, "the scheme has no parameter d (did you mean D?); its parameters are D, N, f"),
        ({"D": "8"}, "D is '8': a parameter is an integer, as in D=8"),
        ({"D": True}, "D is True: a parameter is an integer, as in D=8"),
        ({"D": 8.0}, "D is 8.0: a parameter is an integer, as in D=8"),
        ({"D": None}, "D is None: a parameter is an integer, as in D=8"),
        ({"D": 2**70}, "the value of D is beyond 2**63 - 1 in size"),
        ({"copies": 2}, "copies is no parameter but an option: write options=Options(copies=...)"),
    ],
)
def test_a_wrong_parameter_is_refused_by_the_call(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(chimera_ir.CompileError, match=f"^{re.escape(words)}$"):
        chimera_ir.compile("chimera", **parameters)


def test_of_a_parameter_that_there_is_not_the_message_says_which_one_is_the_number_of_workers() -> None:
    with pytest.raises(chimera_ir.CompileError, match=r"no parameter D; its parameters are P, N; P is the number of"):
        chimera_ir.compile("zb_v", D=4)
    with pytest.raises(chimera_ir.CompileError, match=r"its parameters are E, D, N$"):
        chimera_ir.compile("encoder_decoder", P=4)


def test_a_number_of_another_library_is_an_integer() -> None:
    class Number:
        def __index__(self) -> int:
            return 8

    assert chimera_ir.compile("chimera", D=Number()).schedule.header.workers == 8  # type: ignore[arg-type]


def test_an_ir_text_takes_neither_parameters_nor_changes(tmp_path: Path) -> None:
    text = Source("a.sir", show(chimera_ir.compile("chimera").schedule))
    with pytest.raises(ParameterError, match="has no parameters to set"):
        chimera_ir.compile(text, D=4)
    with pytest.raises(OptionError, match=r"^recompute, sync: .* says both itself"):
        chimera_ir.compile(text, options=Options(recompute=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chimer", "did you mean chimera?"),
        ("nowhere.chim", "No such file or directory"),
        (Path("a.txt"), "a scheme ends in .chim, an IR text in .sir"),
        (8, "8 is no text: give a scheme's name, the path of a file, or a Source"),
    ],
)
def test_a_text_that_is_not_there_is_told(text: Any, words: str) -> None:
    with pytest.raises(UnreadableText, match=re.escape(words)):
        chimera_ir.compile(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"costs": {"Q": 1}}, "costs is 'Q': the kinds are F, B, I, W"),
        ({"costs": {"B": -1}}, "costs: the cost of B is an integer, a decimal or a fraction (2, 0.5, 1/3), not '-1'"),
        ({"costs": {"B": 0}}, "the cost of B is greater than 0"),
        ({"costs": {"B": True}}, "costs['B'] is True: it is a number"),
        ({"costs": 2}, "costs is 2: write them as in"),
        ({"recompute": 1}, "recompute is 1: it is True or False"),
        ({"sync": "eagre"}, "sync is 'eagre': it is one of lazy, eager, eager_opt"),
        ({"communicators": "single"}, "communicators is 'single': it is one of directed, pair"),
        ({"copies": 0}, "copies is 0: it is a whole number from 1 to 1,000,000"),
        ({"micro_batch_size": True}, "micro_batch_size is True: it is a whole number from 1"),
        ({"layout": "ring"}, "layout is 'ring': it is one of pipeline, replica"),
        ({"profile": 3}, "profile is 3: it is the path of a file"),
        ({"max_operations": 0}, "max_operations is 0: it is a whole number from 1 on"),
    ],
)
def test_a_wrong_option_is_refused_with_what_it_can_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=re.escape(words)):
        Options(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"copies": 2}, "copies: a prediction needs profile, cluster and micro_batch_size together"),
        ({**SMALL, "costs": {"B": 2}}, "costs, profile: both say how long operations take; leave one of them out"),
        ({**SMALL, "profile": "no.toml"}, "profile no.toml: No such file or directory"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(chimera_ir.CompileError, match=f"^{re.escape(words)}"):
        chimera_ir.compile("chimera", options=Options(**options))


def test_options_are_options() -> None:
    with pytest.raises(OptionError, match=re.escape("options is {'copies': 2}: write options=chimera_ir.Options(...)")):
        chimera_ir.compile("chimera", options={"copies": 2})  # type: ignore[arg-type]


def test_costs_are_exact() -> None:
    for cost in (0.1, "0.1", "1/10", Fraction(1, 10)):
        assert Fraction(1, 10) == Options(costs={"B": cost}).cost_model()["B"]


def test_what_is_too_large_says_which_option_raises_the_limit() -> None:
    text = Source("a.sir", show(chimera_ir.compile("chimera").schedule))
    with pytest.raises(
        TooLarge, match=r"32 operations, and the limit is 31; options=Options\(max_operations=32\) raises it"
    ):
        assert chimera_ir.compile(text, options=Options(max_operations=31)).schedule


def test_a_directory_of_the_users_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(chimera_ir.CompileError, match=f"^{re.escape(str(tmp_path))}: exists and was not written by"):
        chimera_ir.compile("chimera").write(tmp_path)
    assert contents(tmp_path) == {"mine.txt": b"mine"}


# What a notebook shows.


def test_a_notebook_shows_a_frame_whose_scripts_cannot_reach_it() -> None:
    compilation = chimera_ir.compile("chimera", D=8)
    read: list[tuple[str, dict[str, str | None]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: read.append((tag, dict(attributes)))  # type: ignore[method-assign]
    parser.feed(compilation._repr_html_())
    ((tag, attributes),) = read
    assert (tag, attributes["title"], attributes["sandbox"]) == ("iframe", repr(compilation), "allow-scripts")
    assert attributes["srcdoc"] == compilation.page, "to the letter, as the policy has hashes"


@pytest.mark.parametrize("text", ["scheme a(N = 4) pipe <i>", TINY.replace("2*D-1 - s", "s")])
def test_a_notebook_shows_the_page_of_a_text_with_a_mistake(text: str) -> None:
    compilation = chimera_ir.compile(Source("<b>.chim", text))
    with pytest.raises(TextError) as error:
        assert compilation.report
    assert compilation._repr_html_() == notebook.frame(compilation.page_of_mistake(error.value), repr(compilation))


def test_a_notebook_shows_the_message_of_any_other_error() -> None:
    text = Source("<b>.sir", show(chimera_ir.compile("dapple", N=64).schedule))
    shown = chimera_ir.compile(text, options=Options(max_operations=9))._repr_html_()
    advice = "options=Options(max_operations=512) raises it"
    assert shown == f"<pre>the text has 512 operations, and the limit is 9; {advice}</pre>"


def test_a_notebook_shows_a_report_as_its_table() -> None:
    report = chimera_ir.compile(Source("a.chim", TINY), options=Options(against="dapple")).report
    table = ElementTree.fromstring(report._repr_html_())
    rows = [[cell.text or "" for cell in row] for row in table.iter("tr")]
    assert rows[0] == ["figure", "tiny", "baseline: dapple"]
    assert rows[1] == ["makespan", "6", "6"]
    assert ["makespan: bubble ratio", "50.0%", "50.0%"] in rows
    assert ["activations, M_a", "1 on each worker", "1 on each worker"] in rows
