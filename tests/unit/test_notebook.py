"""A compilation and a report as HTML, for a notebook."""

from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

import chimera_ir
from chimera_ir import notebook
from chimera_ir.errors import TextError
from chimera_ir.ir.text.printer import show
from chimera_ir.options import Options
from chimera_ir.source import Source
from tests.unit.command import TINY


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
