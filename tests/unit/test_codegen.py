"""The scripts that are generated: a lane of the program, line by line, and nothing that a scheme could smuggle in."""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from sys import intern
from typing import Any

import pytest

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.errors import TextError
from chimera_ir.ir.ops import Compute, Instruction, Recv, Send
from chimera_ir.ir.text.printer import show
from chimera_ir.request import Request, Tie
from chimera_ir.source import Source, runtime, templates
from chimera_ir.verify.verify import Verified
from chimera_runtime.program.compiled_program import parsed
from chimera_runtime.program.rank_facts import Route, group_text, spread
from chimera_runtime.ranks.messages import tag_of
from tests.instructions import singly
from tests.lowered import evaluated, scripts_of
from tests.patience import PATIENCE
from tests.programs import program
from tests.repeatable import also, part
from tests.sizes import on_workers
from tests.unit.journal import journals, loaded

TESTS = Path(__file__).resolve().parent.parent
GOLDEN = TESTS / "golden"
WAVES = TESTS / "e2e" / "schemes"


def sized(name: str, workers: int, micro_batches: int) -> tuple[tuple[str, int], ...]:
    """A size for a library scheme, as far as it has one."""
    return tuple(on_workers(name, workers, micro_batches).items())


CASES = [
    *((name, sized(name, 4, 6)) for name in library.names()),
    *also([], ((name, sized(name, *size)) for name in library.names() for size in ((2, 2), (4, 32)))),
    ("chimera", (("D", 2), ("N", 1))),
    ("chimera", (("D", 8), ("N", 8), ("f", 2))),
    ("chimera", (("D", 8), ("N", 32))),
    ("dapple", (("D", 1), ("N", 3))),
    *((path.stem, ()) for path in sorted(WAVES.glob("*.chim"))),
    *((name, sized(name, 4, 6), (("first", "last"),)) for name in library.names() if name != "pipedream"),
    ("gpipe", (("D", 4), ("N", 4)), ((0, 3), (1, 2, 3))),
    ("pipedream_2bw", (("D", 3), ("N", 3)), ((0, 1), (0, 1, 2))),
]
"""Schemes with parameters, some with ties: of the library, and where a worker holds several stages or pipes."""


def named(case: Any) -> str:
    name, parameters, *ties = case
    return " ".join([name, *(f"{name}={value}" for name, value in parameters), *(f"tied {tie}" for tie in ties)])


@cache
def compiled(case: Any) -> Verified:
    name, parameters, *ties = case
    path = WAVES / f"{name}.chim"
    source = Source(path.name, path.read_text()) if path.exists() else library.source(name)
    return verified(source, dict(parameters), *ties)


@cache
def written(case: Any) -> dict[str, str]:
    """What runs a case; several tests look at it."""
    return {name: intern(text) for name, text in scripts_of(compiled(case)).items()}


def verified(source: Source, parameters: Mapping[str, int] | None = None, ties: tuple[Tie, ...] = ()) -> Verified:
    return Compilation(Request(source, parameters or {}, ties=ties)).verified


def lanes(program: str) -> list[list[str]]:
    """The lines of each worker, read from the text of a program."""
    bodies = re.split(r"^worker \d+:$", program, flags=re.M)[1:]
    return [[line.strip() for line in body.splitlines() if line.strip()] for body in bodies]


def ranks(written: Mapping[str, str]) -> list[str]:
    found = {int(name[5:-3]): text for name, text in written.items() if re.fullmatch(r"rank_\d+\.py", name)}
    assert sorted(found) == list(range(len(found)))
    return [found[worker] for worker in range(len(found))]


# What a person reads.


@pytest.mark.parametrize(
    ("case", "ending", "names"),
    [
        (("chimera", (("D", 2), ("N", 2))), "two_directions_D2_N2", ("rank_0.py", "train.py")),
        (("pipedream", (("D", 2),)), "without_a_flush_D2", ("train.py",)),
    ],
)
def test_scripts_read_as_their_lanes_and_loops(case: Any, ending: str, names: Any, update_goldens: bool) -> None:
    """By eye against schedule.sir and the loops in docs/explanation/runtime.md."""
    for name in names:
        golden, text = GOLDEN / f"{name}.{ending}.txt", DIGEST.sub("<digest>", written(case)[name])
        if update_goldens:
            golden.write_text(text)
        assert text == golden.read_text()


DIGEST = re.compile(r"\b[0-9a-f]{16}\b")
"""Of a program, the runtime included."""


@pytest.mark.full
def test_programs_have_the_same_digest_only_if_all_of_their_files_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [*CASES, ("chimera", (("D", 4), ("N", 4), ("f", 2)))]
    found = {named(case): written(case) for case in cases}
    shutil.copytree(templates(), tmp_path / "templates")
    shutil.copytree(runtime(), tmp_path / "chimera_runtime")
    monkeypatch.setattr("chimera_ir.codegen.facts.templates", lambda: tmp_path / "templates")
    monkeypatch.setattr("chimera_ir.codegen.facts.runtime", lambda: tmp_path / "chimera_runtime")
    for changed in ("chimera_runtime/lane/lane.py", "templates/rank.py.j2", "templates/train.py.j2"):
        with (tmp_path / changed).open("a") as file:
            file.write("# another version of the compiler\n")
        found[changed] = scripts_of(compiled(cases[0]))
    digests = {name: {*DIGEST.findall("".join(files.values()))} for name, files in found.items()}
    assert all(len(digest) == 1 for digest in digests.values())
    for name, (digest,) in digests.items():
        assert f'PROGRAM = "{digest}"' in found[name]["rank_0.py"]
        assert f'PROGRAM = "{digest}"' in found[name]["train.py"]
    assert len(set.union(*digests.values())) == len({tuple(sorted(files.items())) for files in found.values()})


@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_runtime_comes_first_then_the_ranks_and_train_last(case: Any) -> None:
    """That a rank's script is of a program says so of all that was imported before it."""
    order = [2 if name == "train.py" else int(name.startswith("rank_")) for name in written(case)]
    assert order == sorted(order)
    assert order[0] == 0
    assert order[-2:] == [1, 2]


BINDING = re.compile(
    r"    (stage(\d+) = lane\.stage\(\2\)|tie(_s\d+)+ = lane\.tie\([0-9, ]+\)"
    r"|(in|out)_s(\d+)_s(\d+)(_w\d+)? = lane\.(incoming|outgoing)\(\5, \6, worker=\d+\))"
)
"""Lines that no instruction stands behind."""


@pytest.mark.parametrize("case", CASES, ids=named)
def test_every_instruction_stands_behind_its_call_in_the_lanes_order(case: Any) -> None:
    program = compiled(case)
    trained, seen = lanes(show(program.program)), lanes(show(evaluated(program).program))
    for name, expected in (("update", trained), ("evaluate", seen)):
        for text, lane in zip(ranks(written(case)), expected, strict=True):
            if f"def {name}(" not in text or re.search(r"^ +for ", text, re.M):
                continue
            body = text[text.index(f"def {name}(") :].split("\n\n\n")[0]
            assert re.findall(r"^    (?:\S.*?  )?# (.*)$", body, re.M) == lane
            beside = re.sub(r"^    # .*\n.*\n", "", body, flags=re.M).splitlines()[2:]
            unspoken = [line for line in beside if line and "  # " not in line]
            assert all(map(BINDING.fullmatch, unspoken))


@pytest.mark.parametrize("case", CASES, ids=named)
def test_every_generated_script_compiles_and_fits_on_a_screen(case: Any) -> None:
    for name, text in written(case).items():
        if name.endswith(".py"):
            assert_fits(name, text)


@cache  # the runtime is the same in every case
def assert_compiles(name: str, text: str) -> None:
    compile(text, name, "exec", dont_inherit=True)


@cache
def assert_fits(name: str, text: str) -> None:
    assert_compiles(name, text)
    assert text == "" or (text.endswith("\n") and not text.endswith("\n\n"))
    for number, line in enumerate(text.splitlines(), 1):
        assert len(line) <= 120, f"{name}:{number}"
        assert line == line.rstrip(), f"{name}:{number}"
        if not name.startswith("chimera_runtime/"):  # which Jinja has not seen
            assert "{{" not in line, f"{name}:{number}"
            assert "{%" not in line, f"{name}:{number}"


def test_a_linter_finds_no_undefined_or_unused_name(tmp_path: Path) -> None:
    for case in CASES:
        for worker, text in enumerate(ranks(written(case))):
            (tmp_path / f"{named(case).replace(' ', '_')}_{worker}.py").write_text(text)
    options = ("--isolated", "--no-cache", "--select", "F,E7,E9,W,PLE,B")
    command = [program("ruff", "ruff"), "check", *options, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout


# What a scheme cannot do.

HOSTILE = """\
# HOSTILE {{ 7 * 7 }} {% raw %}
scheme HOSTILE_NAME(D = 2)   # '''
require D > 1, "HOSTILE {MESSAGE}"
let HOSTILE_LET = D
fn HOSTILE_FN(x) = x
workers HOSTILE_LET
pipe class {
  stages s in 0..D on HOSTILE_FN(s)
  micros m in 0..1
  F(m, s) @ s       # HOSTILE \"\"\" + __import__("os")
  B(m, s) @ 2*D-1 - s
}
"""
MESSAGES = [
    "''' + __import__('os').system('true') + '''",
    "{{ 7 * 7 }}{% for x in y %}{# #}",
    "\\n\\x00\\u0000\\",
    "</title><script>alert(1)</script>",
    "%s%n {0} ${HOME} `id`",
    "\u2028\u0085\x0b\x1b[31m",
]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_comments_and_inner_names_never_reach_a_generated_file(message: str) -> None:
    source = Source("h.chim", HOSTILE.replace("{MESSAGE}", message))
    try:
        files = Compilation(Request(source)).files
    except TextError:
        return
    for name, text in files.items():
        leaked = re.sub(r"HOSTILE_NAME", "", text)
        assert "HOSTILE" not in leaked, name
        assert message not in text, name


@pytest.mark.parametrize("message", ['a""" b', "a\nb", "a\r\nb", '"; import os; "'])
def test_a_message_cannot_hold_a_quote_or_a_new_line(message: str) -> None:
    with pytest.raises(TextError):
        verified(Source("h.chim", HOSTILE.replace("{MESSAGE}", message)))


@pytest.mark.parametrize("name", ["class", "None", "import_", "__class__", "__import__", "lambda", "_", "x" * 150])
def test_words_of_python_are_names_like_any_other(name: str) -> None:
    text = f"""\
scheme {name}({name}D = 2)
workers {name}D
pipe {name}[i in 0..1] {{
  stages s in 0..{name}D on s
  micros m in 0..1
  F(m, s) @ s
  B(m, s) @ 2*{name}D-1 - s
}}
"""
    program = verified(Source("n.chim", text))
    files = scripts_of(program)
    for file, content in files.items():
        assert_compiles(file, content)
    again = verified(Source("n.sir", show(program.program)))
    assert scripts_of(again) == files


@pytest.mark.parametrize("name", ['a"""b', "a'", "a b", "a{{1}}", "a\\", "a;b", "é", "a.b", "1a", "a-b", "$x", "<b>"])
@pytest.mark.parametrize("place", ["scheme", "parameter", "pipe"])
def test_a_name_is_an_identifier_in_a_scheme_and_in_an_ir_text(name: str, place: str) -> None:
    replaced = {"scheme": ("HOSTILE_NAME", "program NAME"), "parameter": ("D", "D="), "pipe": ("class", "pipe class")}
    plain = HOSTILE.replace("{MESSAGE}", "")
    program = show(verified(Source("h.chim", plain)).program).replace("HOSTILE_NAME", "NAME")
    scheme_word, ir_word = replaced[place]
    hostile_scheme = re.sub(rf"(?<!\w){scheme_word}(?!\w)", lambda _: name, plain)
    hostile_ir = program.replace(ir_word, ir_word.replace(ir_word.split()[-1].rstrip("="), name), 1)
    for source in (Source("h.chim", hostile_scheme), Source("h.sir", hostile_ir)):
        assert name in source.text
        with pytest.raises(TextError):
            verified(source)


# What the scripts do when they run.


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_script_that_runs_does_its_lane_and_nothing_else(case: Any) -> None:
    program, files = compiled(case), written(case)
    for text, lane, *twice in zip(
        ranks(files), lanes(show(program.program)), journals(files), journals(files), strict=True
    ):
        for journal in twice:
            journal.run(loaded(text), program.program.header.updates)
            assert journal.lines == lane


@pytest.mark.parametrize("case", CASES, ids=named)
def test_slots_and_links_are_those_that_the_lane_uses(case: Any) -> None:
    program = compiled(case)
    for journal, lane in zip(journals(written(case)), lanes(show(program.program)), strict=True):
        facts = journal.facts
        for word, there, routes in (("send", "to", facts.outgoing), ("recv", "from", facts.incoming)):
            used = {
                Route(*map(int, message.groups()))
                for line in lane
                if (message := re.match(rf"{word} m.*? s(\d+)->s(\d+) {there} w(\d+)", line))
            }
            assert used == set(routes)
        assert {f"step {group_text(group)}" for group in facts.initial} == {
            " ".join(line.split()[:2]) for line in lane if line.startswith("step ")
        }
        needed: dict[tuple[int, int], dict[int, int]] = {}
        for line in lane:
            if message := re.match(r"recv (m.*?) s(\d+)->s(\d+) from w\d+ into (\d+)", line):
                source, target, slot = map(int, message.groups()[1:])
                rooms = needed.setdefault((source, target), {})
                rooms[slot] = max(rooms.get(slot, 0), message[1].count("m"))
        for stage, of_stage in facts.stages.items():
            for value, slots in of_stage.slots.items():
                links = [needed.get((source, stage), {}) for source in journal.job.makers(value, stage)]
                assert slots == (tuple(tuple(rooms[slot] for slot in range(len(rooms))) for rooms in links) or ((),))


@pytest.mark.parametrize("case", CASES, ids=named)
def test_no_two_messages_between_the_same_workers_share_a_tag(case: Any) -> None:
    program = compiled(case).program
    for lane in program.lanes:
        sends = [(line.to, line.message) for line in lane if isinstance(line, Send)]
        stages = program.header.stages
        tags = {(to, tag_of(m.micros, m.source, m.target, m.value.letter, stages)) for to, m in sends}
        assert len(tags) == len(sends)


@pytest.mark.full
@pytest.mark.parametrize("name", part(library.names(), 4))
def test_a_script_does_not_grow_with_the_micro_batches(name: str) -> None:
    few, many = (
        [len(text.splitlines()) for text in ranks(written((name, sized(name, 4, size))))] for size in (32, 128)
    )
    assert all(long <= 1.1 * short for short, long in zip(few, many, strict=True))


def test_the_job_says_where_every_stage_of_every_pipe_is_and_who_talks_to_whom() -> None:
    program = compiled(("chimera", (("D", 4), ("N", 6))))
    job, _ = parsed(scripts_of(program)["program.json"])
    assert (job.workers, job.stages, job.micro_batches) == (4, 4, 6)
    assert job.placement == ((0, 1, 2, 3), (3, 2, 1, 0))
    sends = {
        (worker, int(message[1]))
        for worker, lane in enumerate(lanes(show(program.program)))
        for line in lane
        if (message := re.match(r"send .* to w(\d+)", line))
    }
    assert set(job.links) == sends


@pytest.mark.parametrize(
    ("case", "loads"),
    [
        (("chimera", (("D", 4), ("N", 6))), {0: ({0, 1, 4}, {2, 3, 5}), 1: (set(), set()), 3: ({2, 3, 5}, {0, 1, 4})}),
        (("chimera_halving", (("D", 2), ("N", 4))), {0: ({0, 2}, {1, 3}), 1: ({1, 3}, {0, 2})}),
        (("pipedream_2bw", (("D", 2), ("N", 3))), {0: ({0, 1, 2}, set()), 1: (set(), {0, 1, 2})}),
    ],
    ids=["two directions", "halves", "a stream"],
)
def test_a_rank_loads_inputs_for_its_first_stages_and_targets_for_its_last_ones(
    case: tuple[str, tuple[tuple[str, int], ...]], loads: dict[int, tuple[set[int], set[int]]]
) -> None:
    _, ranks = parsed(written(case)["program.json"])
    for worker, (inputs, targets) in loads.items():
        assert (set(spread(ranks[worker].inputs)), set(spread(ranks[worker].targets))) == (inputs, targets)


def test_a_stage_recomputes_the_micro_batches_of_the_pipes_that_say_so() -> None:
    """Worker 1 holds stage 1 for both pipes, and only one of them recomputes."""
    text = """\
scheme mixed(N = 4)
workers 2
pipe a {
  stages s in 0..2 on s
  micros m in 0..N/2 as 2*m
  recompute when s == 1
  F(m, s) @ 4*m + s
  B(m, s) @ 100 + 8*m + 3 - s
}
pipe b {
  stages s in 0..2 on s
  micros m in 0..N/2 as 2*m + 1
  F(m, s) @ 4*m + 2 + s
  B(m, s) @ 104 + 8*m + 3 - s
}
"""
    _, (first, second) = parsed(scripts_of(verified(Source("mixed.chim", text)))["program.json"])
    assert first.stages[0].recomputed == ()
    assert [*spread(second.stages[1].recomputed)] == [0, 2]


# As many receive buffers as are needed.


@pytest.mark.parametrize("case", CASES, ids=named)
def test_there_are_as_many_receive_buffers_as_are_ever_in_use(case: tuple[str, tuple[tuple[str, int], ...]]) -> None:
    program = compiled(case).program
    for lane in program.lanes:
        slots: Counter[tuple[int, int]] = Counter()
        for each in lane:
            if isinstance(each, Recv):
                shelf = each.message.source, each.message.target
                slots[shelf] = max(slots[shelf], each.slot + 1)
        assert slots == most_in_use(lane)


def most_in_use(lane: tuple[Instruction, ...]) -> Counter[tuple[int, int]]:
    """By the two stages of messages: how many are in use at most, from their posting to the end of their backward."""
    backward = {
        (micro, each.stage): place
        for place, instruction in enumerate(lane)
        for each in singly([instruction])
        if isinstance(each, Compute) and each.kind.sums
        for micro in each.micros
    }
    changes: list[tuple[int, int, tuple[int, int]]] = []
    for place, each in enumerate(lane):
        if isinstance(each, Recv):
            shelf = each.message.source, each.message.target
            end = max(backward[micro, each.message.target] for micro in each.message.micros)
            changes += [(place, 1, shelf), (end, -1, shelf)]
    now: Counter[tuple[int, int]] = Counter()
    most: Counter[tuple[int, int]] = Counter()
    for _, change, shelf in sorted(changes):
        now[shelf] += change
        most[shelf] = max(most[shelf], now[shelf])
    return most
