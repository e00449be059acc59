"""A text that is not proven has a page: its lanes, with the cycle or the missing message drawn on them."""

import re
from pathlib import Path, PurePath
from typing import Any

import pytest
from click import Command
from click.testing import CliRunner

import chimera_ir
from chimera_ir.commands.compare_command import compare_command
from chimera_ir.commands.compile_command import compile_command
from chimera_ir.errors import TextError
from chimera_ir.page.contents import document, page
from chimera_ir.source import Source
from tests.documents import document_in
from tests.test_architecture import ROOT

EXAMPLES = ROOT / "docs" / "examples"


def document_of(text: Path | Source) -> dict[str, Any]:
    """The document of the page of a text with a mistake."""
    compilation = chimera_ir.compile(text)
    with pytest.raises(TextError) as error:
        _ = compilation.page
    return document_in(compilation.page_of_mistake(error.value))


def arrows_of(shown: dict[str, Any]) -> list[tuple[str, str, str]]:
    words = shown["schedules"][0]["operations"]["words"]
    return [(words[arrow["from"]], words[arrow["to"]], arrow["words"]) for arrow in shown["mistake"]["arrows"]]


def operations_of(shown: dict[str, Any]) -> list[str]:
    words = shown["schedules"][0]["operations"]["words"]
    return [words[row] for row in shown["mistake"]["operations"]]


def test_a_cycle_is_drawn_from_operation_to_operation() -> None:
    shown = document_of(EXAMPLES / "stuck.sir")
    arrows = arrows_of(shown)
    assert shown["mistake"]["title"] == "6 operations wait for each other in a cycle"
    assert [end for _, end, _ in arrows] == [*[start for start, _, _ in arrows[1:]], arrows[0][0]]
    assert arrows[1] == ("F m1 s0", "F m1 s1", "it needs those activations")
    assert sorted(operations_of(shown)) == sorted(start for start, _, _ in arrows)
    assert shown["mistake"]["text"].startswith("error[CH310]: 6 operations wait for each other in a cycle\n")


def test_operations_of_a_clash_stand_on_their_clocks_and_all_that_share_one_are_marked() -> None:
    shown = document_of(EXAMPLES / "clash.chim")
    schedule, mistake = shown["schedules"][0], shown["mistake"]
    operations = schedule["operations"]
    on_clock = [*zip(operations["worker"], schedule["clocks"], strict=True)]
    for words, clock in zip(operations["words"], schedule["clocks"], strict=True):
        kind, micro, stage = re.match(r"(\w) m(\d+) s(\d+)", words).groups()
        assert clock == 2 * int(micro) + (int(stage) if kind == "F" else 8 - int(stage))
    shared = [row for row, place in enumerate(on_clock) if on_clock.count(place) > 1]
    assert len(shared) == 2 * 22
    assert mistake["operations"] == shared
    assert [operations["row"][row] for row in shared] == [1, 2] * 22
    assert {operations["row"][row] for row in {*range(len(on_clock))}.difference(shared)} == {0}
    assert "(and 21 more like it)" in mistake["title"]


def test_lanes_without_clocks_have_none() -> None:
    assert document_of(EXAMPLES / "stuck.sir")["schedules"][0]["clocks"] is None


def test_lanes_that_wait_for_each_other_are_connected_at_the_operations_beside_their_waits() -> None:
    shown = document_of(EXAMPLES / "deadlock.sir")
    (first, second), operations = arrows_of(shown), shown["schedules"][0]["operations"]
    assert (first[0], first[1]) == (second[1], second[0])
    assert first[2] == "worker 0 waits for worker 1 to take the activations of micro-batch 0 from stage 0"
    assert {operations["worker"][row] for row in shown["mistake"]["operations"]} == {0, 1}


def test_sums_in_contradicting_orders_are_connected_from_the_worker_that_launches_late() -> None:
    shown = document_of(EXAMPLES / "launch.sir")
    assert arrows_of(shown) == [
        ("B m1 s0", "B m1 s1", "the sum of stage 1: worker 1 launches stage 0 first"),
        ("B m1 s1", "B m1 s0", "the sum of stage 0: worker 0 launches stage 1 first"),
    ]


@pytest.mark.parametrize(
    ("example", "lines"),
    [("launch.sir", [21, 42]), ("deadlock.sir", [11, 31]), ("mistakes.chim", [2, 6, 7]), ("stuck.sir", [9, 10, 14])],
)
def test_lines_that_are_wrong_are_known_the_first_mistake_first(example: str, lines: list[int]) -> None:
    assert document_of(EXAMPLES / example)["mistake"]["lines"][: len(lines)] == lines


@pytest.mark.parametrize(
    ("example", "lacks", "arrow"),
    [
        ("no_recv.sir", "recv m0 s1->s0 from w1 into 0", ("B m0 s1", "B m0 s0")),
        ("no_send", "send m0 s0->s1 to w1", ("F m0 s0", "F m0 s1")),
    ],
)
def test_a_missing_message_is_an_arrow_from_its_maker_to_its_reader(
    example: str, lacks: str, arrow: tuple[str, str]
) -> None:
    if example == "no_send":
        text = chimera_ir.compile("dapple", D=2, N=2).files["schedule.sir"]
        shown = document_of(Source("no_send.sir", text.replace(f"  {lacks}\n", "", 1)))
    else:
        shown = document_of(EXAMPLES / example)
    worker = 0
    assert arrows_of(shown) == [(*arrow, f"no `{lacks}`")]
    assert f"worker {worker} has no `{lacks}`" in shown["mistake"]["missing"]
    assert operations_of(shown)[:2] == [*arrow]


def test_operations_that_a_message_names_are_marked() -> None:
    shown = document_of(EXAMPLES / "clash.chim")
    assert operations_of(shown)[:2] == ["F m4 s0", "B m0 s0"]
    (schedule,) = shown["schedules"]
    assert {*schedule["operations"]["event"]} == {-1}
    assert (schedule["sliders"], schedule["memory"], schedule["turn"]) == ([], [], None)
    (text,) = shown["texts"]
    lines = text["text"].split("\n")
    assert all(
        words[0] in lines[line - 1] for words, line in zip(schedule["operations"]["words"], text["line"], strict=True)
    )


def test_a_text_that_cannot_be_read_has_a_page_without_lanes() -> None:
    shown = document_of(Source("<b>.chim", "scheme a(D = </script>"))
    assert (shown["schedules"], shown["title"]) == ([], "<b>.chim")
    assert shown["mistake"]["text"].startswith("error[CH1")


def test_every_text_of_the_examples_with_a_mistake_has_a_page() -> None:
    """Texts of the folder of mistakes, each of its own kind: no mistake is too odd for its page."""
    drawn = 0
    for path in sorted((ROOT / "tests" / "errors" / "middle").rglob("*.err"))[::3]:
        (text,) = (other for other in path.parent.glob(f"{path.stem}.*") if other != path)
        compilation = chimera_ir.compile(Source(text.name, text.read_text(encoding="utf-8")))
        try:
            _ = compilation.page
        except TextError as error:
            shown = document_in(compilation.page_of_mistake(error))
            assert shown["mistake"]["code"] in path.read_text(encoding="utf-8")
            drawn += bool(shown["schedules"])
    assert drawn > 5


def test_the_command_writes_the_page_of_a_mistake_and_says_where(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    result = CliRunner().invoke(compile_command, [str(EXAMPLES / "stuck.sir"), "--html", str(file)])
    assert isinstance(result.exception, TextError)
    assert result.stdout == f"wrote {file}: open it in a browser\n"
    assert document_in(file.read_text(encoding="utf-8"))["mistake"]["code"] == "CH310"
    assert [*tmp_path.iterdir()] == [file]


def test_the_command_writes_over_pages_alone(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    for _ in range(2):
        result = CliRunner().invoke(compile_command, ["dapple", "D=2", "N=2", "--html", str(file)])
        assert (result.exit_code, result.stdout) == (0, f"wrote {file}: open it in a browser\n")
    assert document_in(file.read_text(encoding="utf-8"))["mistake"] is None
    file.write_text("a page of somebody else")
    result = CliRunner().invoke(compile_command, ["dapple", "D=2", "N=2", "--html", str(file)])
    assert f"--html {file}: exists and was not written by this command" in str(result.exception)
    assert file.read_text() == "a page of somebody else"


@pytest.mark.parametrize("option", ["--out=x", "--emit=plan", "--json"])
def test_a_page_is_written_alone(option: str) -> None:
    result = CliRunner().invoke(compile_command, ["dapple", "--html", "page.html", option])
    assert f"{option.partition('=')[0]}: --html writes the page and nothing else" in result.output


@pytest.mark.parametrize("command", [compile_command, compare_command])
def test_a_page_has_a_file_with_a_name(command: Command) -> None:
    result = CliRunner().invoke(command, ["dapple", "D=2", "N=2", "--html", "-"])
    assert (result.exit_code, Path("-").exists()) == (2, False)
    assert "a page is written to a file; name one" in result.output


def test_a_page_does_not_depend_on_the_folder_of_its_text() -> None:
    text = chimera_ir.compile("dapple", D=2, N=2).request.source.text
    near, far = (chimera_ir.compile(Source(f"{folder}x.chim", text), D=2, N=2).page for folder in ("", "/far/away/"))
    assert near == far


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def test_what_a_text_says_never_leaves_the_packed_data_unescaped() -> None:
    scheme = chimera_ir.compile("dapple", D=2, N=2).request.source.text
    compilation = chimera_ir.compile(Source(f"{HOSTILE}.chim", f"# {HOSTILE}\n{scheme}"), D=2, N=2)
    shown = compilation.page
    assert shown == page(document(compilation)), "equal documents have equal pages"
    assert document_in(shown)["texts"][0]["name"] == PurePath(f"{HOSTILE}.chim").name
    for part in ("alert(", "onerror", "<img"):
        assert part not in shown
    odd = chimera_ir.compile(Source("caf\udce9.chim", scheme), D=2, N=2).page
    assert document_in(odd)["texts"][0]["name"] == "caf\\udce9.chim"
    assert odd.encode()
    mistaken = chimera_ir.compile(Source(f"{HOSTILE}.chim", HOSTILE))
    with pytest.raises(TextError) as error:
        _ = mistaken.page
    wrong = mistaken.page_of_mistake(error.value)
    assert "script&gt;&lt;img src=x onerror=alert(2)&gt;.chim" in wrong
    assert "<script>alert" not in wrong
