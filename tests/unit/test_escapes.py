"""Texts of others are shown and never acted upon; command lines that are printed mean what they say."""

import os
import random
import subprocess
import unicodedata
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import pytest

from chimera_ir.escapes import as_argument, command_line, visible, visible_lines
from chimera_ir.profile.cluster import Cluster, Link
from chimera_ir.profile.read import read_cluster
from chimera_ir.profile.write import write_cluster
from chimera_ir.source import Source
from tests.documents import document_in
from tests.patience import PATIENCE
from tests.unit import traced
from tests.unit.command import TINY, Run, contents
from tests.unit.test_profile_source import CLUSTER, PROFILE

EVIL = "\x1b]0;x\x07\x9b31m\u202e\u2028\ufeff"
"""Sets a terminal's title, rings, turns red, writes backwards, breaks the line."""

NAMES = (
    *("a b", "it's", '"', "-x", "--help", "$(touch x)", "`touch x`", "a;b&c|d>e", "*?[a]", "~", "#", "!!", "\\"),
    *("é日本", "a\nb", "\t", EVIL, "'\x1b[31m\\", os.fsdecode(b"caf\xe9"), "\x1bA0"),
)
"""Names that files may have."""


def assert_plain(text: str) -> None:
    acted_upon = {letter for letter in {*text} if unicodedata.category(letter)[0] == "C" or letter in "\u2028\u2029"}
    assert acted_upon <= {"\n"}, acted_upon


def words_of(line: str, *ahead: str) -> list[str]:
    """What bash takes a line apart to, which is the words of a command; those ``ahead`` are its functions."""
    functions = "".join(f'{name}() {{ printf "%s\\0" {name} "$@"; }}; ' for name in ahead)
    done = subprocess.run(["bash", "-c", functions + line], capture_output=True, timeout=PATIENCE, check=True)
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]


def test_what_is_shown_is_every_character_or_its_escape() -> None:
    every = [chr(code) for code in (*range(0x3000), *range(0xD7F0, 0xE010), *range(0xFE00, 0x10010), 0x1F600, 0x10FFFF)]
    for character in every:
        assert visible(character) == character or visible(character).isascii()
        assert unicodedata.category(visible(character)[0])[0] not in "CZ" or character in " \t"
    assert_plain(visible("".join(every)))
    assert visible_lines(f"a\n{EVIL}\n").count("\n") == 2


def test_a_command_line_is_taken_apart_again_by_a_shell() -> None:
    chance = random.Random(14)
    letters = [chr(code) for code in (*range(1, 0x250), 0x2028, 0x202E, 0xDCFF, 0xDC80, 0x1F600)]
    words = ["".join(chance.choices(letters, k=chance.randrange(9))) for _ in range(500)]
    line = command_line(["said", *words, *NAMES])
    assert_plain(line)
    assert "\n" not in line
    assert words_of(line, "said") == ["said", *words, *NAMES]


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("predicted", [False, True])
def test_the_lines_that_are_printed_start_what_was_written(
    run: Run, tmp_path: Path, name: str, predicted: bool
) -> None:
    (tmp_path / "p.toml").write_text(PROFILE)
    (tmp_path / "c.toml").write_text(CLUSTER)
    options = ["--profile", "p.toml", "--cluster", "c.toml", "--micro-batch-size", 1] if predicted else []
    ended = run("dapple", "--set", "D=2", f"--out={name}", *options)
    assert (ended.status, ended.err) == (0, "")
    assert_plain(ended.out)
    words = words_of(ended.out.splitlines()[-1], "torchrun")
    script = words[words.index("--model") - 1]
    assert (words[0], script) == ("torchrun", f"{as_argument(name)}/train.py")
    assert Path(script).is_file()
    assert not (tmp_path / "x").exists()


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_the_lines_of_a_plan_name_the_files_that_it_was_made_from(
    run: Run, tmp_path: Path, name: str, planner: Run
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "p.toml").write_text(PROFILE)
    (tmp_path / name / "c.toml").write_text(CLUSTER)
    (tmp_path / f"{name}.chim").write_text(TINY)
    options = [f"--profile={name}/p.toml", f"--cluster={name}/c.toml", f"--scheme={name}.chim"]
    ended = planner(*options, "--mini-batch", 1)
    assert (ended.status, ended.err) == (0, "")
    assert_plain(ended.out)
    words = words_of(ended.out.splitlines()[-2], "chimera")
    assert words[:2] == ["chimera", "compile"]
    assert words[2] == as_argument(f"{name}.chim")
    assert f"{as_argument(name)}/p.toml" in words
    assert run(*words[2:]).status == 0


def test_what_files_say_of_themselves_is_shown_and_not_acted_upon(run: Run, tmp_path: Path, planner: Run) -> None:
    """Where the text is right: names, notes, comments."""
    named = EVIL.encode("unicode_escape").decode().replace("\\x", "\\u00")
    (tmp_path / "p.toml").write_text(PROFILE.replace('name = "', f'name = "{named}'))
    (tmp_path / "c.toml").write_text(CLUSTER.replace('name = "', f'name = "{named}'))
    (tmp_path / "s.chim").write_text(f"# {EVIL[4:]}\n".replace("\x07", "").replace("\x9b", "") + TINY)
    files = ["--profile", "p.toml", "--cluster", "c.toml"]
    ended = run("s.chim", *files, "--micro-batch-size", 1)
    assert (ended.status, ended.err) == (0, "")
    assert "\\x1b]0;x" in ended.out
    planned = planner(*files, "--mini-batch", 2)
    assert planned.status == 0
    for text in (ended.out, planned.out, *(data.decode() for data in contents(tmp_path / "tiny.out").values())):
        assert_plain(text)
    ElementTree.parse(tmp_path / "tiny.out" / "timeline.svg")


HIDDEN = (
    *("\u202a\u202b\u202c\u202d\u202e", "\u2066\u2067\u2068\u2069", "\u200e\u200f\u061c", "\u200b\u2060\u00ad\ufeff"),
    *("\x1b[2J", "\x9b31m\x85", "\a\b\r", "\u2028\u2029", "\x7f", "a\nb", os.fsdecode(b"\xff"), "\U000e0041\ue000"),
)
"""Names that run to the left, cannot be seen, are obeyed by a terminal, break lines, or are no UTF-8."""


def texts_of(value: object) -> Iterator[str]:
    """All texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from chain.from_iterable(map(texts_of, [*value, *value.values()]))
    elif isinstance(value, list):
        yield from chain.from_iterable(map(texts_of, value))


@pytest.mark.full
@pytest.mark.parametrize("name", HIDDEN, ids=ascii)
def test_no_output_has_a_hidden_character_of_a_name(
    run: Run, planner: Run, tracer: Run, tmp_path: Path, name: str
) -> None:
    """Names of files, and those in profiles, clusters, traces and comments: on the terminal, in files and on pages."""
    in_toml = "".join(f"\\U{ord(letter):08x}" for letter in name.encode(errors="replace").decode())
    is_comment = {unicodedata.category(letter) for letter in name} <= {"Cf"}
    scheme = f"# {name}\n{TINY}" if is_comment else TINY
    for file, text in {
        f"{name}.chim": scheme,
        f"other{name}.chim": scheme,
        f"wrong{name}.chim": scheme.replace("B(m", "Q(m"),
        f"{name}.csv": "0F0,0B0\n",
        f"{name}.toml": PROFILE.replace('name = "', f'name = "{in_toml}'),
        f"cluster{name}.toml": CLUSTER.replace('name = "', f'name = "{in_toml}'),
    }.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    traced.write(tmp_path / f"trace{name}", scheme=name, backend=name, ended=name)
    files = [f"--profile={name}.toml", f"--cluster=cluster{name}.toml"]
    against, itself = f"--against=other{name}.chim", f"{name}.chim"
    said = [
        run(itself, *files, "--micro-batch-size=1", f"--out=out{name}"),
        run(itself, *files, "--micro-batch-size=1", "--json"),
        *(run(itself, f"--emit={level}") for level in ("ast", "plan", "program", "report", "timeline", "trace")),
        run(itself, against, "--html=against.html"),
        run(f"{name}.csv", "--html=csv.html"),
        run(f"wrong{name}.chim", "--html=wrong.html"),
        planner(*files, "--mini-batch=1", f"--scheme={name}.chim"),
        tracer(f"trace{name}", "--out=view"),
        tracer(f"trace{name}", "--json"),
    ]
    assert [ended.status for ended in said if ended.status] == [1], "only what is wrong is refused"
    pages = [*tmp_path.rglob("*.html")]
    assert {"schedule.html", "against.html", "csv.html", "wrong.html", "trace.html"} <= {page.name for page in pages}
    outputs = [path for folder in (f"out{name}", "view") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    for text in (
        *chain.from_iterable((ended.out, ended.err) for ended in said),
        *(path.read_text(encoding="utf-8") for path in (*pages, *outputs)),
        *texts_of([document_in(page.read_text(encoding="utf-8")) for page in pages]),
    ):
        assert_plain(text)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        (TINY, [f"--set={EVIL}=1"]),
        (TINY, [f"--set=D={EVIL}"]),
        (TINY, [f"--cost={EVIL}"]),
        (TINY, [f"--emit={EVIL}"]),
        (TINY, [f"--{EVIL}"]),
        (TINY, [f"--sync={EVIL}"]),
        (TINY, [f"--out=s.chim/{EVIL}"]),
        (TINY, [f"--profile={EVIL}", "--cluster=c.toml", "--micro-batch-size=1"]),
        (TINY, [EVIL]),
        (TINY + f"# {EVIL}\n", []),
        (TINY.replace("tiny", EVIL), []),
        (TINY + f'require D > 9, "{EVIL}"\n', []),
        (TINY + 'require D > 9, "\u202e\u2066\ufeff"\n', []),
        (TINY + "let \u202e = 1\n", []),
        (TINY + 'require D > 0, "\x9b31m"\n', ["--emit=ast"]),
    ],
)
def test_what_is_wrong_is_shown_and_not_acted_upon(run: Run, tmp_path: Path, scheme: str, options: list[str]) -> None:
    (tmp_path / "s.chim").write_text(scheme)
    ended = run("s.chim", *options)
    assert ended.status in (1, 2)
    assert ended.err
    assert_plain(ended.out + ended.err)
    (tmp_path / f"{EVIL}.chim").write_text(scheme)
    assert_plain(run(f"{EVIL}.chim", *options).err)


@pytest.mark.parametrize(
    "text", ["{0} D=2", "program {0}", "program p\nworkers {0}", "program p\n{0}", "# {0}\nplan p"]
)
def test_what_is_wrong_in_an_ir_text_or_a_profile_is_shown_and_not_acted_upon(
    run: Run, tmp_path: Path, text: str
) -> None:
    for name, said in (("a.sir", text), ("p.toml", text.replace("program", "[model]\nname ="))):
        (tmp_path / name).write_text(said.format(EVIL))
    (tmp_path / "c.toml").write_text(CLUSTER)
    for arguments in (["a.sir"], ["dapple", "--profile", "p.toml", "--cluster", "c.toml", "--micro-batch-size", 1]):
        ended = run(*arguments)
        assert ended.status == 1
        assert_plain(ended.out + ended.err)


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_is_named_after_whatever_its_file_is_called(name: str) -> None:
    link = Link(1e-6, 1e-9)
    text = write_cluster(Cluster(name, 2, 2, 2**30, 0, link, link, link))
    assert read_cluster(Source("c.toml", text)).name == name.encode(errors="replace").decode()
    assert_plain(text.replace("\u2028", "").replace("\u202e", "").replace("\ufeff", "").replace("\x9b", ""))
