"""Schemes from orders: formulas found again from orders alone, orders without formulas, and what is refused."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

import chimera_ir
from chimera_ir import Schedule, Source, fit_scheme
from chimera_ir.errors import NotFitted, OptionError
from chimera_ir.fitting.scheme_fit import Inequality, least_solution
from chimera_ir.ir.text.printer import show
from chimera_ir.orders import cp_sat
from tests.unit.command import Run

pytestmark = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-Tools is not installed: the extra search")

CHAIN = {"D": (2, 3, 4, 6), "N": (2, 3, 5, 8)}
SLICED = {"D": (2, 3, 6), "N": (1, 3, 5), "k": (1, 2, 3, 4)}
ROUNDS = {"P": (2, 4, 6, 8), "N": (2, 4, 6, 8, 12)}
LIBRARY = {
    "dapple": CHAIN,
    "gpipe": CHAIN,
    "gems": CHAIN,
    "zb_h1": CHAIN,
    "zb_h2": CHAIN,
    "interleaved": {"P": (2, 3, 4), "v": (2,), "N": (2, 3, 4, 6, 8, 9, 12)},
    "waves": {"P": (2, 3, 4, 5), "w": (1,), "N": (2, 4, 7, 11)},
    "bitpipe": ROUNDS,
    "v_half": ROUNDS,
    "seq1f1b": SLICED,
}
"""Sizes of schemes. The last group of interleaved has to be full: N is a multiple of P."""


def schedules(scheme: str, values: Mapping[str, Sequence[int]]) -> list[Schedule]:
    settings = [dict(zip(values, numbers, strict=True)) for numbers in product(*values.values())]
    whole = [size for size in settings if scheme != "interleaved" or size["N"] % size["P"] == 0]
    return [chimera_ir.compile(scheme, **size).schedule for size in whole]


@pytest.mark.full
@pytest.mark.parametrize("scheme", LIBRARY)
def test_schemes_are_found_again_from_their_orders_alone(scheme: str) -> None:
    """At a size beyond all that the fit has seen the formulas give the library's order, too."""
    values = LIBRARY[scheme]
    orders = schedules(scheme, values)
    anonymous = [Schedule.from_lanes(order.lanes, order.header) for order in orders]
    found = fit_scheme(anonymous, [*values])
    assert len(found.fitted) >= 3
    assert len(found.verified) >= 5
    beyond = {name: 2 * numbers[-1] for name, numbers in values.items() if len(numbers) > 1}
    again = chimera_ir.compile(Source("found.chim", found.text), **beyond)
    assert again.schedule.lanes == chimera_ir.compile(scheme, **beyond).schedule.lanes
    assert again.warnings == ()


def test_the_formulas_are_those_that_people_write() -> None:
    text = fit_scheme(schedules("dapple", CHAIN)).text
    assert text.endswith("  F(m, s) @ 2*m + s\n  B(m, s) @ 2*m + 2*D - s - 1\n}\n")


LEAN = (
    "scheme lean(D = 4, N = 8) workers D memory activations on w <= D - w "
    "pipe down { stages s in 0..D on s micros m in 0..N F(m, s) B(m, s) }"
)
"""A chain without clocks, in the memory of 1F1B."""


def test_orders_that_the_compiler_chose_are_given_back_as_formulas() -> None:
    source = Source("lean.chim", LEAN)
    sizes = product((2, 3, 4, 6), (2, 5, 8, 11))
    text = fit_scheme([chimera_ir.compile(source, D=D, N=N).schedule for D, N in sizes]).text
    assert text.endswith("  F(m, s) @ 2*m + s\n  B(m, s) @ 2*m + 2*D - s - 1\n}\n")


def test_of_an_order_without_formulas_it_is_said() -> None:
    orders = schedules("dapple", CHAIN)
    first, *others = orders[-1].lanes
    swapped = Schedule.from_lanes([(first[1], first[0], *first[2:]), *others], orders[-1].header)
    with pytest.raises(NotFitted, match="dapple: no clocks that are linear in micro-batch and stage"):
        fit_scheme([*orders[:-1], swapped])


def test_what_cannot_be_fitted_is_refused_by_its_reason() -> None:
    halves = schedules("chimera_halving", {"D": (2, 4), "N": (4, 8, 12, 16)})
    with pytest.raises(NotFitted, match=r"chimera_halving.*: its micro-batches count halves"):
        fit_scheme([*halves, *halves])
    with pytest.raises(NotFitted, match="it has pairs, or operations over several micro-batches"):
        fit_scheme(schedules("dualpipe_v", {"P": (1, 2), "N": (4, 5, 6, 7)}) * 2)


def test_few_sizes_are_refused() -> None:
    with pytest.raises(NotFitted, match=r"3 sizes or more, and 5 that verify it.*here are 1 and 3"):
        fit_scheme(schedules("dapple", {"D": (2, 3), "N": (2, 3)}))
    with pytest.raises(NotFitted, match="their parameters have other names"):
        fit_scheme([*schedules("dapple", CHAIN), chimera_ir.compile("waves").schedule])


ALONE = {
    "dapple": ("N", {"D": 4}),
    "gpipe": ("N", {"D": 3}),
    "zb_h1": ("N", {"D": 4}),
    "gems": ("N", {"D": 4}),
    "zb_h2": ("D", {"N": 9}),
}
"""The only parameter that differs among orders, and what is the same in all."""


@pytest.mark.parametrize("scheme", ALONE)
@pytest.mark.parametrize("values", [(2, 3, 5, 8, 11, 14), (2, 4, 5, 6, 7, 9, 10, 12, 13)])
def test_orders_of_several_values_of_one_parameter_become_a_scheme(scheme: str, values: Sequence[int]) -> None:
    """The largest values only verify; at a value beyond and at one between the formulas give the library's order."""
    name, same = ALONE[scheme]
    orders = [chimera_ir.compile(scheme, **same, **{name: value}).schedule for value in values]
    found = fit_scheme([Schedule.from_lanes(order.lanes, order.header) for order in orders])
    assert max(size[name] for size in found.fitted) < min(size[name] for size in found.verified[-3:])
    assert {name: values[-1]} in found.verified
    for value in (3, 16, 21):
        again = chimera_ir.compile(Source("found.chim", found.text), **{name: value}).schedule
        assert again.lanes == chimera_ir.compile(scheme, **same, **{name: value}).schedule.lanes


def test_few_values_of_one_parameter_are_refused_with_how_many_it_takes() -> None:
    with pytest.raises(NotFitted, match=r"only N differs, and a fit then takes 6 values of it or more.*here are 5"):
        fit_scheme(schedules("dapple", {"D": (4,), "N": (2, 3, 5, 8, 11)}))
    with pytest.raises(NotFitted, match="1 order of one size: a fit takes orders of several, such as several N"):
        fit_scheme(schedules("dapple", {"D": (4,), "N": (8,)}))


def test_a_search_of_one_depth_gives_a_scheme(run_chimera: Run, tmp_path: Path) -> None:
    path = tmp_path / "lean.chim"
    path.write_text(LEAN, encoding="utf-8")
    ended = run_chimera("search", str(path), "D=3", "N=2,3,4,5,6,7", "--emit", "scheme", "--quiet")
    assert ended.out.startswith("# Orders of a search, 6 of 6 proven to be the shortest.\n")
    lanes = chimera_ir.compile(Source("again.chim", ended.out), N=12).schedule.lanes
    assert lanes == chimera_ir.compile("dapple", D=3, N=12).schedule.lanes


def test_the_command_prints_a_scheme_that_compiles_to_the_same_orders(run: Run) -> None:
    ended = run("gpipe", "D=2,3,4,6", "N=2,3,5,8", "--emit", "scheme", "--quiet")
    assert ended.out.startswith("# Clocks fitted to the orders at D=")
    assert " other sizes, up to D=6, N=8." in ended.out
    lanes = chimera_ir.compile(Source("again.chim", ended.out), D=9, N=13).schedule.lanes
    assert lanes == chimera_ir.compile("gpipe", D=9, N=13).schedule.lanes


def texts(directory: Path, scheme: str, values: Mapping[str, Sequence[int]]) -> list[str]:
    """The paths of a schedule's texts, one for each size."""
    paths = []
    for order in schedules(scheme, values):
        path = directory / f"{len(paths)}.sir"
        path.write_text(show(order), encoding="utf-8")
        paths.append(str(path))
    return paths


def test_several_texts_of_orders_become_one_scheme(run: Run, tmp_path: Path) -> None:
    paths = texts(tmp_path, "dapple", {"D": (2, 3, 4, 6), "N": (2, 3, 5, 8)})
    ended = run(*paths, "--emit", "scheme", "--quiet")
    assert ended.out.endswith("  F(m, s) @ 2*m + s\n  B(m, s) @ 2*m + 2*D - s - 1\n}\n")
    assert " other sizes, up to D=6, N=8." in ended.out


def test_texts_that_cannot_be_fitted_together_are_refused(run: Run, tmp_path: Path) -> None:
    first, second, *_ = texts(tmp_path, "dapple", {"D": (2,), "N": (2, 3)})
    copy = tmp_path / "copy.sir"
    copy.write_text(Path(first).read_text(encoding="utf-8"), encoding="utf-8")
    several = run(first, second, str(copy), "--emit", "scheme")
    assert (several.status, f"{first} and {copy} are both of the size D=2 N=2" in several.err) == (1, True)
    assert "dapple.chim is a scheme, which has every size: fit it alone" in run("dapple", first, "--emit", "scheme").err
    assert "D: each of several texts has a size" in run(first, second, "D=2", "--emit", "scheme").err
    assert run(first, second).status == 2
    assert f"unexpected word '{second}': several texts are for --emit scheme" in run(first, second).err
    alone = run(first, "--emit", "scheme").err
    assert "has one size; name the texts of several sizes, one after another" in alone


def test_a_search_at_several_sizes_gives_a_scheme_and_says_what_is_proven(run_chimera: Run, tmp_path: Path) -> None:
    path = tmp_path / "lean.chim"
    path.write_text(LEAN, encoding="utf-8")
    ended = run_chimera("search", str(path), "D=2,3,4", "N=2,3,5", "--emit", "scheme", "--quiet")
    assert ended.out.startswith(
        "# Orders of a search, 9 of 9 proven to be the shortest.\n# Clocks fitted to the orders"
    )
    assert ended.out.endswith("  F(m, s) @ 2*m + s\n  B(m, s) @ 2*m + 2*D - s - 1\n}\n")


def test_of_the_orders_of_a_search_without_formulas_a_remedy_is_said(run_chimera: Run) -> None:
    ended = run_chimera("search", "dapple", "D=1,2", "N=1,2", "--emit", "scheme")
    assert ended.status == 1
    assert "here are 1 and 3; of orders that take the same time a search finds any: `prefer` or a bound" in ended.err


def test_without_a_solver_a_fit_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_sat, "find_spec", lambda _: None)
    with pytest.raises(OptionError, match=r"a fit of clocks needs OR-Tools.*pip install 'chimera_ir\[search\]'"):
        fit_scheme(schedules("dapple", {"D": (2,), "N": (2,)}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("pipedream",), "it has no flush, and clocks are fitted to orders of one update"),
        (("dapple", "D=-1,0"), "it has no size with orders: the model has at least"),
    ],
)
def test_the_command_says_what_cannot_be_fitted(run: Run, words: tuple[str, ...], message: str) -> None:
    ended = run(*words, "--emit", "scheme")
    assert ended.status == 1
    assert message in ended.err


def test_whole_numbers_with_the_least_price_are_found_by_brute_force_too() -> None:
    inequalities = [Inequality(((0, 2), (1, -3))), Inequality(((0, -1), (1, 2), (2, 1))), Inequality(((2, 2),), 3)]
    best = min(
        (abs(x) + 2 * abs(y) + 3 * abs(z), [x, y, z])
        for x, y, z in product(range(-4, 5), repeat=3)
        if all(inequality.room((x, y, z)) >= 0 for inequality in inequalities)
    )
    solution = least_solution(inequalities, [1, 2, 3])
    assert sum(price * abs(value) for price, value in zip((1, 2, 3), solution, strict=True)) == best[0]
    assert least_solution([Inequality(((0, 1),)), Inequality(((0, -1),))], [1]) is None
