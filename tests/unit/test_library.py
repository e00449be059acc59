"""The library is open: schemes of further directories, with any parameter names, and names that the field uses."""

import json
import os
from errno import EACCES
from pathlib import Path

import pytest

import chimera_ir
from chimera_ir import library
from chimera_ir.commands.common import WRONG_COMMAND, WRONG_TEXT
from chimera_ir.compilation import Compilation
from chimera_ir.errors import OptionError, UnreadableText
from chimera_ir.options import Options
from chimera_ir.planner.space import Roles, roles
from chimera_ir.request import Request
from chimera_ir.source import Source, schemes
from chimera_ir.syntax.parser import parse
from tests.unit.command import TINY, Run
from tests.unit.test_plan import cluster, found, profile

LOOPED = """\
# Stages dealt in turn, with parameters of its own names.
scheme looped(ranks = 2, loops = 2, batches = 4)
workers ranks
pipe p {
  stages s in 0..ranks*loops on s % ranks
  micros m in 0..batches
  F(m, s) @ batches*(s/ranks) + m + s%ranks + (s/ranks)*ranks
  B(m, s) @ 2*loops*(batches + ranks) - batches*(s/ranks) + m - s%ranks - (s/ranks)*ranks
}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A directory with two schemes, one with mistakes."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "looped.chim").write_text(LOOPED)
    (folder / "broken.chim").write_text("scheme broken(D = 2) pipe {")
    return folder


# Where schemes are found.


@pytest.mark.parametrize("by_option", [True, False])
def test_a_scheme_of_a_further_directory_is_listed_and_compiled_by_its_name(
    run: Run, mine: Path, monkeypatch: pytest.MonkeyPatch, by_option: bool
) -> None:
    words = ("--library", str(mine)) if by_option else ()
    if not by_option:
        monkeypatch.setenv(library.VARIABLE, f"{os.pathsep}{mine}{os.pathsep}")
    listed = dict(line.split(maxsplit=1) for line in run("--list", *words).out.splitlines())
    assert listed.keys() == {*library.names(), "looped", "broken"}
    said = "(ranks = 2, loops = 2, batches = 4) Stages dealt in turn, with parameters of its own names."
    assert listed["looped"] == said
    assert listed["broken"] == f"a text with mistakes: {mine / 'broken.chim'}"
    by_name = run("looped", *words, "--set", "ranks=4", "--emit", "report")
    assert by_name == run(mine / "looped.chim", "--set", "ranks=4", "--emit", "report")
    assert json.loads(by_name.out)["workers"] == 4
    (mine / "rude.chim").write_text(LOOPED.replace("Stages", "\x1b[31mStages"))
    assert "\x1b" not in run("--list", *words).out
    run("broken", *words).assert_refused(WRONG_TEXT, f"{mine / 'broken.chim'}:1:")


def test_the_interface_in_python_takes_the_same_directories(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_option = chimera_ir.compile("looped", options=Options(library=[mine]), batches=2).report.makespan
    monkeypatch.setenv(library.VARIABLE, str(mine))
    assert chimera_ir.compile("looped", batches=2).report.makespan == by_option
    with pytest.raises(OptionError, match="it is a list of directories"):
        Options(library=str(mine))


def test_a_directory_that_is_named_twice_counts_once(run: Run, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, f"{mine}/.{os.pathsep}{schemes()}")
    assert run("looped", "--library", mine, "--emit", "plan").status == 0
    assert run("dapple", "--library", mine, "--emit", "plan").status == 0


def test_a_name_that_two_files_have_is_refused_where_it_is_used(run: Run, mine: Path, tmp_path: Path) -> None:
    (mine / "dapple.chim").write_text(TINY)
    words = "--library", str(mine)
    said = f"several library schemes are called 'dapple': the compiler's, {mine / 'dapple.chim'}; rename a file"
    run("dapple", *words).assert_refused(WRONG_COMMAND, said)
    assert said in run("--list", *words).out
    assert run("looped", *words, "--emit", "plan").status == 0
    assert run(mine / "dapple.chim", *words, "--emit", "plan").out.startswith("plan tiny\n")


def test_a_scheme_called_like_another_file_is_refused(run: Run, mine: Path) -> None:
    """Its output directory, and its rows in a plan, would be taken for the other's."""
    (mine / "fast.chim").write_text(LOOPED)
    said = f"{mine / 'fast.chim'}: the scheme in it is called 'looped', as another file is; rename the scheme"
    run("fast", "--library", mine).assert_refused(WRONG_COMMAND, said)
    (mine / "fast.chim").write_text(LOOPED.replace("scheme looped", "scheme fast"))
    assert run("fast", "--library", mine, "--emit", "plan").status == 0


@pytest.mark.full
def test_a_plan_passes_over_what_is_no_scheme_and_says_so(plan: Run, mine: Path) -> None:
    (mine / "dapple.chim").write_text(TINY)
    ended = plan(profile((4,), (1,)), cluster(4), "--mini-batch", 8, "--library", mine, "--json")
    assert ended.status == 0
    assert {choice["scheme"] for choice in json.loads(ended.out)["choices"]} >= {"gpipe", "chimera"}
    broken, twice = ended.err.splitlines()
    assert broken.startswith("warning: broken is left out of the plan: error[CH")
    assert twice.startswith("warning: dapple is left out of the plan: several library schemes are called 'dapple'")


def test_who_forgets_the_directory_is_told_of_the_file_that_is_here(run: Run, tmp_path: Path) -> None:
    (tmp_path / "dealt.chim").write_text(LOOPED)
    words = "for the file here write dealt.chim", "further directories: --library or CHIMERA_LIBRARY"
    run("dealt").assert_refused(WRONG_COMMAND, *words)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere", "No such file or directory"),
        ("file", "Not a directory"),
        pytest.param("x" * 300, "File name too long", id="long"),
    ],
)
def test_what_is_no_directory_is_refused_where_a_name_is_looked_up(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    (tmp_path / "file").write_text("")
    run("dapple", "--library", name).assert_refused(WRONG_COMMAND, why)
    monkeypatch.setenv(library.VARIABLE, name)
    run("dapple").assert_refused(WRONG_COMMAND, f"CHIMERA_LIBRARY {name}: {why}")
    (tmp_path / "tiny.chim").write_text(TINY)
    assert run("tiny.chim", "--emit", "plan").status == 0


def test_a_directory_that_may_not_be_read_is_refused(run: Run, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(EACCES, os.strerror(EACCES), path)

    monkeypatch.setattr(os, "listdir", refused)
    run("dapple", "--library", mine).assert_refused(WRONG_COMMAND, f"--library {mine}: Permission denied")


def test_a_name_too_long_for_a_file_is_no_scheme_and_no_fault(run: Run, plan: Run) -> None:
    name = "x" * 300
    said = f"no library scheme is called '{name}' (there are amdp,"
    run(name).assert_refused(WRONG_COMMAND, said)
    run("dapple", "--against", name).assert_refused(WRONG_COMMAND, f"--against: {said}")
    asked = "--mini-batch", 8, "--scheme", name
    plan(profile((2,), (1,)), cluster(2), *asked).assert_refused(WRONG_COMMAND, said)


def test_a_file_that_cannot_be_read_is_named(mine: Path) -> None:
    (mine / "folder.chim").mkdir()
    with pytest.raises(UnreadableText, match=r"folder\.chim: Is a directory"):
        library.source("folder", [mine])


# Names that the field uses.


def test_every_known_name_compiles_as_its_scheme_or_says_that_there_is_none(run: Run) -> None:
    known_names = {name: known for known in library._own_table()["known"] for name in known["names"]}
    assert len(known_names) > 20
    assert not {*known_names} & {*library.names()}
    for name, known in known_names.items():
        scheme, what = known.get("scheme"), known["what"]
        if scheme is None:
            run(name).assert_refused(WRONG_COMMAND, f"the library does not have '{name}': {what}")
        else:
            assert library.alias(name) == (scheme, f"'{name}' is {scheme} here: {what}")


@pytest.mark.parametrize("name", library.names())
def test_a_scheme_of_the_library_gets_no_warning(name: str) -> None:
    assert Compilation(Request(library.source(name)), warn=lambda warning: pytest.fail(warning.code)).verified


def test_an_alias_compiles_with_a_remark(run: Run) -> None:
    ended = run("1f1b", "--emit", "program")
    assert (ended.status, ended.out) == (0, run("dapple", "--emit", "program").out)
    assert ended.err == "remark: '1f1b' is dapple here: 1F1B with a flush\n"
    assert "as fast as gpipe" in run("dapple", "--against", "GPipe").out


@pytest.mark.parametrize(
    ("written", "scheme"),
    [
        *(("1F1B", "dapple"), ("PipeDream-Flush", "dapple"), ("Schedule1F1B", "dapple"), ("ZB-V", "zb_v")),
        *(("zb v", "zb_v"), ("GPipe", "gpipe"), ("zero-bubble", "zb_h1"), ("interleaved-1f1b", "interleaved")),
    ],
)
def test_a_known_name_may_be_written_as_others_write_it(written: str, scheme: str) -> None:
    named, _ = library.alias(written) or ("", "")
    assert named == scheme


def test_an_unknown_name_gets_the_closest_one_or_all(run: Run) -> None:
    run("dappel").assert_refused(WRONG_COMMAND, "no library scheme is called 'dappel' (did you mean dapple?)")
    run("nothing").assert_refused(WRONG_COMMAND, "(there are amdp, bitpipe, breadth_first, chimera,")


def test_a_name_that_only_a_text_says_gets_that_of_its_file(run: Run, mine: Path) -> None:
    (mine / "other.chim").write_text(LOOPED.replace("scheme looped", "scheme mine"))
    (mine / "folder.chim").mkdir()
    said = f"no library scheme is called 'mine', which is in {mine / 'other.chim'}: its name here is other"
    run("mine", "--library", mine).assert_refused(WRONG_COMMAND, said)


def test_a_scheme_without_a_comment_is_listed_with_its_parameters_alone(run: Run, mine: Path) -> None:
    (mine / "plain.chim").write_text(LOOPED.split("\n", 1)[1].replace("scheme looped", "scheme plain"))
    lines = run("--list", "--library", mine).out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("plain")] == [
        "(ranks = 2, loops = 2, batches = 4)"
    ]


def test_an_empty_path_is_no_directory(run: Run) -> None:
    run("dapple", "--library", "").assert_refused(WRONG_COMMAND, "Invalid value for '--library': an empty path.")


def test_a_scheme_of_ones_own_may_have_a_name_that_the_field_uses(run: Run, mine: Path) -> None:
    (mine / "zb.chim").write_text(TINY)
    ended = run("zb", "--library", mine, "--emit", "plan")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith("plan tiny")


# What a plan does with parameters.


def roles_of(text: str, name: str = "") -> Roles:
    source = Source(name, text)
    return roles(source, parse(source), 10**6)


def test_what_a_parameter_does_is_seen_from_the_headers() -> None:
    assert roles_of(LOOPED) == Roles(("ranks", "loops"), "batches")
    seen = {name: roles(library.source(name), parse(library.source(name)), 10**6) for name in library.names()}
    assert seen["dapple"] == seen["pipedream_2bw"] == seen["amdp"] == seen["chimera_doubling"] == Roles(("D",), "N")
    assert seen["chimera"] == Roles(("D",), "N", ("f",))
    assert seen["pipedream"] == Roles(("D",))
    assert seen["interleaved"] == seen["breadth_first"] == Roles(("P", "v"), "N")
    assert (seen["waves"], seen["bitpipe"]) == (Roles(("P", "w"), "N"), Roles(("P",), "N"))


def test_a_parameter_that_only_changes_with_others_is_tried_with_them_free() -> None:
    text = LOOPED.replace("batches = 4)", 'batches = 2*ranks)\nrequire batches == 2*ranks, "twice as many"')
    assert roles_of(text).sizes == ("ranks", "loops")
    assert roles_of(text).micro_batches is None


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ('loops = "default"', Roles(("ranks",), "batches")),
        ("loops = [2, 4]", Roles(("ranks",), "batches", listed=(("loops", (2, 4)),))),
        ('batches = "divisor"', Roles(("ranks", "loops"), None, ("batches",))),
        ('ranks = "divisor"\nloops = "size"', Roles(("loops",), "batches", ("ranks",))),
    ],
)
def test_what_the_file_beside_a_scheme_says_goes_before(mine: Path, lines: str, expected: Roles) -> None:
    (mine / "library.toml").write_text(f"[parameters.looped]\n{lines}\n[parameters.broken]\nx = 1\n")
    assert roles_of(LOOPED, str(mine / "looped.chim")) == expected
    assert roles_of(LOOPED, "elsewhere.chim") == Roles(("ranks", "loops"), "batches")


def test_a_scheme_whose_number_of_micro_batches_is_a_product_is_said_to_have_smaller_updates(
    plan: Run, tmp_path: Path
) -> None:
    """Of `groups` and `k` the divisors of 4 are tried: 16 micro-batches at most, where the mini-batch asks for 32."""
    text = library.source("dapple").text.replace(
        "scheme dapple(D = 4, N = 8)", "scheme units(D = 4, groups = 4, k = 2)"
    )
    (tmp_path / "units.chim").write_text(text.replace("N", "groups*k"))
    asked = profile((4,), (1,)), cluster(4), "--mini-batch", 32, "--scheme", "dapple", "--scheme"
    said = "Updates have fewer than 32 items with units (16): no parameter of that scheme is the number of"
    assert said in plan(*asked, "units.chim").out.replace("\n", " ")
    assert "Updates have fewer" not in plan(*asked, "gpipe").out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[parameters.looped]\nP = 4", "P: looped has no such parameter"),
        (
            "[parameters.looped]\nloops = 4",
            'loops: write a list of whole numbers of at most 64 bits to try, as in [2, 4], or one of "size"',
        ),
        ("[parameters.looped]\nloops = []", "loops: write a list of whole numbers"),
        ("[parameters.looped]\nloops = [true]", "loops: write a list of whole numbers"),
        ("[parameters]\nlooped = 4", "write [parameters.looped], and a line for each parameter"),
        ("parameters = 4", "write [parameters.looped], and a line for each parameter"),
        ("[parameters", "library.toml:1:12: this is not TOML: expected ']'"),
        (f"[parameters.looped]\nloops = {'9' * 5000}", "library.toml:2:9: this is not TOML: exceeds the limit"),
        (f"[parameters.looped]\nloops = {'[' * 3000}", "library.toml:1:1: the file is nested too deeply"),
        (f"[parameters.looped]\nloops = [0x{'f' * 9000}]", "loops: write a list of whole numbers of at most 64 bits"),
        (f"[parameters.{'x' * 300}]", f"there is no {'x' * 300}.chim beside it"),
        ("[parameters.lopped]\nloops = 4", "[parameters.lopped]: there is no lopped.chim beside it"),
    ],
)
def test_a_mistake_in_the_file_beside_a_scheme_is_told(plan: Run, mine: Path, text: str, said: str) -> None:
    (mine / "library.toml").write_text(text)
    asked = "--mini-batch", 8, "--scheme", "looped", "--library", mine
    plan(profile((2,), (1,)), cluster(2), *asked).assert_refused(WRONG_COMMAND, said)


def test_a_plan_tries_the_sizes_of_a_scheme_whatever_they_are_called(plan: Run, mine: Path) -> None:
    """P = 4, a mini-batch of 4: stages = ranks * loops, W ranks = P, B N W = 4."""
    asked = "--mini-batch", 4, "--scheme", "looped", "--library", mine, "--json"
    result = found(plan(profile((2, 4), (1, 2)), cluster(4), *asked))
    seen = {(*each["settings"].values(), each["W"], each["B"]) for each in result["choices"]}
    assert seen == {
        (ranks, depth // ranks, N, W, B)
        for depth in (2, 4)
        for ranks in (1, 2, 4)
        for W in (1, 2, 4)
        for B in (1, 2)
        for N in (1, 2, 4)
        if depth % ranks == 0 and W * ranks == 4 and B * N * W == 4
    }
    assert f" {mine / 'looped.chim'} " in result["commands"][0]


def test_the_whole_library_of_a_plan_has_the_further_directories(plan: Run, mine: Path) -> None:
    (mine / "broken.chim").unlink()
    asked = "--mini-batch", 4, "--library", mine, "--json", "--max-operations", 100
    result = found(plan(profile((2,), (1,)), cluster(2), *asked))
    assert {str(mine / "looped.chim"), "dapple"} <= {each["scheme"] for each in result["choices"]}


def test_in_a_narrow_terminal_summaries_continue_below_themselves(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = run("--list").out
    monkeypatch.setenv("COLUMNS", "40")
    lines = run("--list").out.splitlines()
    assert max(map(len, lines)) <= 40
    assert [line.split()[0] for line in lines if line[0] != " "] == [line.split()[0] for line in wide.splitlines()]
    assert " ".join(" ".join(lines).split()) == " ".join(wide.split())
