"""Profiles and cluster files: what is written reads back, units are what they say, places are where things stand."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.diagnostics.render import render_all
from chimera_ir.profile import document
from chimera_ir.profile.cluster import Cluster, HostLink, Link
from chimera_ir.profile.costs import Device, ModelProfile, StageCosts, Timing, WorkProfile, stages_of
from chimera_ir.profile.document import TomlPlaces
from chimera_ir.profile.quantity import BANDWIDTH, RATE, SIZE, TIME, WORK, Dimension, split
from chimera_ir.profile.read import read_cluster, read_profile
from chimera_ir.profile.write import write_cluster, write_profile
from chimera_ir.source import Source
from tests.repeatable import either, examples
from tests.timings import stage_times, stage_timing

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "docs" / "examples"

positive = st.floats(1e-11, 1e8)
sizes = st.integers(0, 10**15)
times = st.just(0.0) | st.floats(1e-11, 10)
noises = st.none() | st.floats(0, 1)
pairs = st.none() | st.tuples(positive, positive)
spent = st.builds(stage_times, times, times, times, st.none() | st.tuples(times, times))
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def timings(draw: st.DrawFn, last: bool) -> Timing:
    sent = [0, 0] if last else [draw(sizes), draw(sizes)]
    noise, halves = draw(noises), draw(pairs)
    activations = draw(sizes)
    released, resident = draw(st.integers(0, activations)), draw(st.integers(0, activations))
    kept = activations, draw(sizes), *sent
    times = [draw(positive) for _ in range(3)]
    return stage_timing(*times, *kept, noise, halves, released, draw(sizes), resident=resident)


@st.composite
def stages(draw: st.DrawFn, depth: int, counted: bool, every: Sequence[int] = ()) -> tuple[StageCosts, ...]:
    """Each at some micro-batch sizes, or at ``every`` one."""

    def at(last: bool) -> st.SearchStrategy[dict[int, Timing]]:
        if every:
            return st.fixed_dictionaries({size: timings(last=last) for size in every})
        return st.dictionaries(st.sampled_from([1, 2, 8, 32]), timings(last=last), min_size=1)

    return tuple(
        StageCosts(
            *(draw(sizes) for _ in range(3)),
            draw(at(s == depth - 1)),
            *((0.0, None) if counted else (draw(times), draw(noises))),
        )
        for s in range(depth)
    )


@st.composite
def profiles(draw: st.DrawFn) -> ModelProfile | WorkProfile:
    counted = draw(st.booleans())
    depths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True))
    cut = {depth: draw(stages(depth, counted)) for depth in depths}
    profile = ModelProfile(draw(words), cut, draw(words), draw(st.integers(1, 4096)))
    if draw(st.booleans()):
        kept = [1, 8]
        layers = draw(stages(draw(st.integers(1, 4)), counted, kept))
        profile = replace(profile, depths={}, layers=layers)
    kept_splits = {depth: tuple(range(0, 2 * depth, 2)) for depth in profile.depths if draw(st.booleans())}
    profile = replace(profile, splits=kept_splits)
    if not counted and draw(st.booleans()):
        profile = profile.with_overhead(draw(spent))
    return WorkProfile(profile) if counted else profile


sums = st.builds(Link, times, st.just(0.0) | st.floats(1e-17, 0.5), times)
links = st.builds(replace, sums, shared=st.booleans())
hosts = st.builds(HostLink, sums, st.integers(1, 64), st.none() | st.integers(1, 10**15))
devices = st.builds(Device, st.floats(1, 1e20), st.floats(0.001, 1), st.floats(0, 10_000), times)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    memory = draw(st.integers(2, 10**15))
    counts = draw(st.integers(1, 10**6)), draw(st.integers(1, 64))
    reserved = draw(st.integers(0, memory - 1))
    further = draw(st.none() | devices), draw(st.none() | hosts)
    return Cluster(draw(words), *counts, memory, reserved, draw(links), draw(links), draw(sums), *further)


@pytest.mark.full
@given(profiles())
@examples(either(50, 100))
def test_a_profile_that_is_written_reads_back(profile: ModelProfile | WorkProfile) -> None:
    text = write_profile(profile)
    again = read_profile(Source("m.profile.toml", text))
    assert again == profile
    assert write_profile(again) == text


@given(clusters())
def test_a_cluster_that_is_written_reads_back(cluster: Cluster) -> None:
    assert read_cluster(Source("c.cluster.toml", write_cluster(cluster))) == cluster


UNITS = [
    (TIME, "1.5 ms", "0.0015"),
    (TIME, "2us", "0.000002"),
    (TIME, "2 µs", "0.000002"),
    (TIME, "7 ns", "0.000000007"),
    (SIZE, "670 MB", "670000000"),
    (SIZE, "4 MiB", "4194304"),
    (SIZE, "1.5 GiB", "1610612736"),
    (SIZE, "1e3 kB", "1000000"),
    (BANDWIDTH, "9.7 GB/s", "9700000000"),
    (BANDWIDTH, "10 Gbit/s", "1250000000"),
    (WORK, ".5 TFLOP", "500000000000"),
    (RATE, "9.3 TFLOP/s", "9300000000000"),
    (SIZE, "0e-999999999999 B", "0"),
]


@pytest.mark.parametrize(("dimension", "text", "value"), UNITS)
def test_a_unit_is_what_it_says(dimension: Dimension, text: str, value: str) -> None:
    found = split(text)
    number, unit = found
    assert number * dimension.units[unit] == Fraction(Decimal(value))


def test_what_a_profile_leaves_out_is_as_in_section_3_4() -> None:
    """B_t is two forwards, three where it recomputes; gradients are as large as the weights."""
    profile = read_profile(Source("small", (EXAMPLES / "small.profile.toml").read_text(encoding="utf-8")))
    first, second, _, last = profile.depths[4]
    assert first.at[8] == stage_timing(0.1, 0.2, 0.3, 1_500_000_000, 32_000, 4 * 2**20, 4 * 2**20)
    assert (first.weights, first.gradients, first.optimizer) == (670_000_000,) * 3
    assert (first.step, first.step_noise) == (0, None)
    assert second.at[8].kept.input == first.at[8].output
    assert last.at[8] == stage_timing(0.11, 0.225, 0.336, 1_700_000_000, 4 * 2**20, 0, 0, 0.02)


def test_a_cluster_has_links_of_its_own() -> None:
    cluster = read_cluster(Source("small", (EXAMPLES / "small.cluster.toml").read_text(encoding="utf-8")))
    assert (cluster.workers, cluster.per_node, cluster.memory, cluster.reserved) == (16, 2, 16 * 10**9, 10**9)
    assert cluster.between == Link(2e-6, 1 / 9.7e9)
    assert cluster.within == Link(1e-6, 1 / 50e9)
    assert cluster.sums == Link(5e-6, 1 / 6e9)


def test_shared_links_are_those_of_messages() -> None:
    """What is left out is as between nodes, but a sum shares with nobody."""
    text = (EXAMPLES / "small.cluster.toml").read_text(encoding="utf-8")
    between = text.index("[links.within]")
    cluster = read_cluster(Source("shared", text[:between] + "shared = true\n"))
    assert cluster.between == cluster.within == Link(2e-6, 1 / 9.7e9, shared=True)
    assert cluster.sums == Link(2e-6, 1 / 9.7e9)


@pytest.mark.parametrize("workers", [1, 4])
def test_the_links_within_a_node_are_enough_for_a_cluster_of_one_node(workers: int) -> None:
    text = f"""
        [cluster]
        name = "one machine"
        workers = {workers}
        per_node = 4
        memory = "2 GB"
        [links.within]
        latency = "50 us"
        bandwidth = "2 GB/s"
        shared = true
    """
    cluster = read_cluster(Source("one", text))
    assert cluster.within == cluster.between == Link(50e-6, 1 / 2e9, shared=True)
    assert cluster.sums == Link(50e-6, 1 / 2e9)


def test_work_becomes_time_at_the_rate_of_its_micro_batch_size() -> None:
    """10 TFLOP/s, of which 0.5 are reached at most and half of that at 2 items: 2.5 TFLOP/s there, 4 at 8."""
    timing = stage_timing(1e12, 2e12, 3e12, 1, 1, 0, 0)
    work = WorkProfile(ModelProfile("m", {1: (StageCosts(1, 1, 1, {2: timing, 8: timing}),)}))
    at = work.on(Device(10e12, 0.5, 2.0)).depths[1][0].at
    assert (at[2].times["F"], at[2].times["B"], at[2].times["recomputing"]) == pytest.approx((0.4, 0.8, 1.2))
    assert at[8].times["F"] == pytest.approx(0.25)


def test_positions_and_not_items_fill_a_device() -> None:
    """Half of 5 TFLOP/s at 2 positions: an item of 8 reaches 0.8 of them, as 8 items of one do above."""
    timing = stage_timing(1e12, 2e12, 3e12, 1, 1, 0, 0)
    work = WorkProfile(ModelProfile("m", {1: (StageCosts(1, 1, 1, {1: timing}),)}, length=8))
    assert work.on(Device(10e12, 0.5, 2.0)).depths[1][0].at[1].times["F"] == pytest.approx(0.25)


def test_every_operation_takes_what_a_device_takes_for_one_beside_the_work() -> None:
    """A forward of 1e12 at 1e12 FLOP/s and 0.25 s; a backward that runs the forward again takes it twice."""
    timing = stage_timing(1e12, 2e12, 3e12, 1, 1, 0, 0)
    work = WorkProfile(ModelProfile("m", {}, layers=(StageCosts(1, 1, 1, {1: timing}),) * 3))
    on_device = work.on(Device(1e12, 1.0, 0.0, 0.25))
    at = on_device.layers[0].at[1]
    assert (at.times["F"], at.times["B"], at.times["recomputing"]) == (1.25, 2.25, 3.5)
    (stage,) = stages_of(on_device.layers, (0,))
    assert (stage.at[1].times["F"], stage.at[1].times["B"], stage.at[1].times["recomputing"]) == (3.25, 6.25, 9.5)


VALUES = (
    r"""
# a = "comment"
top = 1
[a."b.c"]   # heading
'k' = "x # no comment"
x.y = [1, [2, 3], { p = "]", q = 'it''s' }]
""".replace("it''s", "its")
    + '''
s = """two
lines"" and = more"""
[[t]]
n = 0x1F
[[t.u]]
d = 1979-05-27 07:32:00
[[t.u]]
d = true # yes
[[t]]
[t.v]
e = """"quoted""""
'''
)


def test_every_value_is_found_where_it_stands() -> None:
    """What stands at a value's place is, by itself, that value."""

    def leaves(value: object, path: tuple[str | int, ...]) -> list[tuple[tuple[str | int, ...], object]]:
        if isinstance(value, dict):
            return [leaf for name, each in value.items() for leaf in leaves(each, (*path, name))]
        if isinstance(value, list):
            return [leaf for number, each in enumerate(value) for leaf in leaves(each, (*path, number))]
        return [(path, value)]

    places, found = TomlPlaces(VALUES), leaves(tomllib.loads(VALUES), ())
    assert len(found) == 12
    for path, value in found:
        start, end, _ = places.value(path)
        assert tomllib.loads(f"it = {VALUES[start:end]}") == {"it": value}, path
    assert VALUES[slice(*places.key(("t", 0, "u", 1))[:2])] == "[[t.u]]"
    assert places.key(("t", 0, "u", 1)) != places.key(("t", 0, "u", 0))
    assert VALUES[slice(*places.key(("a", "b.c", "k"))[:2])] == "'k'"


PIECES = """\
[model]
[[depth]]
[[depth.stage]]
[[depth.stage.at]]
stages = 1
name = "m"
weights = "1 MB"
micro_batch_size = 1
forward = "1 ms"
forward = 1
forward = 1 ms
activations = "1e999 B"
depth = [1]
a.b.c = [{}, {x = [[]]}]
stage = [{weights = "1"}]
é = 2
[
{
'''"""
pieces = st.sampled_from([*PIECES.splitlines(), '"""', "\r", "\0"])


@given(st.lists(pieces | st.text(max_size=8), max_size=12).map("\n".join))
def test_any_text_is_a_profile_and_a_cluster_or_gets_diagnostics(text: str) -> None:
    source = Source("any.toml", text)
    for read in (read_profile, read_cluster):
        try:
            read(source)
        except Rejected as rejected:
            said = render_all(rejected.diagnostics, source)
            assert re.match(r"error\[CH7\d\d\]: ", said)


def test_every_error_of_a_file_is_told() -> None:
    text = (EXAMPLES / "small.profile.toml").read_text(encoding="utf-8")
    wrong = text.replace('"100 ms"', "100").replace('"1.5 GB"', '"-1.5 GB"')
    with pytest.raises(Rejected) as rejected:
        read_profile(Source("wrong", wrong))
    assert [each.code for each in rejected.value.diagnostics] == ["CH707", "CH710"] * 3


def test_places_are_looked_for_only_where_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "TomlPlaces", lambda text: pytest.fail("looked for"))
    for name, read in (("profile", read_profile), ("cluster", read_cluster)):
        read(Source(name, (EXAMPLES / f"small.{name}.toml").read_text(encoding="utf-8")))
