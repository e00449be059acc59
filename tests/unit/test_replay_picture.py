"""The picture of a replay: what is drawn where, told from the document itself."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from chimera_ir.ir.levels import Schedule
from chimera_ir.picture.looks import STEP
from chimera_ir.picture.replayed import draw_replay
from chimera_ir.predict.events import Role
from chimera_ir.predict.replay import Cause, Replay, idle, replay
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster, Link
from chimera_ir.profile.costs import StageCosts
from tests.lowered import lowered
from tests.timings import stage_timing
from tests.unit.clocked import one_direction, two_directions, two_versions

SVG = "{http://www.w3.org/2000/svg}"
LINK = Link(1e-3, 1e-9)
PATH = re.compile(r"M([\d.]+) (\d+)(?:H([\d.]+)v(\d+)H[\d.]+z|L([\d.]+) (\d+))")


def setting_of(plan: Schedule, link: Link, name: str = "test") -> Setting:
    stages = tuple(
        StageCosts(1, 10**7, 0, {8: stage_timing(0.010 + 0.001 * s, 0.020, 0.030, 1, 1, 10**6, 10**6)})
        for s in range(plan.header.stages)
    )
    return Setting(stages, Cluster(name, 4096, 1, 1, 0, link, link, link), 2, 8)


def replayed(plan: Schedule, link: Link = LINK, name: str = "test") -> Replay:
    return replay(lowered(plan), setting_of(plan, link, name))


def parsed(document: str) -> ET.Element:
    return ET.fromstring(document)


def elements(document: str, tag: str) -> list[ET.Element]:
    return list(parsed(document).iter(f"{SVG}{tag}"))


def titled(document: str) -> dict[str, ET.Element]:
    """The rectangles that tell what they are."""
    found = {}
    for each in elements(document, "rect"):
        title = each.find(f"{SVG}title")
        if title is not None and title.text:
            found[title.text] = each
    return found


def seconds_per_pixel(found: Replay, document: str) -> float:
    axis = next(
        each.attrib["d"] for each in elements(document, "path") if re.fullmatch(r"M46 \d+H[\d.]+", each.attrib["d"])
    )
    return found.span / (float(axis.partition("H")[2]) - 46)


def critical(document: str) -> list[tuple[str, ...]]:
    """The parts of the path that is drawn in red."""
    red = next(each for each in elements(document, "g") if each.attrib.get("stroke") == "#d8001f")
    return [match.groups(default="") for path in red for match in PATH.finditer(path.attrib.get("d", ""))]


def test_boxes_lie_where_the_replay_says() -> None:
    found = replayed(two_directions(4))
    document = draw_replay(found)
    unit = seconds_per_pixel(found, document)
    boxes = {title: box for title, box in titled(document).items() if not title.startswith("sum")}
    computes = [each for lane in found.lanes for each in lane if each.role is Role.COMPUTE]
    assert len(boxes) == len(computes) == 2 * 4 * 4
    drawn = sorted((float(box.attrib["x"]), float(box.attrib["width"])) for box in boxes.values())
    wanted = sorted((46 + each.start / unit, (each.end - each.start) / unit) for each in computes)
    for one, other in zip(drawn, wanted, strict=True):
        assert one == pytest.approx(other, abs=0.02)


def stepping(plan: Schedule, link: Link, *seconds: float) -> Replay:
    """The same with steps that take time, stage by stage."""
    setting = setting_of(plan, link)
    stages = tuple(replace(stage, step=step) for stage, step in zip(setting.stages, seconds, strict=True))
    return replay(lowered(plan), replace(setting, stages=stages))


@pytest.mark.parametrize("N", [4, 600])
def test_steps_that_take_time_are_boxes_of_their_own_or_one_path(N: int) -> None:
    """Two stages step, one does not; few operations are drawn one by one, many as one path for each colour."""
    found = stepping(one_direction(3, N), LINK, 0.020, 0.0, 0.005)
    document = draw_replay(found)
    unit = seconds_per_pixel(found, document)
    if N == 4:
        boxes = [box.attrib for title, box in titled(document).items() if title.startswith("step of stage")]
        drawn = [(float(box["x"]), float(box["width"])) for box in boxes]
    else:
        path = next(each for each in elements(document, "g") if each.attrib.get("fill") == STEP).find(f"{SVG}path")
        assert path is not None
        drawn = [(float(x), float(end) - float(x)) for x, _, end, *_ in PATH.findall(path.attrib["d"])]
    wanted = [(46 + (found.lanes[w][-1].end - s) / unit, s / unit) for w, s in ((0, 0.020), (2, 0.005))]
    assert sorted(drawn) == [pytest.approx(each, abs=0.02) for each in sorted(wanted)]
    assert [each.text for each in elements(document, "text")].count("step") == 1
    assert "step" not in draw_replay(replayed(one_direction(3, 4)))


def test_every_event_of_the_critical_path_is_marked_in_its_place() -> None:
    found = replayed(two_directions(4))
    document = draw_replay(found)
    unit = seconds_per_pixel(found, document)
    marked = critical(document)
    starts = sorted(
        46 + each.start / unit for each in found.critical for _ in (each.workers if each.role is Role.SUM else [0])
    )
    assert sorted(float(part[0]) for part in marked) == pytest.approx(starts, abs=0.02)
    assert {each.role for each in found.critical} == {Role.COMPUTE, Role.WIRE, Role.SUM}
    ends = max(float(part[2] or part[4]) for part in marked)
    assert ends == pytest.approx(46 + found.span / unit, abs=0.02)


def test_idle_time_is_drawn_by_its_cause() -> None:
    found = replayed(one_direction(4, 4))
    document = draw_replay(found)
    unit = seconds_per_pixel(found, document)
    for cause in (Cause.BUBBLE, Cause.MESSAGE, Cause.SUM):
        pattern = f"url(#idle-{cause.name.lower()})"
        path = next(each for each in elements(document, "path") if each.attrib.get("fill") == pattern)
        drawn = sum(float(part[2]) - float(part[0]) for part in PATH.findall(path.attrib["d"]))
        wanted = sum(end - start for lane in idle(found) for why, start, end in lane if why is cause)
        assert wanted > 0
        assert drawn * unit == pytest.approx(wanted, rel=1e-2)


def test_sums_lie_below_the_lanes_of_all_members() -> None:
    document = draw_replay(replayed(two_directions(4)))
    sums = [title for title in (each.text for each in elements(document, "title")) if title and title.startswith("sum")]
    assert len(sums) == 4 * 2
    assert "sum" not in "".join(titled(draw_replay(replayed(one_direction(1, 1), FREE))))


def test_a_late_receive_is_marked_as_such() -> None:
    """A latency longer than the first operation: the first message cannot leave when it is ready."""
    found = replayed(one_direction(2, 1), Link(0.5, 0.0))
    assert found.critical[0].role is Role.NOTICE
    dashed = [each for each in elements(draw_replay(found), "path") if "stroke-dasharray" in each.attrib]
    assert [len(PATH.findall(each.attrib["d"])) for each in dashed] == [1]


def test_what_names_say_stays_text() -> None:
    found = replayed(one_direction(2, 2), name="<b>&\x00")
    found = replace(found, header=replace(found.header, scheme="</svg><script>"))
    texts = [each.text or "" for each in elements(draw_replay(found), "text")]
    assert texts[0] == "</svg><script>(D=2, N=2)"
    assert texts[1].startswith("W=2 B=8 on <b>&\ufffd; one update")


def test_many_operations_become_one_path_for_each_colour() -> None:
    small, large = (draw_replay(replayed(one_direction(8, N))) for N in (8, 400))
    assert titled(small)
    assert not titled(large)
    assert len(large) < 6_000_000
    assert draw_replay(replayed(one_direction(8, 8))) == small


def test_the_summary_says_what_an_update_takes() -> None:
    flushed = draw_replay(replayed(one_direction(1, 4), FREE))
    assert "one update: 120 ms; computing 100.0%, bubbles 0.0%<" in flushed, "messages take no time"
    streamed = draw_replay(replayed(two_versions(1, 4), FREE))
    stepped = draw_replay(stepping(one_direction(1, 4), FREE, 0.030))
    assert "one update: 150 ms; computing 80.0%, stepping 20.0%, bubbles 0.0%" in stepped
    assert "one update in the steady state: 120 ms; the first 8 updates, in 960 ms: computing 100.0%" in streamed
