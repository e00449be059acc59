"""The scripts that are generated: a lane of the program, line by line, and nothing that a scheme could smuggle in."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from chimera_ir import library
from chimera_ir.codegen.render import scripts
from chimera_ir.compilation import Compilation
from chimera_ir.errors import TextError
from chimera_ir.ir.text.printer import show
from chimera_ir.request import Request
from chimera_ir.resources import templates
from chimera_ir.source import Source
from chimera_ir.verify.verify import Verified
from tests.programs import program
from tests.unit.journal import Journal, fake_join, fake_part, groups_of, one_by_one

TESTS = Path(__file__).resolve().parent.parent
GOLDEN = TESTS / "golden"
WAVES = TESTS / "e2e" / "schemes"

UNITS = ("chimera_doubling", "chimera_halving")
"""Schemes whose N is a multiple of D."""


def sized(name: str, depth: int, micro_batches: int) -> tuple[tuple[str, int], ...]:
    """A size for a library scheme, as far as it has one."""
    sizes = {"D": depth, "N": micro_batches, "f": 1}
    return tuple((word, sizes[word]) for word in re.findall(r"(\w+) =", library.parameters(name)))


CASES = [
    *((name, sized(name, 4, 12 if name in UNITS else 6)) for name in library.names()),
    *((name, sized(name, 2, 4 if name in UNITS else 2)) for name in library.names()),
    *((name, sized(name, 4, 32)) for name in library.names()),
    ("chimera", (("D", 2), ("N", 1))),
    ("chimera", (("D", 8), ("N", 8), ("f", 2))),
    ("chimera", (("D", 8), ("N", 32))),
    ("dapple", (("D", 1), ("N", 3))),
    *((path.stem, ()) for path in sorted(WAVES.glob("*.chim"))),
]
"""Schemes with parameters: of the library, and those where a worker holds neighbouring stages or several pipes."""


def named(case: tuple[str, tuple[tuple[str, int], ...]]) -> str:
    return " ".join([case[0], *(f"{name}={value}" for name, value in case[1])])


@cache
def compiled(case: tuple[str, tuple[tuple[str, int], ...]]) -> Verified:
    name, parameters = case
    path = WAVES / f"{name}.chim"
    source = Source(path.name, path.read_text()) if path.exists() else library.source(name)
    return verified(source, dict(parameters))


def verified(source: Source, parameters: Mapping[str, int] | None = None) -> Verified:
    return Compilation(Request(source, parameters or {})).verified


def lanes(program: str) -> list[list[str]]:
    """The lines of each worker, read from the text of a program."""
    bodies = re.split(r"^worker \d+:$", program, flags=re.M)[1:]
    return [[line.strip() for line in body.splitlines() if line.strip()] for body in bodies]


def ranks(written: Mapping[str, str]) -> list[str]:
    found = {int(name[5:-3]): text for name, text in written.items() if re.fullmatch(r"rank_\d+\.py", name)}
    assert sorted(found) == list(range(len(found)))
    return [found[worker] for worker in range(len(found))]


# What a person reads.


def test_a_rank_script_reads_as_its_lane(update_goldens: bool) -> None:
    """Two stages, two micro-batches, one in each direction: by eye against schedule.sir."""
    written = scripts(compiled(("chimera", (("D", 2), ("N", 2)))))
    for name in ("rank_0.py", "train.py"):
        golden, text = GOLDEN / f"{name}.two_directions_D2_N2.txt", DIGEST.sub("<digest>", written[name])
        if update_goldens:
            golden.write_text(text)
        assert text == golden.read_text()


DIGEST = re.compile(r"\b[0-9a-f]{16}\b")
"""Of a program, the runtime included."""


def test_programs_have_the_same_digest_only_if_all_of_their_files_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [*CASES, ("chimera", (("D", 4), ("N", 4), ("f", 2)))]
    found = {named(case): scripts(compiled(case)) for case in cases}
    folder = shutil.copytree(templates(), tmp_path / "templates")
    monkeypatch.setattr("chimera_ir.codegen.render.templates", lambda: folder)
    for changed in ("runtime.py", "support/job.py", "rank.py.j2", "train.py.j2"):
        with (folder / changed).open("a") as file:
            file.write("# another version of the compiler\n")
        found[changed] = scripts(compiled(cases[0]))
    digests = {name: {*DIGEST.findall("".join(written.values()))} for name, written in found.items()}
    assert all(len(digest) == 1 for digest in digests.values())
    for name, (digest,) in digests.items():
        assert f'PROGRAM = "{digest}"' in found[name]["rank_0.py"]
        assert f'program="{digest}"' in found[name]["train.py"]
    assert len(set.union(*digests.values())) == len({tuple(sorted(written.items())) for written in found.values()})


@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_runtime_comes_first_then_the_ranks_and_train_last(case: Any) -> None:
    """That a rank's script is of a program says so of all that was imported before it."""
    written = scripts(compiled(case))
    order = [2 if name == "train.py" else int(name.startswith("rank_")) for name in written]
    assert order == sorted(order)
    assert order[0] == 0
    assert order[-2:] == [1, 2]


UNSPOKEN = re.compile(
    r"    (del \w+(, \w+)*|(stage|peer)(\d+) = lane\.\3\(\4\)|(y|dx)\w+ = join\(.*\)"
    r"|((f|dx)\w+ = )?stage\d+\.(forward|backward)\w*\(.*\)|    \(.*\), [xy(].*|\))"
)
"""Lines that no instruction stands behind: names, their end, the rest of an operation over several micro-batches."""


@pytest.mark.parametrize("case", CASES, ids=named)
def test_every_instruction_stands_behind_its_call_in_the_lanes_order(case: Any) -> None:
    program = compiled(case)
    for text, lane in zip(ranks(scripts(program)), lanes(show(program.program)), strict=True):
        if re.search(r"^ +for ", text, re.M):
            continue
        body = text[text.index("def update") :]
        assert re.findall(r"^    \S.*?  # (.*)$", body, re.M) == lane
        unspoken = [line for line in body.splitlines()[2:] if line and "  # " not in line]
        assert all(UNSPOKEN.fullmatch(line) for line in unspoken)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_every_generated_script_compiles_and_fits_on_a_screen(case: Any) -> None:
    for name, text in scripts(compiled(case)).items():
        compile(text, name, "exec", dont_inherit=True)
        assert text == "" or (text.endswith("\n") and not text.endswith("\n\n"))
        for number, line in enumerate(text.splitlines(), 1):
            assert len(line) <= 120, f"{name}:{number}"
            assert line == line.rstrip(), f"{name}:{number}"
            assert "{{" not in line, f"{name}:{number}"
            assert "{%" not in line, f"{name}:{number}"


def test_a_linter_finds_no_undefined_or_unused_name(tmp_path: Path) -> None:
    for case in CASES:
        for worker, text in enumerate(ranks(scripts(compiled(case)))):
            (tmp_path / f"{named(case).replace(' ', '_')}_{worker}.py").write_text(text)
    command = [
        program("ruff", "ruff"),
        "check",
        "--isolated",
        "--no-cache",
        "--select",
        "F,E7,E9,W,PLE,B",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_the_files_of_a_program_are_text_in_a_fixed_order_and_the_same_each_time() -> None:
    first, second = (scripts(compiled(("chimera", (("D", 4), ("N", 6))))) for _ in range(2))
    assert list(first.items()) == list(second.items())
    assert {"train.py", "runtime.py", "support/__init__.py", "rank_0.py", "rank_3.py"} <= first.keys()
    assert all(not name.startswith("/") and ".." not in name for name in first)


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


@pytest.mark.parametrize("name", ["class", "None", "import_", "__class__", "__import__", "lambda", "_", "x" * 200])
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
    written = scripts(program)
    for file, content in written.items():
        compile(content, file, "exec", dont_inherit=True)
    again = verified(Source("n.sir", show(program.program)))
    assert scripts(again) == written


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


def loaded(text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a rank script defines, its runtime replaced by nothing."""
    runtime = ModuleType("runtime")
    runtime.Lane = object  # type: ignore[attr-defined]
    runtime.part, runtime.join = fake_part, fake_join  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "runtime", runtime)
    module: dict[str, Any] = {"__name__": name}
    exec(compile(text, name, "exec", dont_inherit=True), module)
    return module


def run(script: Mapping[str, Any], program: Verified, journal: Journal) -> None:
    """Runs a script for the updates that its program shows."""
    if program.program.header.asynchronous:
        script["stream"](journal.lane(), program.program.header.updates)
    else:
        script["update"](journal.lane())


def journal_of(program: Verified, worker: int, wanted: list[list[str]]) -> Journal:
    header = program.program.header
    return Journal(worker, header.stages, groups_of(wanted), asynchronous=header.asynchronous)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_script_that_runs_does_its_lane_and_nothing_else(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(case)
    wanted = lanes(show(program.program))
    for worker, text in enumerate(ranks(scripts(program))):
        script = loaded(text, f"rank_{worker}", monkeypatch)
        for _ in range(2):
            journal = journal_of(program, worker, wanted)
            run(script, program, journal)
            assert journal.lines == one_by_one(wanted[worker])


@pytest.mark.parametrize("case", CASES, ids=named)
def test_slots_and_peers_are_those_that_the_lane_uses(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(case)
    for worker, (text, lane) in enumerate(zip(ranks(scripts(program)), lanes(show(program.program)), strict=True)):
        script = loaded(text, f"rank_{worker}", monkeypatch)
        peers = {int(found[1]) for line in lane if (found := re.search(r"(?:to|from) w(\d+)", line))}
        assert script["PEERS"] == tuple(sorted(peers))
        assert {f"step s{stage}" for stage in script["SLOTS"]} == {
            line[:7] for line in lane if line.startswith("step ")
        }
        needed: dict[int, tuple[dict[int, int], dict[int, int]]] = {stage: ({}, {}) for stage in script["SLOTS"]}
        for line in lane:
            if found := re.match(r"recv (\S+) s(\d+)->s(\d+) from w\d+ into (\d+)", line):
                source, target, slot = map(int, found.groups()[1:])
                rooms = needed[target][int(source > target)]
                rooms[slot] = max(rooms.get(slot, 0), found[1].count("m"))
        assert script["SLOTS"] == {
            stage: tuple(tuple(rooms[slot] for slot in range(len(rooms))) for rooms in both)
            for stage, both in needed.items()
        }


@pytest.mark.parametrize("case", CASES, ids=named)
def test_no_two_messages_between_the_same_workers_share_a_tag(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(case)
    wanted = lanes(show(program.program))
    for worker, text in enumerate(ranks(scripts(program))):
        journal = journal_of(program, worker, wanted)
        run(loaded(text, f"rank_{worker}", monkeypatch), program, journal)
        assert len(set(journal.tags)) == len(journal.tags) > 0 or program.program.header.workers == 1


@pytest.mark.parametrize("name", library.names())
def test_a_script_does_not_grow_with_the_micro_batches(name: str) -> None:
    few, many = (
        [len(text.splitlines()) for text in ranks(scripts(compiled((name, sized(name, 4, size)))))]
        for size in (32, 256)
    )
    assert all(long <= 1.1 * short for short, long in zip(few, many, strict=True))


def test_the_job_says_where_every_stage_of_every_pipe_is_and_who_talks_to_whom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = compiled(("chimera", (("D", 4), ("N", 6))))
    train = scripts(program)["train.py"]
    facts = train[train.index("JOB = Job(") : train.index("if __name__")]
    module: dict[str, Any] = {"Job": SimpleNamespace}
    exec(facts, module)
    job = module["JOB"]
    assert (job.workers, job.stages, job.micro_batches) == (4, 4, 6)
    assert job.placement == ((0, 1, 2, 3), (3, 2, 1, 0))
    sends = {
        (worker, int(found[1]))
        for worker, lane in enumerate(lanes(show(program.program)))
        for line in lane
        if (found := re.match(r"send .* to w(\d+)", line))
    }
    assert set(job.links) == sends
