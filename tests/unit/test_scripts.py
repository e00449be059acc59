"""Rule "scripts": what each script does is compared with the program, and every change of a script is rejected."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.diagnostics.render import render_all
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.request import Request
from chimera_ir.source import Source
from chimera_ir.verify.findings import Rule
from chimera_ir.verify.scripts import scripts, worker_scripts
from chimera_ir.verify.verify import ProvenScripts, verify_scripts
from tests.graphs import Edge, plan
from tests.repeatable import part
from tests.syntax_trees import imported, python
from tests.test_architecture import PACKAGE
from tests.test_architecture import part as part_of
from tests.unit.journal import journals, loaded
from tests.unit.test_codegen import lanes, ranks, show

SCHEMES = Path(__file__).resolve().parent.parent / "e2e" / "schemes"

FAN = """\
# Worker 0 has stage 0; each of the others has stage 1 for some of the micro-batches, with as many as `share` says.
scheme fan(N = 6, W = 2)
workers W + 1
pipe p[i in 0..W] {
  stages s in 0..2 on if s == 0 then 0 else 1 + i
  micros m in 0..N
  F(m, s) @ 2*(N*i + m) + s
  B(m, s) @ 2*(N*i + m) + 3 - s
}
"""

FAN_STREAM = """\
# The same without a flush: blocks of N micro-batches go to the workers of stage 1 in turn.
scheme fan_stream(N = 8, W = 2)
workers W + 1
update every W*N
pipe p[i in 0..W] {
  stages s in 0..2 on if s == 0 then 0 else 1 + i
  micros m in 0.. as W*N*(m / N) + N*i + m % N
  reads version max(0, m/N - 1)
  F(m, s) @ 2*(W*N*(m / N) + N*i + m % N) + s
  B(m, s) @ 2*(W*N*(m / N) + N*i + m % N) + 3 - s
}
"""

ELSEWHERE = """\
schedule elsewhere
workers 2
stages 2
micro_batches 4
updates 1 per turn
pipe down[0] on 0 1 micros 0..4 recompute 0..2

worker 0:
  B m+1 s0 v-1
  F m+3 s0 v
  B m+2 s0 v
  F m+4 s0 v
  B m+3 s0 v
  F m+5 s0 v
  B m+4 s0 v
  F m+6 s0 v+1

worker 1:
  F m s1 v-1
  B m s1 v-1
  F m+1 s1 v-1
  B m+1 s1 v-1
  F m+2 s1 v
  B m+2 s1 v
  F m+3 s1 v
  B m+3 s1 v
"""
"""Turns that the workers must begin elsewhere: whole ones would wait for each other."""

GRAPHS = {
    "encoders.sir": plan({"image": 1, "sound": 1, "text": 2}, [Edge(0, 2), Edge(1, 2, "waves")], 12),
    "net.sir": plan({"net": 6}, [Edge(0, 5), Edge(1, 4)], 4, [[0, 1, 2, 2, 1, 0]]),
    "heads.sir": plan({"text": 3, "head": 1, "other": 1}, [Edge(1, 3), Edge(1, 4)], 4),
}
"""Plans of graphs, in which stages have several feeds, feed several, or are sources and sinks beside others."""

CASES = [
    ("chimera", {"D": 4, "N": 16}),
    ("chimera_halving", {"D": 2, "N": 4}),
    ("dualpipe_v", {"P": 4, "N": 16}),
    ("zb_h1", {"D": 3, "N": 12}),
    ("pipedream", {"D": 3}),
    ("pipedream_2bw", {"D": 3, "N": 9}),
    ("amdp", {"D": 2, "N": 8}),
]


@cache
def compilation(name: str, parameters: tuple[tuple[str, int], ...] = ()) -> Compilation:
    texts = {"fan.chim": FAN, "fan_stream.chim": FAN_STREAM, "elsewhere.sir": ELSEWHERE, **GRAPHS}
    source = Source(name, texts[name]) if name in texts else library.source(name)
    return Compilation(Request(source, dict(parameters)))


def case(name: str, parameters: dict[str, int]) -> Compilation:
    return compilation(name, tuple(parameters.items()))


def assert_scripts_do_their_lanes(compiled: Compilation, counts: range = range(1, 6)) -> None:
    """By the fakes of `journal`, which share no code with the rule."""
    files, level = compiled.files, compiled.program
    views = [level.view(updates) for updates in counts] if isinstance(level, ProgramStream) else [level]
    for view in views:
        for text, lane, journal in zip(ranks(files), lanes(show(view)), journals(files), strict=True):
            journal.run(loaded(text), view.header.updates)
            assert journal.lines == lane


@pytest.mark.parametrize("parameters", [{}, {"N": 5}, {"N": 12, "W": 3}, {"N": 1, "W": 8}, {"N": 2, "W": 7}], ids=str)
@pytest.mark.parametrize("name", ["fan.chim", "fan_stream.chim"])
def test_a_loop_ends_where_another_worker_begins(name: str, parameters: dict[str, int]) -> None:
    compiled = case(name, parameters)
    assert_scripts_do_their_lanes(compiled)
    assert "scripts" in compiled.whole_report.verified
    if max(parameters.get("N", 6), 6) == 12:
        assert "for " in compiled.files["rank_0.py"], "what goes to one worker still is a loop"


def test_the_script_and_the_program_begin_a_turn_at_the_same_line() -> None:
    compiled = case("elsewhere.sir", {})
    assert_scripts_do_their_lanes(compiled)
    program = lanes(compiled.files["schedule.sir"])
    for text, lane in zip(ranks(compiled.files), program, strict=True):
        body = text[text.index("def turn(") : text.index("def evaluate(")]
        assert re.findall(r"^    (?:\S.*?  )?# (.*)$", body, re.M) == lane
    again = Compilation(Request(Source("again.sir", compiled.files["schedule.sir"]), {}))
    assert {**again.files, "schedule.html": ""} == {**compiled.files, "schedule.html": ""}, "the page has the text"


def test_the_report_that_is_written_names_the_rule_and_scripts_that_are_written_are_proven() -> None:
    compiled = case("chimera", {"D": 4, "N": 16})
    assert compiled.scripts.rules == compiled.verified.rules | {Rule.SCRIPTS}
    assert '"scripts": true' in compiled.files["report.json"]
    assert compiled.scripts.files.items() <= compiled.files.items()
    with pytest.raises(TypeError):
        ProvenScripts({}, (), (), frozenset(), object())


# Scripts that are wrong.


def changes(text: str) -> Iterator[tuple[str, str]]:
    """A script with one change: a line left out, twice, or before the one above it; a number one more."""
    lines = text.splitlines(keepends=True)
    first = next(place for place, line in enumerate(lines) if line.startswith("def "))

    def of(place: int, *instead: str) -> str:
        return "".join([*lines[:place], *instead, *lines[place + 1 :]])

    for place, line in enumerate(lines[first:], first):
        if re.match(r" +(for |\S+\(|m = )", line.replace(".", "(", 1)) is None or '"""' in line or " = lane." in line:
            continue
        code, separator, comment = line.partition("  # ")
        if not line.lstrip().startswith(("for ", "m = ")):
            yield "dropped", of(place, line[: len(line) - len(line.lstrip())] + "0\n")
            yield "doubled", of(place, line, line)
            above = lines[place - 1]
            indent = len(line) - len(line.lstrip())
            if above.strip() and above[:indent].isspace() and above[indent] not in " #" and " = " not in above:
                yield "swapped", "".join([*lines[: place - 1], line, above, *lines[place + 1 :]])
        for number in re.finditer(r"(?<![\w])\d+", code):
            more = f"{code[: number.start()]}{int(number[0]) + 1}{code[number.end() :]}"
            yield "number", of(place, more + separator + comment)


def rejects(compiled: Compilation, files: dict[str, str]) -> bool:
    found = [*scripts(compiled.verified.program, compiled.evaluation, worker_scripts(compiled.verified.header, files))]
    assert all(diagnostic.fill(diagnostic.title) and diagnostic.notes() for diagnostic in found)
    return bool(found)


@pytest.mark.parametrize(
    ("name", "parameters"), [*CASES, *((name, {}) for name in ("fan.chim", "fan_stream.chim", *GRAPHS))], ids=str
)
def test_every_change_of_a_script_is_rejected(name: str, parameters: dict[str, int]) -> None:
    compiled = case(name, parameters)
    files = dict(compiled.scripts.files)
    assert not rejects(compiled, files)
    kinds = set[str]()
    for script in ("rank_0.py", f"rank_{compiled.program.header.workers - 1}.py"):
        for kind, changed in part(changes(files[script]), 1 + files[script].count("\n") // 15):
            kinds.add(kind)
            if not rejects(compiled, files | {script: changed}):
                lines = zip(files[script].splitlines(), changed.splitlines(), strict=False)
                different = next((pair for pair in lines if pair[0] != pair[1]), None)
                pytest.fail(f"{kind} in {script} is not seen: {different}")
    assert kinds == {"dropped", "doubled", "swapped", "number"}


@pytest.mark.parametrize(
    ("name", "script", "old", "new"),
    [
        ("encoders.sir", 2, "(*in_s0_s2.take(0), *in_s1_s2.take(0))", "(*in_s1_s2.take(0), *in_s0_s2.take(0))"),
        ("encoders.sir", 2, "(*in_s0_s2.take(0), *in_s1_s2.take(0))", "in_s0_s2.take(0)"),
        ("encoders.sir", 2, "stage2.input_gradients(0, 0)", "stage2.input_gradients(0, 1)"),
        ("encoders.sir", 2, "stage2.input_gradients(0, 0)", "stage2.input_gradients(0)"),
        ("encoders.sir", 0, "lane.input(0, 0)", "lane.input(0, 1)"),
        ("encoders.sir", 0, "lane.input(0, 0)", "lane.input(0)"),
        ("net.sir", 0, "(*in_s4_s5.take(0), *stage0.outputs(0, 5))", "(*stage0.outputs(0, 5), *in_s4_s5.take(0))"),
        ("net.sir", 0, "stage0.outputs(0, 5)", "stage0.outputs(0, 1)"),
        ("net.sir", 0, "(*in_s1_s0.take(0), *stage5.input_gradients(0, 0))", "(*in_s1_s0.take(0),)"),
        ("heads.sir", 1, "stage1.outputs(0, 3)", "stage1.outputs(0, 2)"),
        ("heads.sir", 3, "lane.target(0, 3)", "lane.target(0, 2)"),
    ],
)
def test_a_script_that_mixes_up_the_edges_of_a_graph_is_rejected(name: str, script: int, old: str, new: str) -> None:
    compiled = case(name, {})
    files = dict(compiled.scripts.files)
    text = files[f"rank_{script}.py"]
    assert old in text
    assert rejects(compiled, files | {f"rank_{script}.py": text.replace(old, new, 1)})


def test_slots_for_each_stage_that_makes_a_value_are_a_part_of_the_script() -> None:
    compiled = case("encoders.sir", {})
    files = dict(compiled.scripts.files)
    right = '"inputs": [[1, 1, 1, 1], [1, 1, 1, 1]]'
    assert right in files["program.json"]
    for wrong in ("[[1, 1, 1, 1], [1, 1, 1]]", "[[1, 1, 1, 1], []]", "[[1, 1, 0, 1], [1, 1, 1, 1]]"):
        changed = files["program.json"].replace(right, f'"inputs": {wrong}')
        assert rejects(compiled, files | {"program.json": changed})


def test_what_program_json_says_of_links_slots_and_turns_is_a_part_of_the_script() -> None:
    compiled = case("pipedream_2bw", {"D": 3, "N": 9})
    files = dict(compiled.scripts.files)
    for old, new in [
        ('"first": -1', '"first": 0'),
        ('"behind": 2', '"behind": 1'),
        ('"incoming": [[1, 0, 1]]', '"incoming": []'),
        ('"outgoing": [[0, 1, 1]]', '"outgoing": [[0, 1, 2]]'),
        ('"gradients": [1', '"gradients": [0'),
    ]:
        assert old in files["program.json"], old
        assert rejects(compiled, files | {"program.json": files["program.json"].replace(old, new)}), old


def test_a_difference_names_the_line_of_the_script_the_line_of_the_program_and_what_is_done() -> None:
    compiled = case("chimera", {"D": 4, "N": 4})
    files = dict(compiled.scripts.files)
    changed = files["rank_0.py"].replace("stage3.backward(2)", "stage3.backward(3)")
    with pytest.raises(Rejected) as rejected:
        verify_scripts(compiled.verified, compiled.verified_evaluation, files | {"rank_0.py": changed})
    number = 1 + changed.splitlines().index(next(line for line in changed.splitlines() if "backward(3)" in line))
    message = render_all(rejected.value.diagnostics, compiled.request.source)
    assert message.startswith("error[CH422]: `update` in rank_0.py does not do what the program says\n")
    assert "the program says `B m2 s3`" in message
    assert f"= note: line {number} of rank_0.py, `stage3.backward(3)`, does `B m3 s3`" in message


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "from os import system",
        "print(1)",
        "lane.__class__",
        "lane._incoming",
        "(lambda: 0)()",
        "[m for m in range(3)]",
        "open('x')",
        "exec('1')",
        "global x; x = 1; del x",
        "lane.format",
        "stage0 = lane.stage.__globals__",
        "def f(): pass",
        "class A: pass",
        "raise ValueError(lane)",
    ],
)
def test_a_script_that_names_anything_else_is_refused_before_its_first_line(line: str) -> None:
    compiled = case("chimera", {"D": 4, "N": 4})
    files = dict(compiled.scripts.files)
    ran = 'def evaluate(lane: Lane) -> None:\n    """'
    inside = files["rank_0.py"].replace(ran, ran.replace('    """', f'    {line}\n    """'))
    outside = files["rank_0.py"].replace("INTERFACE =", f"{line}\nINTERFACE =")
    for changed in (inside, outside):
        assert changed != files["rank_0.py"]
        (_, found) = scripts(
            compiled.verified.program,
            compiled.evaluation,
            worker_scripts(compiled.verified.header, files | {"rank_0.py": changed}),
        )
        assert "names " in found.notes()[0].text
        assert "not a part of a script" in found.notes()[0].text


def test_a_script_that_is_no_python_is_a_difference() -> None:
    compiled = case("chimera", {"D": 4, "N": 4})
    files = dict(compiled.scripts.files) | {"rank_1.py": "def update(lane:"}
    found = [*scripts(compiled.verified.program, compiled.evaluation, worker_scripts(compiled.verified.header, files))]
    assert {diagnostic.notes()[0].text.split(":")[0] for diagnostic in found} == {"rank_1.py ends with SyntaxError"}


def test_scripts_are_written_only_where_they_are_proven_by_a_rule_that_shares_no_code_with_what_writes_them() -> None:
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in python(PACKAGE)
        if part_of(path) != "codegen"
        for name, _ in imported(path)
        if name == "chimera_ir.codegen.facts.scripts"
    }
    assert users == {"compilation.py"}
    rule = [PACKAGE / "verify" / f"{name}.py" for name in ("recording", "scripts")]
    assert not {name for path in rule for name, _ in imported(path) if name.startswith("chimera_ir.codegen")}
