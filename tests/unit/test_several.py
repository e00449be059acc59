"""Programs for several numbers of micro-batches in one output directory; means over such numbers; plans by them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import pytest

import chimera_ir
from chimera_ir.commands.common import DOES_NOT_FIT, WRONG_COMMAND, WRONG_TEXT
from chimera_ir.errors import OptionError, ProgramsDiffer, WrongOption
from chimera_ir.ir.graph import Absence, Feed, NamedStages
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Micro, Stage, Worker
from chimera_ir.several import joined
from chimera_runtime.errors import Misuse
from chimera_runtime.program.compiled_program import CompiledProgram, load
from tests.test_architecture import ROOT
from tests.unit.command import Run, contents
from tests.unit.test_plan import cluster, found, named, profile
from tests.unit.test_prediction import CLUSTER, PROFILE

EXAMPLES = ROOT / "docs" / "examples"

MISSING = """\
scheme missing(L = 2, N = 6)
feeds image[0] -> text[0] as pixels
workers L + 1
pipe p {
  stages image[i in 0..1] on 0
  stages text[s in 0..L] on 1 + s
  micros m in 0..N
  F(m, image[i]) @ 2*m when m % 3 != 2
  B(m, image[i]) @ 2*m + 2*L + 1 when m % 3 != 2
  F(m, text[s]) @ 2*m + 1 + s
  B(m, text[s]) @ 2*m + 2*L - s
}
"""
"""A scheme in which every third micro-batch has no image."""


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ("dapple D=3", "1..4,8"),
        ("chimera D=4", "2,4,8"),
        ("chimera_doubling D=4", "4,8"),
        ("zb_h1 D=3", "2,6"),
        ("interleaved P=2 v=2", "4,8"),
        ("seq1f1b D=2 k=2", "2,4"),
        ("missing.chim L=2", "2,3,6"),
        ("dapple D=3 --recompute --sync lazy --tied first,last --cost B=3", "2,4"),
        ("dapple_offload D=3", "2,4"),
    ],
)
def test_a_folder_has_what_a_compilation_of_its_number_alone_writes(
    run: Run, tmp_path: Path, words: str, numbers: str
) -> None:
    (tmp_path / "missing.chim").write_text(MISSING)
    assert run(*words.split(), f"N={numbers}", "--out", "o").status == 0
    ended, rest = run(*words.split(), f"N={numbers}", "--table", "json"), contents(tmp_path / "o")
    *fewer, most = (report["micro_batches"] for report in json.loads(ended.out))
    digests = {}
    for number in fewer:
        assert run(*words.split(), f"N={number}", "--out", f"alone{number}").status == 0
        alone = contents(tmp_path / f"alone{number}")
        digests[str(number)] = json.loads(alone["program.json"])["program"]
        shared = {name for name in alone if name.startswith(("chimera_runtime/", ".")) or name == "train.py"}
        there = {name: text for name, text in rest.items() if name.startswith(f"n{number}/")}
        assert there == {f"n{number}/{name}": text for name, text in alone.items() if name not in shared}
        rest = {name: text for name, text in rest.items() if name not in there}
    # The top is the program for the largest number; it names the others in ascending order.
    assert run(*words.split(), f"N={most}", "--out", "largest").status == 0
    largest = contents(tmp_path / "largest")
    facts = json.loads(rest["program.json"])
    assert list(facts.pop("numbers").items()) == list(digests.items())
    assert facts == json.loads(largest["program.json"])
    changed = {"program.json", ".chimera-compile"}
    assert {name: text for name, text in rest.items() if name not in changed} == {
        name: text for name, text in largest.items() if name not in changed
    }


@pytest.mark.parametrize("words", ["dapple D=4", "chimera D=4", "zb_v P=3", "interleaved P=2"])
def test_a_rank_is_prepared_for_every_program(run: Run, tmp_path: Path, words: str) -> None:
    assert run(*words.split(), "N=2,4,8", "--out", "o").status == 0
    program = load(tmp_path / "o")
    assert [*program.programs] == [2, 4, 8]
    alone = program.others | {8: load_alone(run, tmp_path, words)}
    for number, each in alone.items():
        assert program.programs[number].job.micro_batches == number
        for rank, facts in zip(program.ranks, each.ranks, strict=True):
            assert {*facts.incoming} <= {*rank.incoming}
            assert {*facts.outgoing} <= {*rank.outgoing}
            for stage, of_stage in facts.stages.items():
                assert all(rank.stages[stage].slots[v] >= rooms for v, rooms in of_stage.slots.items()), "of one size"
                assert all(rank.stages[stage].sending[v] >= count for v, count in of_stage.sending.items())
    if "zb_v" not in words:  # whose smaller programs need another slot
        assert program.ranks == alone[8].ranks, "so memory is that of the largest alone"


def load_alone(run: Run, folder: Path, words: str) -> CompiledProgram:
    assert run(*words.split(), "N=8", "--out", "alone").status == 0
    return load(folder / "alone")


def test_a_folder_that_lacks_or_is_of_another_program_is_refused(run: Run, tmp_path: Path) -> None:
    assert run("dapple", "D=2", "N=2,4", "--out", "o").status == 0
    facts = tmp_path / "o" / "n2" / "program.json"
    text = facts.read_text()
    facts.write_text(text.replace(json.loads(text)["program"], "0" * 16))
    with pytest.raises(Misuse, match=r"n2/program\.json is of another program than program\.json"):
        load(tmp_path / "o")
    facts.unlink()
    with pytest.raises(Misuse, match="n2 is no output directory"):
        load(tmp_path / "o")


def test_every_file_comes_after_those_that_it_relies_on(run: Run, tmp_path: Path) -> None:
    assert run("dapple", "D=2", "N=2,4", "--out", "o").status == 0
    listed = (tmp_path / "o" / ".chimera-compile").read_text().split()
    places = [listed.index(name) for name in ("n2/program.json", "n2/rank_1.py", "program.json", "rank_1.py")]
    assert places == sorted(places)
    assert listed[-1] == "train.py"


def test_folders_of_numbers_that_are_no_longer_asked_for_go_and_files_of_the_user_stay(
    run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    assert run("dapple", "D=2", "N=1..5", "--out", "o").status == 0
    (out / "n3" / "notes.txt").write_text("mine")
    (out / "n4" / "__pycache__").mkdir()
    (out / "n4" / "__pycache__" / "rank_0.cpython-311.pyc").touch()
    assert run("dapple", "D=2", "N=2,5", "--out", "o").status == 0
    assert sorted(path.name for path in out.glob("n*")) == ["n2", "n3"]
    assert list(contents(out / "n3")) == ["notes.txt"]
    assert run("dapple", "D=2", "N=5", "--out", "o").status == 0
    assert sorted(path.name for path in out.glob("n*")) == ["n3"]
    assert "numbers" not in json.loads((out / "program.json").read_text())


@pytest.mark.parametrize("others", ["n2/rank_0.py", "n2"])
def test_a_file_of_the_user_in_the_place_of_a_folder_is_not_overwritten(run: Run, tmp_path: Path, others: str) -> None:
    assert run("dapple", "D=2", "N=4", "--out", "o").status == 0
    (tmp_path / "o" / others).parent.mkdir(exist_ok=True)
    (tmp_path / "o" / others).write_text("mine")
    before = contents(tmp_path)
    run("dapple", "D=2", "N=2,4", "--out", "o").assert_refused(WRONG_COMMAND, f"{others} was not written by")
    assert contents(tmp_path) == before


def test_a_folder_that_is_a_link_is_not_followed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    assert run("dapple", "D=2", "N=4", "--out", "o").status == 0
    (tmp_path / "o" / "n2").symlink_to(tmp_path / "elsewhere")
    run("dapple", "D=2", "N=2,4", "--out", "o").assert_refused(WRONG_COMMAND, "n2 was not written by")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_report_is_the_table_and_what_was_written(run: Run, tmp_path: Path) -> None:
    table = run("dapple", "D=4", "N=4,8")
    ended = run("dapple", "D=4", "N=8,4", "--out", "o")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith(table.out), "a row for each number, ascending"
    assert ended.out[len(table.out) :] == (
        "wrote o, with programs for 2 numbers of micro-batches (page: chimera view o; all figures: report.json, "
        "--details): run it with\n  torchrun --nproc-per-node=4 o/train.py --model MODEL.py --check\n"
    )
    told = json.loads(run("dapple", "D=4", "N=4,8", "--out", "o", "--json", "--numbers", "4:1,8:1").out)
    assert told.keys() == {"directory", "run", "reports", "expected"}
    assert [report["set"] for report in told["reports"]] == [{"D": 4, "N": 4}, {"D": 4, "N": 8}]
    assert run("dapple", "D=4", "N=4,8", "--out", "o", "--quiet").out == ""


def test_a_number_that_the_scheme_refuses_is_named_and_nothing_is_written(run: Run, tmp_path: Path) -> None:
    ended = run("dualpipe", "D=4", "N=8..10", "--out", "o")
    ended.assert_refused(WRONG_TEXT, "error[CH233]", "this is the program with D=4 N=9; nothing is written")
    ended = run("dapple", "D=4", "N=4,400", "--max-operations", "100", "--out", "o")
    ended.assert_refused(WRONG_TEXT, "--max-operations 3200", "this is the program with D=4 N=400; nothing is written")
    ended = run("dapple", "D=4", "N=4,8", "--tied", "0,9", "--out", "o")
    ended.assert_refused(WRONG_COMMAND, "--tied 0,9: the scheme has", "this is the program with D=4 N=4; nothing")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "chimera D=2,4",
            "chimera(D=2, N=2, f=1) and chimera(D=4, N=4, f=1) differ in the number of workers; programs",
        ),
        ("chimera D=4 f=1,2 N=8", "there are two programs for 8 micro-batches: chimera(D=4, N=8, f="),
        ("pipedream_2bw D=2 N=2,4", "has no flush: its micro-batches have no end, so no update has its own number"),
        ("interleaved P=4 N=9,12 --offload auto", "differ in the stages whose activations move to the host"),
    ],
)
def test_programs_that_differ_in_more_than_the_number_are_refused(
    run: Run, tmp_path: Path, words: str, message: str
) -> None:
    run(*words.split(), "--out", "o").assert_refused(WRONG_COMMAND, message)
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Written:
    """A program of which only the header and program.json are of interest."""

    header: Header
    facts: Mapping[str, object]

    @property
    def files(self) -> Mapping[str, str]:
        return {"program.json": json.dumps({"program": "digest", **self.facts}) + "\n"}


PLAIN = chimera_ir.compile("dapple", D=2, N=2).header
LARGEST = chimera_ir.compile("dapple", D=2, N=4).header
(PIPE,) = LARGEST.pipes
ALWAYS = replace(PIPE, recompute=(Stage(1),))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"workers": 3}, "the number of workers"),
        ({"stages": 3, "pipes": (replace(PIPE, workers=(0, 1, 0)),)}, "the number of stages"),
        ({"pipes": (replace(PIPE, workers=(Worker(1), Worker(0))),)}, "the workers of the stages"),
        ({"pipes": (PIPE, PIPE)}, "the workers of the stages"),
        ({"slices": 2, "micro_batches": 4}, "the parts of a micro-batch"),
        ({"halves": True, "micro_batches": 4}, "the parts of a micro-batch"),
        ({"named": (NamedStages("text", 0, 2),)}, "the groups of stages"),
        ({"feeds": (Feed(Stage(0), Stage(1)),)}, "the edges between groups"),
        ({"ties": ((Stage(0), Stage(1)),)}, "the stages that are tied"),
        ({"frozen": (Stage(0),)}, "the stages that are frozen"),
        ({"pipes": (ALWAYS,)}, "the micro-batches that stages recompute"),
    ],
)
def test_a_fact_that_ranks_fix_when_they_start_is_the_same_in_all(changed: Mapping[str, object], what: str) -> None:
    other = replace(PLAIN, **changed)  # type: ignore[arg-type]
    with pytest.raises(ProgramsDiffer, match=f"differ in {what}; programs in one directory"):
        joined(Written(LARGEST, {}), [Written(other, {})])
    assert joined(Written(LARGEST, {}), [Written(PLAIN, {})])


@pytest.mark.parametrize("which", [{0, 1}, {0}, {2, 3}])
def test_micro_batches_that_recompute_or_lack_a_group_are_those_of_the_largest_program(which: set[int]) -> None:
    """Of four micro-batches 0, 2 and 3 recompute; of two that is 0, whatever the others do."""
    micros = tuple(map(Micro, sorted(which)))
    recomputing = replace(PIPE, recompute=(Stage(1),), recomputed=((Stage(1), micros),))
    groups = NamedStages("image", 0, 1), NamedStages("text", 1, 2)
    for large, small in (
        ({"pipes": (recomputing,)}, {"pipes": (ALWAYS,)}),
        (
            {"named": groups, "absent": (Absence("image", micros),)},
            {"named": groups, "absent": (Absence("image", (0, 1)),)},
        ),
    ):
        programs = Written(replace(LARGEST, **large), {}), [Written(replace(PLAIN, **small), {})]  # type: ignore[arg-type]
        if which == {0, 1}:
            assert "n2/program.json" in joined(*programs)
        else:
            with pytest.raises(ProgramsDiffer, match=r"the micro-batches that (stages recompute|groups lack)"):
                joined(*programs)


@pytest.mark.parametrize("name", ["kinds", "grouped", "split_backward", "moving", "moving_operands"])
def test_stages_are_prepared_for_what_the_largest_program_has(name: str) -> None:
    few, many = {name: [0]}, {name: [0, 1]}
    assert joined(Written(LARGEST, many), [Written(PLAIN, few)])
    with pytest.raises(ProgramsDiffer, match="differ in the"):
        joined(Written(LARGEST, few), [Written(PLAIN, many)])


def test_from_python_a_compilation_is_written_with_others(run: Run, tmp_path: Path) -> None:
    programs = [chimera_ir.compile("chimera", D=2, N=number) for number in (4, 2, 1)]
    programs[0].write(tmp_path / "python", programs[1:])
    assert run("chimera", "D=2", "N=1,2,4", "--out", "command").status == 0
    assert contents(tmp_path / "python") == contents(tmp_path / "command")
    with pytest.raises(ProgramsDiffer, match=r"chimera\(D=2, N=4, f=1\) has more micro-batches than chimera\(D=2, N=2"):
        programs[1].write(tmp_path / "python", programs[:1])


def test_a_program_that_does_not_fit_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(PROFILE)
    (tmp_path / "c.toml").write_text(CLUSTER.replace("80 MB", "66 MB"))
    files = "--profile", "m.toml", "--cluster", "c.toml", "--micro-batch-size", "4"
    words = "dapple", "D=2", "N=1,2", *files, "--out", "o"
    ended = run(*words)
    assert ended.status == DOES_NOT_FIT
    assert ended.err == "dapple(D=2, N=2): the memory of the cluster's workers is too small\n"
    assert (tmp_path / "o" / "n1").is_dir()
    run(*words, "--require-fit").assert_refused(DOES_NOT_FIT, "dapple.chim does not fit", "the program with D=2 N=2")


def test_programs_share_the_split_of_the_largest(run: Run, tmp_path: Path) -> None:
    """With a profile of layers, predictions are those of the one split that the printed command has."""
    files = "--profile", f"{EXAMPLES}/layers.profile.toml", "--cluster", f"{EXAMPLES}/small.cluster.toml"
    words = "dapple", "D=4", *files, "--micro-batch-size", "8"
    told = json.loads(run(*words, "N=2,4", "--out", "o", "--json").out)
    assert "--split" in told["run"]
    assert run(*words, "N=2", "--out", "alone").status == 0
    alone = (tmp_path / "alone" / "report.json").read_text()
    assert (tmp_path / "o" / "n2" / "report.json").read_text() == alone


# Ranges, and means over numbers of micro-batches.


def test_a_range_has_both_of_its_ends(run: Run) -> None:
    assert run("dapple", "D=2", "N=2..4,8") == run("dapple", "D=2", "N=2,3,4,8")
    assert run("dapple", "D=2", "N=4..4").out == run("dapple", "D=2", "N=4").out


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("N=4..2", "N=4..2: there are no values from 4 to 2"),
        ("N=1..", "N=: write NAME=INTEGER, NAME=INTEGER,INTEGER or NAME=FIRST..LAST, as in D=8"),
        ("N=1..2..3", "N=2..3: write"),
        ("N=1..3,2", "N=1..3,2: 2 is in its list twice"),
        ("N=1..999999999999", "N=1..999999999999: 999,999,999,999 values, and the limit is 10,000"),
    ],
)
def test_a_range_that_is_none_is_one_message(run: Run, word: str, message: str) -> None:
    run("dapple", word).assert_refused(WRONG_COMMAND, message)


def test_expected_times_are_those_of_all_updates_together(run: Run, tmp_path: Path) -> None:
    """1F1B: an update takes 3 (N + D - 1), and its bubbles are 3 (D - 1) of that on every worker."""
    ended = run("dapple", "D=4", "N=4,8,16", "--numbers", "8:3,16:1", "--table", "json")
    told = json.loads(ended.out)["expected"]
    assert told == {
        "shares": {"8": 0.75, "16": 0.25},
        "micro_batches": 10,
        "makespan": 3 * (10 + 3),
        "makespan_per_micro_batch": 3.9,
        "bubble_ratio": float(Fraction(9, 39)),
    }
    ended = run("dapple", "D=4", "N=4,8,16", "--numbers", "16:1/4,8:0.75")
    updates = "expected if N is 16 in 25.0% and 8 in 75.0% of updates"
    assert ended.out.splitlines()[-1] == f"{updates}: makespan 39 (3.9 for each micro-batch), bubble ratio 23.1%"
    assert list(tmp_path.iterdir()) == []


def test_expected_times_with_a_profile_are_those_of_the_replay(run: Run, tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(PROFILE)
    (tmp_path / "c.toml").write_text(CLUSTER)
    words = "dapple D=2 N=2,4 --profile m.toml --cluster c.toml --micro-batch-size 4 --numbers 2:1,4:1 --table json"
    told = json.loads(run(*words.split()).out)
    two, four = (report["T_replay"] for report in told["reports"])
    assert told["expected"]["T_replay"] == pytest.approx((two + four) / 2)
    assert told["expected"]["T_replay_per_micro_batch"] == pytest.approx((two + four) / 6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("N=4,8 --numbers 4:1,5:1", "--numbers 5:1: no program of the table has 5 micro-batches: they have 4 and 8"),
        ("D=2,4 N=4,8 --numbers 4:1", "--numbers 4:1: 2 programs of the table have 4 micro-batches"),
        ("N=4,8 --numbers 4:0", "--numbers 4:0: a share is greater than 0: leave out a number that does not occur"),
        ("N=4,8 --numbers 4:-1", "--numbers 4:-1: a share is an integer, a decimal or a fraction"),
        ("N=4,8 --numbers 4=1", "--numbers 4=1: write NUMBER:SHARE, as in --numbers 8:0.5,12:0.5"),
        ("N=4,8 --numbers 4:1,4:2", "--numbers 4:2: the share of 4 is given twice"),
        ("N=4,8 --numbers 4:1 --table csv", "--numbers: a table as CSV has rows of programs alone"),
        ("N=4 --numbers 4:1", "--numbers: it is for a table of several numbers of micro-batches, as N=8,12 gives it"),
    ],
)
def test_shares_that_cannot_be_are_one_message(run: Run, tmp_path: Path, words: str, message: str) -> None:
    run("dapple", *words.split()).assert_refused(WRONG_COMMAND, message)
    if not {"csv", "D=2,4"} & {*words.split()}:  # else it is refused for this
        run("dapple", *words.split(), "--out", "o").assert_refused(WRONG_COMMAND, message)
    assert list(tmp_path.iterdir()) == []


def test_updates_without_a_flush_have_no_time_of_their_own() -> None:
    sizes = chimera_ir.sweep("pipedream_2bw", D=2, N=[2, 4])
    with pytest.raises(WrongOption, match="has no flush: its updates overlap, and none has a time"):
        sizes.expected({2: 1})
    with pytest.raises(WrongOption, match="there is no number with a share"):
        sizes.expected({})


# Plans for updates with different numbers of items.

SHIFTED = """\
scheme shifted(D = 4, N = 4)
workers D
pipe p {
  stages s in 0..D on (s + N) % D
  micros m in 0..N
  F(m, s) @ 2*m + s
  B(m, s) @ 2*m + 2*D - 1 - s
}
"""
"""A scheme that places its stages by the number of micro-batches."""


def test_a_plan_rates_configurations_by_the_means_of_all_updates(plan: Run, run: Run) -> None:
    """D = 4: 1F1B takes 3 (N + 3), direct concatenation 16 for N = 4 and 58 for N = 16, where it is the slower one."""
    words = profile((4,), (1,), weights="1 B"), cluster(4), *named("dapple", "chimera"), "--set", "f=1", "--json"
    alone = found(plan(*words, "--mini-batch", 16))
    assert [choice["scheme"] for choice in alone["choices"]] == ["dapple", "chimera"]
    told = found(plan(*words, "--mini-batch", "4:1,16:1"))
    assert [choice["scheme"] for choice in told["choices"]] == ["chimera", "dapple"]
    assert [choice["T"] for choice in told["choices"]] == pytest.approx([0.01 * (16 + 58) / 2, 0.01 * (21 + 57) / 2])
    assert [choice["throughput"] for choice in told["choices"]] == pytest.approx([10 / 0.37, 10 / 0.39])
    assert told["choices"][0]["numbers"] == told["mini_batches"] == {"4": 0.5, "16": 0.5}
    # The command compiles both programs, and predicts the same time.
    assert told["commands"][0].startswith(
        "chimera compile chimera D=4 N=4,16 f=1 --out chimera.out --numbers 4:1/2,16:1/2"
    )
    compiled = json.loads(run(*told["commands"][0].split()[2:], "--json").out)
    assert compiled["directory"] == "chimera.out"
    assert compiled["expected"]["T_replay"] == pytest.approx(told["choices"][0]["T_replay"])


def test_a_plan_shows_all_numbers_and_names_the_reasons_by_means(plan: Run) -> None:
    words = profile((4,), (1,), weights="1 B"), cluster(4), *named("dapple", "chimera"), "--set", "f=1"
    shown = plan(*words, "--mini-batch", "4:1,16:1").out
    assert "1 copy (W) of 4 stages (D), 4 or 16 micro-batches (N) of 1 item (B) in each." in shown
    assert "mini-batches of 4 (50.0%) and 16 (50.0%)" in shown
    assert "4, 16  f=1" in shown
    assert "The next best, dapple, takes 5.41 % longer (more: 5.41 % on bubbles)." in shown


@pytest.mark.parametrize(
    ("scheme", "items", "detail"),
    [
        ("dapple", "6:1,8:1", "the number of items, 6, is no multiple of W B = 4"),
        ("chimera_doubling", "6:1,8:1", "with 6 micro-batches: N must be a multiple of D: whole units of D or 2D"),
        ("pipedream_2bw", "4:1,8:1", "without a flush all updates have as many micro-batches"),
        ("shifted.chim", "4:1,5:1", "shifted(D=4, N=4) and shifted(D=4, N=5) differ in the workers of the stages"),
    ],
)
def test_a_plan_leaves_out_what_does_not_have_all_numbers(
    plan: Run, tmp_path: Path, scheme: str, items: str, detail: str
) -> None:
    (tmp_path / "shifted.chim").write_text(SHIFTED)
    asked = "--mini-batch", items, "--scheme", scheme, "--json"
    told = json.loads(plan(profile((4,), (1, 4), weights="1 B"), cluster(4), *asked).out)
    assert any(detail in left_out["detail"] for left_out in told["left_out"])
    assert all(len(choice["numbers"]) == 2 for choice in told["choices"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--mini-batch", "8:0"),
            "--mini-batch 8:0: a share is greater than 0: leave out a number that does not occur",
        ),
        (("--mini-batch", "8:1,8:2"), "--mini-batch 8:2: the share of 8 is given twice"),
        (("--mini-batch", "8,9"), "--mini-batch 8: write NUMBER:SHARE, as in --mini-batch 8:0.5,12:0.5"),
        (("--mini-batch", "0"), "--mini-batch is 0: it is a whole number from 1 to 1,000,000"),
        (("--mini-batch", "4:1,8:1", "--search", "1"), "--search: it finds an order for one number of micro-batches"),
    ],
)
def test_mini_batches_that_cannot_be_are_one_message(plan: Run, arguments: tuple[str, ...], message: str) -> None:
    plan(profile((2,), (1,)), cluster(2), *arguments).assert_refused(WRONG_COMMAND, message)


def test_from_python_a_plan_takes_the_shares_of_mini_batches(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(profile((4,), (1,)))
    (tmp_path / "c.toml").write_text(cluster(4))
    files = {"profile": tmp_path / "m.toml", "cluster": tmp_path / "c.toml"}

    def rows(mini_batch: int | Mapping[int, int | str]) -> list[dict[str, object]]:
        return chimera_ir.rank_schemes("dapple", mini_batch=mini_batch, **files).rows  # type: ignore[arg-type]

    assert rows({8: "1/3"}) == rows(8)
    (both,), (small,), (large,) = rows({4: 1, 8: "3"}), rows(4), rows(8)
    assert both["T_replay"] == pytest.approx((small["T_replay"] + 3 * large["T_replay"]) / 4)  # type: ignore[operator]
    assert both["memory"] == large["memory"]
    with pytest.raises(OptionError, match="mini_batch: there is no number of items"):
        rows({})
