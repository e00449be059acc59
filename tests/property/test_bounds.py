"""Whatever a scheme says: its program needs no less than the planner knows without messages."""

from hypothesis import assume, event, given
from hypothesis import strategies as st

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.planner.compiled import Variant
from chimera_ir.profile.costs import StageCosts
from chimera_ir.source import Source
from chimera_ir.syntax.formatter import Change
from chimera_ir.syntax.parser import parse
from tests.repeatable import either, examples
from tests.timings import stage_timing
from tests.unit.bounded import assert_bounded

LIMIT = 20_000


@st.composite
def texts(draw: st.DrawFn, asynchronous: bool) -> str:
    """One or two pipes over as many workers as stages or fewer; operations over micro-batches, parts or several."""
    stages, count, group = draw(st.integers(1, 5)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 1, 2, 3]))
    workers = draw(st.sampled_from([stages, stages, max(1, stages - 1), max(1, stages // 2)]))
    halves = group == 2 and not asynchronous and draw(st.booleans())
    slices = draw(st.sampled_from([1, 1, 2, 3])) if group == 1 and not asynchronous else 1
    updates = count * group * draw(st.integers(1, 3))
    last = "" if asynchronous else str(group * draw(st.integers(1, 8)))
    lag, whole = draw(st.integers(0, 4)), draw(st.booleans())
    lines = ["scheme a", f"workers {workers}", *([f"update every {updates}"] if asynchronous else [])]
    for number in range(count):
        place = draw(st.sampled_from([f"s*{workers}/{stages}", f"{workers - 1} - s*{workers}/{stages}"]))
        stride, late = draw(st.integers(1, 4)), draw(st.integers(0, 6))
        late += stride * (slices - 1)
        name = f"({count}*m + {number})"
        index, back, cut = f"(m/{group})", f"(m/{group})", ""
        if slices > 1:
            index, back, cut = f"({slices}*m + q)", f"({slices}*m + {slices - 1} - q)", ", q"
        begin, end = f"{stride}*{index} + s", f"{stride}*{back} + {late + 2 * stages - 1} - s"
        parts = ["m"] if group == 1 else [f"m..m+{group}"] if whole else [f"m+{part}" for part in range(group)]
        lines += [f"pipe p{number} {{", f"stages s in 0..{stages} on {place}"]
        lines += [f"micros m in 0..{last} {'halves ' if halves else ''}by {group} as {name}"]
        lines += [f"slices q in 0..{slices}"] if slices > 1 else []
        lines += [f"reads version max(0, {name}/{updates} - {lag})"] if asynchronous else []
        lines += draw(st.sampled_from([[], [], ["recompute"], ["recompute when s % 2 == 0"]]))
        lines += [f"F({f'm..m+{group}' if group > 1 else 'm'}, s{cut}) @ 2048*({begin}) + {512 * number} + s"]
        wait = draw(st.none() | st.integers(0, 3))
        kind = "B" if wait is None else "I"
        lines += [
            f"{kind}({m}, s{cut}) @ 2048*({end}) + {512 * number + 128 + 32 * i} + s" for i, m in enumerate(parts)
        ]
        if wait is not None:
            late_end = f"2048*({end} + {wait}) + {512 * number + 256} + s"
            lines += [f"W({m}, s{cut}) @ {late_end} + {32 * i}" for i, m in enumerate(parts)]
        lines += ["}"]
    return "\n".join(lines)


@st.composite
def costs(draw: st.DrawFn) -> tuple[StageCosts, ...]:
    """Stages of which no two are alike; what is kept, what goes on and what comes back are each nothing, or a lot."""
    size = st.sampled_from([0, 1, 999, 10**6])
    weights, activations, given_on, back, kept, operands = (draw(size) for _ in range(6))
    share, received = draw(st.sampled_from([0.0, 0.3, 1.0])), draw(st.booleans())
    return tuple(
        StageCosts(
            *(weights + 3 * stage, weights, 2 * weights),
            {
                1: stage_timing(
                    *(1.0, 2.0, 3.0),
                    activations=activations + 11 * stage,
                    input=given_on + 7 * stage if received else kept,
                    output=given_on + 7 * (stage + 1),
                    gradient=back + 5 * (stage + 1),
                    released=int(share * (activations + 11 * stage)),
                    operands=operands,
                )
            },
        )
        for stage in range(5)
    )


def assert_bounds_hold(text: str, costs: tuple[StageCosts, ...], recompute: bool) -> None:
    one = Variant(parse(Source("a.chim", text)), (), Change(recompute), LIMIT, trusted=False)
    try:
        one.check()
    except Rejected:
        assume(False)
    assert_bounded(one, costs)
    event("in slices" if one.header.slices > 1 else "whole")


@examples(either(75, 150))
@given(texts(asynchronous=False), costs(), st.booleans())
def test_with_a_flush(text: str, costs: tuple[StageCosts, ...], recompute: bool) -> None:
    assert_bounds_hold(text, costs, recompute)


@examples(either(25, 50))
@given(texts(asynchronous=True), costs(), st.booleans())
def test_without_a_flush(text: str, costs: tuple[StageCosts, ...], recompute: bool) -> None:
    assert_bounds_hold(text, costs, recompute)
