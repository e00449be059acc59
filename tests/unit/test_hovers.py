"""Texts that a page shows for each mark on its lanes, made by the page's own scripts."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import chimera_ir
from chimera_ir import Options, library
from chimera_ir.page.contents import document, packed
from tests.documents import unpacked
from tests.node import calls, needs_node
from tests.pages import DOCS, SMALL
from tests.sizes import on_workers

pytestmark = needs_node

HOVERS = Path(__file__).with_name("hovers.mjs")
SENT = {"message": 0.5, "sum": 1.5}
"""With these values of sliders, messages and sums take time."""

Said = Mapping[str, Mapping[str, int]]
"""Texts on rows of each kind, and how often they come."""


@cache
def contents(scheme: str, **settings: int) -> Any:
    """The document of a page, as its scripts read it."""
    compilation = chimera_ir.compile(scheme, **(settings or on_workers(scheme, 4, 4)))
    return unpacked(packed(document(compilation)))


def hovered(folder: Path, pages: Sequence[Any], values: Mapping[str, float] = SENT) -> list[Said]:
    return calls(HOVERS, folder, [{"page": page, "values": values} for page in pages])


def test_no_text_on_the_lanes_of_a_library_scheme_lacks_a_word_or_a_number(tmp_path: Path) -> None:
    pages = [contents(scheme) for scheme in library.names()]
    offloaded = chimera_ir.compile(DOCS / "examples" / "offloaded.chim", D=4, N=4)
    measured = chimera_ir.compile("chimera", options=Options(**SMALL, copies=2, against="dapple"), D=4, N=8)
    pages += [unpacked(packed(document(compilation))) for compilation in (offloaded, measured)]
    for page, said in zip(pages * 2, [*hovered(tmp_path, pages, {}), *hovered(tmp_path, pages)], strict=True):
        assert {"lane", "memory", "link", "operations", "needs"} <= said.keys()
        texts = [text for kinds in said.values() for text in kinds]
        wrong = [text for text in texts if "undefined" in text or "NaN" in text or "Infinity" in text]
        assert wrong == [], page["title"]


def test_idle_time_says_the_operation_and_the_message_that_it_waits_for(tmp_path: Path) -> None:
    (said,) = hovered(tmp_path, [contents("dapple", D=2, N=2)], {})
    waits = {text for text in said["lane"] if " is idle, " in text}
    assert (
        "P1 is idle, 0 to 1, for 1\nfill: the pipes fill: it waits for its first operation\n"
        + ("waits for F m0 s0 on P0: message m0 s0->s1, there at 1")
        in waits
    )
    assert (
        "P0 is idle, 2 to 4, for 2\ndependency: it waits for another worker\n"
        + ("waits for B m0 s1 on P1: message m0 s1->s0, there at 4")
        in waits
    )


@pytest.mark.parametrize(
    ("scheme", "settings", "lines"),
    [
        ("dapple", {"D": 2, "N": 4}, ["P0 keeps 2 M_a", "of m0 s0, m1 s0", "at most 2 M_a, first at F m1 s0"]),
        ("gpipe", {"D": 2, "N": 8}, ["P1 keeps 8 M_a", "of m0 s1, m1 s1, m2 s1, m3 s1, m4 s1, m5 s1, 2 more"]),
    ],
)
def test_memory_says_of_which_micro_batches_it_is(
    scheme: str, settings: dict[str, int], lines: list[str], tmp_path: Path
) -> None:
    (said,) = hovered(tmp_path, [contents(scheme, **settings)], {})
    assert any(text.startswith("\n".join(lines)) for text in said["memory"])


def test_as_many_micro_batches_are_kept_as_the_curve_of_memory_says(tmp_path: Path) -> None:
    """Where each keeps one M_a, from its forward to its backward."""
    pages = [contents(scheme, D=4, N=8) for scheme in ("dapple", "chimera", "gpipe", "chimera_doubling")]
    for said in hovered(tmp_path, pages, {})[:3]:
        for text in said["memory"]:
            if text and not text.startswith(("P0 keeps 0", "P1 keeps 0", "P2 keeps 0", "P3 keeps 0")):
                amount, names = text.split(" keeps ")[1].split(" M_a\nof ")
                listed = names.split("\n")[0].split(", ")
                more = int(listed.pop().split()[0]) if "more" in listed[-1] else 0
                assert len(listed) + more == int(amount)


@pytest.mark.parametrize("scheme", ["chimera", "gems", "bitpipe"])
def test_a_sum_is_said_with_its_stages_from_its_launch_until_it_is_over(scheme: str, tmp_path: Path) -> None:
    page = contents(scheme)
    (said,) = hovered(tmp_path, [page])
    lines = {line for text in said["sums"] for line in text.split("\n") if line}
    sums = page["schedules"][0]["sums"]
    assert {line.split(", launched at ")[0] for line in lines} == {
        f"sum of the gradients of {words}" for words in sums["words"]
    }
    times = [[float(part.split(" at ")[1]) for part in line.split(", ")[1:]] for line in lines]
    assert all(launched + SENT["sum"] <= over for launched, over in times)
