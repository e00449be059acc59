"""What `make test` trains: the schemes of the paper and one of each newer kind, a kill, a resume, the demo, a page."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import chimera_ir
from chimera_ir.page.contents import document, page
from tests.e2e.browser import needs_browser, tab
from tests.e2e.ranks import Job, Outcome, compiled, run_all

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAPER = {
    **{scheme: ("zoo.py", {"D": 4, "N": 4}) for scheme in ("gpipe", "dapple", "gems", "chimera", "pipedream_2bw")},
    "pipedream": ("zoo.py", {"D": 4}),
}
NEWER = {
    "zb_h1": ("zoo.py", {"D": 4, "N": 4}),
    "seq1f1b": ("carried.py", {"D": 4, "N": 2, "k": 3}),
    "dapple_offload": ("zoo.py", {"D": 4, "N": 4}),
    "dualpipe_v": ("zoo.py", {"P": 4, "N": 8}),
}
CHECK = ("--check-only", "--micro-batch-size", "2")


def jobs(folder: Path) -> Iterator[Job]:
    schemes = PAPER | NEWER
    programs = {scheme: compiled(folder, scheme, **parameters) for scheme, (_, parameters) in schemes.items()}
    for scheme, (model, _) in schemes.items():
        yield Job(scheme, programs[scheme], CHECK, model)
    steps, saved = ("--micro-batch-size", "2", "--steps"), str(folder / "saved")
    yield Job("undisturbed", programs["gpipe"], (*steps, "4"), "plain.py")
    yield Job("saves", programs["chimera"], (*steps, "2", "--save", saved), "plain.py")
    yield Job("resumes", programs["gpipe"], (*steps, "4", "--resume", saved), "plain.py")
    yield Job("killed", programs["dapple"], (*steps, "500"), "failing.py", {"FAIL": "kill-in-backward:1:12"}, grace=20)
    demo = ("--micro-batch-size", "4", "--check", "--steps", "3", "--log-file", str(folder / "log.jsonl"))
    yield Job("demo", programs["chimera"], demo, str(EXAMPLES / "gpt.py"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Outcome]]:
    folder = tmp_path_factory.mktemp("core")
    return folder, run_all(folder, 4, [*jobs(folder)])


@pytest.mark.parametrize("name", [*PAPER, *NEWER, "demo"])
def test_a_scheme_trains_as_one_process_does(ran: tuple[Path, dict[str, Outcome]], name: str) -> None:
    outcome = ran[1][name]
    outcome.assert_passed()
    assert "check: passed" in outcome.said[0]


def test_a_training_goes_on_under_another_scheme(ran: tuple[Path, dict[str, Outcome]]) -> None:
    def losses(name: str) -> list[float]:
        ran[1][name].assert_passed()
        return [float(loss) for loss in re.findall(r"loss ([\d.]+)", ran[1][name].said[0])]

    assert len(losses("undisturbed")) == 4
    assert losses("saves") + losses("resumes") == pytest.approx(losses("undisturbed"), abs=2e-6)


def test_a_rank_that_is_killed_ends_the_others_with_its_name(ran: tuple[Path, dict[str, Outcome]]) -> None:
    outcome = ran[1]["killed"]
    assert outcome.statuses[1] == "-9"
    assert "0" not in outcome.statuses
    assert any("rank 1: the connection was closed" in said for said in outcome.said)


def test_the_loss_of_the_demo_falls(ran: tuple[Path, dict[str, Outcome]]) -> None:
    first, *_, last = (json.loads(line)["loss"] for line in (ran[0] / "log.jsonl").read_text().splitlines())
    assert last < first


@needs_browser
def test_a_slider_of_a_page_gives_the_compilers_makespan(tmp_path: Path, browser: Any) -> None:
    compilation = chimera_ir.compile("chimera", D=4, N=8)
    costly = chimera_ir.compile("chimera", options=chimera_ir.Options(costs={"F": 3}), D=4, N=8)
    (tmp_path / "page.html").write_text(page(document(compilation)), encoding="utf-8")
    with tab(browser) as opened:
        opened.open(tmp_path / "page.html")
        opened.page.locator("input#cost-F").fill("3")
        makespan = str(opened.page.locator("#figures b").first.text_content())
        assert float(makespan) == pytest.approx(float(costly.report.makespan), rel=1e-3)
        assert opened.mistakes() == []
