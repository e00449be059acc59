"""What earlier calls have compiled is not compiled again, and nobody can tell from what is said or written."""

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chimera_ir import cache, console, library, source
from chimera_ir.answer import Answer, Output, read
from chimera_ir.commands import common, compile_command
from tests.repeatable import part
from tests.unit.command import TINY, Ended, Run, contents, on_a_terminal

MIDDLE = Path(__file__).resolve().parent.parent / "errors" / "middle"
WARNED = str(MIDDLE / "falling_clock_without_a_cycle.chim")
KEEPING = (
    "import os; from chimera_ir import cache, progress; from chimera_ir.commands import compile_command;"
    "cache.WORTHWHILE = cache.SETTLED = 0.0; progress.AFTER = 3600.0\n"
    "for call in range(2):\n"
    "    child = os.fork()\n"
    "    if not child: compile_command.main()\n"
    "    assert os.waitpid(child, 0)[1] == 0; print('THE END', flush=True)"
)
"""Two calls, each in a process that is forked from one which has imported the compiler."""
ANSWER = Answer(("a warning",), "a table\n", Output("tiny", 2, {"train.py": "pass\n", "chimera_runtime/x.py": ""}))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of its own, in which whatever is compiled is kept, by a compiler of one file."""
    folder = tmp_path_factory.mktemp("cache") / "kept"
    monkeypatch.setenv(cache.VARIABLE, str(folder))
    monkeypatch.setattr(cache, "WORTHWHILE", 0.0)
    monkeypatch.setattr(cache, "SETTLED", 0.0)
    monkeypatch.setattr(source, "everything", lambda: iter([Path(cache.__file__)]))
    return folder


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What has been compiled so far, and not taken from the cache."""
    compiled: list[object] = []
    produce = compile_command.produce

    def counted(compilation: object, *arguments: object, **more: object) -> object:
        compiled.append(compilation)
        return produce(compilation, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(compile_command, "produce", counted)
    return compiled


def entry(text: str) -> bytes:
    return hashlib.sha256(text.encode()).hexdigest().encode() + b"\n" + text.encode()


def opened_to_all(folder: Path) -> None:
    folder.chmod(0o777)


def given_away(folder: Path) -> None:
    if os.getuid():
        pytest.skip("only root gives directories away")
    os.chown(folder, 12345, -1)


def with_answers_for_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o666)


@pytest.mark.parametrize("change", [opened_to_all, given_away, with_answers_for_all])
def test_an_answer_that_another_user_may_have_written_is_not_believed(
    run: Run, kept: Path, passes: list[object], change: Callable[[Path], None]
) -> None:
    first = run("dapple", "--emit", "report")
    change(kept)
    for path in kept.iterdir():
        path.write_bytes(entry(path.read_text().partition("\n")[2].replace("dapple", "evil")))
    again = run("dapple", "--emit", "report")
    assert (again.status, again.out) == (first.status, first.out) == (0, first.out)
    assert len(passes) == 2


# A hit is a miss, but faster.


@pytest.mark.parametrize(
    "arguments",
    [
        *([name, "--out", "o"] for name in part(library.names(), 12)),
        ["chimera", "--set", "D=8", "--set", "f=2", "--cost", "B=5/2"],
        *(["chimera_doubling", "--emit", level] for level in ("ast", "plan", "schedule", "program", "report")),
        ["pipedream", "--emit", "timeline"],
        [WARNED, "--out", "o"],
        [WARNED, "--emit", "report"],
    ],
    ids=lambda value: " ".join(value).rpartition("/")[2] if isinstance(value, list) else "",
)
def test_a_second_call_compiles_nothing_and_gives_the_same_bytes(
    run: Run, kept: Path, tmp_path: Path, passes: list[object], arguments: list[str]
) -> None:
    first = run(*arguments, "--no-cache"), contents(tmp_path)
    assert first[0].status == 0
    for _ in range(2):
        assert (run(*arguments), contents(tmp_path)) == first
    assert len(passes) == 2


def test_a_picture_is_drawn_for_the_width_that_there_is(
    run: Run, kept: Path, passes: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(width: int) -> str:
        monkeypatch.setattr(console, "_WIDE", width)
        return run("chimera", "--set", "N=16", "--emit", "timeline").out

    first = [drawn(80), drawn(60)]
    assert len({*first}) == len(passes) == 2
    assert [drawn(80), drawn(60)] == first
    assert len(passes) == 2


def test_a_terminal_is_shown_the_same_bytes_by_a_second_call_and_others_in_their_own_way(
    kept: Path, tmp_path: Path
) -> None:
    looks = [{"TERM": "dumb"}, {"TERM": "xterm", "COLORTERM": "truecolor", "COLUMNS": "60"}]
    seen = set()
    for number, look in enumerate(looks, 1):
        ended = on_a_terminal(KEEPING, WARNED, "--out", "o", cwd=tmp_path, env=look)
        first, second, rest = ended.out.split("THE END\r\n")
        assert first == second
        assert (rest, ended.status, len([*kept.iterdir()])) == ("", 0, number)
        seen.add(first)
    assert len(seen) == len(looks)


def test_an_answer_goes_to_whatever_directory_is_asked_for(run: Run, kept: Path, passes: list[object]) -> None:
    assert "wrote chimera.out" in run("chimera").out
    assert "torchrun --nproc-per-node=4 else/where/train.py" in run("chimera", "--out", "else/where").out
    assert contents(Path("else/where")) == contents(Path("chimera.out"))
    assert len(passes) == 1


def test_a_directory_that_is_not_ours_is_refused_whether_or_not_the_answer_is_known(
    run: Run, kept: Path, tmp_path: Path
) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "train.py").write_text("mine")
    first = run("chimera", "--out", "o")
    first.assert_refused(common.WRONG_COMMAND, "was not written by chimera-compile")
    assert run("chimera", "--out", "o") == first


# What is asked again is asked again only if nothing that matters has changed.


@pytest.mark.parametrize(
    "changed",
    [
        "other.chim",
        "tiny.chim --set D=3",
        "tiny.chim --cost F=2",
        "tiny.chim --max-operations 999",
        "tiny.chim --communicators pair",
        "tiny.chim --emit report",
        "tiny.chim --no-cache",
    ],
)
def test_another_question_is_compiled(run: Run, kept: Path, tmp_path: Path, passes: list[object], changed: str) -> None:
    for name in ("tiny.chim", "other.chim"):
        (tmp_path / name).write_text(TINY)
    assert run("tiny.chim").status == 0
    assert run(*changed.split()).status == 0
    assert len(passes) == 2


def test_a_changed_text_is_compiled(run: Run, kept: Path, tmp_path: Path, passes: list[object]) -> None:
    for text in (TINY, TINY.replace("0..1", "0..2").replace("@ s", "@ 2*m + s"), TINY):
        (tmp_path / "tiny.chim").write_text(text)
        run("tiny.chim", "--emit", "plan")
    assert len(passes) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda files: files[0].write_text("changed"),
        lambda files: files[0].rename(files[0].with_name("renamed.py")),
        lambda files: files[0].unlink(),
        lambda files: files[0].with_name("new.py").write_text(""),
    ],
    ids=["changed", "renamed", "removed", "added"],
)
def test_another_compiler_is_asked_again(
    run: Run, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[object], change: object
) -> None:
    folder = tmp_path / "compiler"
    folder.mkdir()
    files = [folder / name for name in ("a.py", "b.py")]
    for file in files:
        file.write_text("the same in both")
    monkeypatch.setattr(source, "everything", lambda: iter(sorted(folder.iterdir())))
    for _ in range(2):
        run("chimera", "--emit", "report")
    assert len(passes) == 1
    change(files)  # type: ignore[operator]
    run("chimera", "--emit", "report")
    assert len(passes) == 2


def test_the_compiler_is_every_file_of_the_package_the_grammars_and_the_templates() -> None:
    names = {path.name for path in source.everything()}
    assert {"answer.py", "cache.py", "library.toml", "chimera.chim", "scheme.lark", "rank.py.j2", "lane.py"} < names
    assert not any(name.endswith(".pyc") for name in names)


def test_another_version_of_a_library_is_another_compiler(
    run: Run, kept: Path, monkeypatch: pytest.MonkeyPatch, passes: list[object]
) -> None:
    for version in ("1.0", "1.1"):
        monkeypatch.setattr(cache.metadata, "version", lambda _, version=version: version)
        for _ in range(2):
            run("chimera", "--emit", "report")
    assert len(passes) == 2


# What is not kept.


def test_what_was_compiled_while_the_compiler_changed_is_not_kept(
    run: Run, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, produce = tmp_path / "a.py", compile_command.produce
    file.write_text("before")
    monkeypatch.setattr(source, "everything", lambda: iter([file]))

    def edited(*arguments: object, **more: object) -> object:
        file.write_text("after")
        return produce(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(compile_command, "produce", edited)
    assert run("chimera", "--emit", "report").status == 0
    assert not kept.exists()


@pytest.mark.parametrize("limit", ["WORTHWHILE", "SETTLED"])
def test_what_is_compiled_quickly_or_by_a_compiler_that_somebody_works_on_is_not_kept(
    run: Run, kept: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(cache, limit, 1e12)
    assert run("chimera", "--emit", "report").status == 0
    assert not kept.exists()


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["chimera", "--set", "D=3"], common.WRONG_TEXT),
        (["chimera", "--set", "X=3"], common.WRONG_COMMAND),
        ([str(MIDDLE / "falling_clock_with_a_cycle.chim")], common.WRONG_TEXT),
    ],
)
def test_what_is_refused_is_refused_again(run: Run, kept: Path, arguments: list[str], status: int) -> None:
    first = run(*arguments)
    first.assert_refused(status)
    assert run(*arguments) == first
    assert not kept.exists()


def test_a_fault_of_ours_is_not_kept(run: Run, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_command, "produce", lambda *_, **__: 1 / 0)
    assert run("chimera").status == common.OUR_FAULT
    assert not kept.exists()


@pytest.mark.parametrize("how", ["option", "variable"])
def test_who_wants_no_cache_has_none(
    run: Run, kept: Path, monkeypatch: pytest.MonkeyPatch, passes: list[object], how: str
) -> None:
    if how == "variable":
        monkeypatch.setenv(cache.VARIABLE, "")
    for _ in range(2):
        run("chimera", "--emit", "report", *(["--no-cache"] if how == "option" else []))
    assert len(passes) == 2
    assert not kept.exists()


# A directory in whatever state.


DAMAGED = {
    "empty": b"",
    "cut": entry(ANSWER.as_json())[:-1],
    "longer": entry(ANSWER.as_json()) + b" ",
    "changed": entry(ANSWER.as_json()).replace(b"table", b"chair"),
    "binary": bytes(range(256)),
    "no JSON": entry("nothing"),
    "too deep": entry("[" * 100_000),
    "of another kind": entry("[]"),
    "no warnings": entry('{"printed": "", "output": null}'),
    "a wrong type": entry('{"warnings": [1], "printed": "", "output": null}'),
    "a path that leads up": entry(ANSWER.as_json().replace("chimera_runtime/x.py", "chimera_runtime/../../x.py")),
    "a path that leads away": entry(ANSWER.as_json().replace("chimera_runtime/x.py", "/x.py")),
    "a scheme that leads up": entry(ANSWER.as_json().replace("tiny", "../tiny")),
}


def test_a_damaged_answer_is_none_and_is_replaced(run: Run, kept: Path, tmp_path: Path, passes: list[object]) -> None:
    first, written = run("chimera"), contents(tmp_path)
    (file,) = kept.iterdir()
    whole = file.read_bytes()
    for compiled, (damage, damaged) in enumerate(DAMAGED.items(), 2):
        file.write_bytes(damaged)
        assert (run("chimera"), contents(tmp_path)) == (first, written), damage
        assert (len(passes), file.read_bytes()) == (compiled, whole), damage


def test_an_answer_reads_back_from_its_text() -> None:
    assert read(ANSWER.as_json()) == ANSWER
    shown = Answer((), "\udcff \x1b[1m\r\n", None)
    assert read(shown.as_json()) == shown


@pytest.mark.parametrize("place", ["/dev/null/x", "/proc/x", "file", "file/x", "loop", "x" * 300])
def test_a_cache_that_cannot_be_written_is_none(
    run: Run, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv(cache.VARIABLE, place)
    for _ in range(2):
        ended = run("chimera", "--emit", "report")
        assert (ended.status, ended.err) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


PLACED = {
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "huge": lambda path: path.touch() or os.truncate(path, cache.LIMIT + 1),
}


@pytest.mark.parametrize("make", PLACED.values(), ids=PLACED.keys())
def test_what_is_no_answer_in_the_place_of_one_does_not_matter(
    run: Run, kept: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    first = run("chimera", "--emit", "report")
    (file,) = kept.iterdir()
    file.unlink()
    make(file)
    make(kept / f"{'0' * 64}.json")
    assert run("chimera", "--emit", "report") == first
    assert file in kept.iterdir()
    monkeypatch.setattr(cache, "LIMIT", 0)
    assert run("chimera", "--set", "D=2", "--emit", "report").status == 0
    assert all(path.is_dir() for path in kept.iterdir()), "what can be dropped is"


def test_beyond_the_limit_what_was_used_least_recently_goes_and_files_of_others_stay(
    run: Run, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(size: int) -> Path:
        before = set(kept.iterdir()) if kept.exists() else set()
        run("chimera", "--set", f"D={size}", "--emit", "report")
        (new,) = set(kept.iterdir()) - before
        os.utime(new, (size, size))
        return new

    used, unused = compiled(4), compiled(6)
    (kept / "notes.txt").write_text("mine" * 10_000)
    os.utime(kept / "notes.txt", (1, 1))
    run("chimera", "--set", "D=4", "--emit", "report")
    monkeypatch.setattr(cache, "LIMIT", 2 * used.stat().st_size + 1000)
    new = compiled(2)
    assert {*kept.iterdir()} == {used, new, kept / "notes.txt"}
    assert not unused.exists()


def test_calls_at_the_same_time_read_whole_answers_or_none(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LIMIT", 2000)

    def ask(number: int) -> Answer:
        return cache.recall(lambda: f"question {number % 3}", lambda: ANSWER)

    with ThreadPoolExecutor(8) as threads:
        assert all(answer == ANSWER for answer in threads.map(ask, range(60)))
    assert all(path.suffix == ".json" for path in kept.iterdir())
    assert sum(path.stat().st_size for path in kept.iterdir()) <= cache.LIMIT


def test_only_the_user_may_read_a_new_cache(run: Run, kept: Path) -> None:
    run("chimera", "--emit", "report")
    assert kept.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in kept.iterdir())


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"XDG_CACHE_HOME": "/some/cache"}, "/some/cache/chimera_ir"),
        ({"XDG_CACHE_HOME": ""}, "/a/user/.cache/chimera_ir"),
        ({"XDG_CACHE_HOME": "relative"}, "/a/user/.cache/chimera_ir"),
        ({"XDG_CACHE_HOME": "/some/cache", "CHIMERA_CACHE": "here"}, "here"),
        ({"CHIMERA_CACHE": ""}, None),
    ],
)
def test_answers_are_kept_where_the_platform_keeps_such_things(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: str | None
) -> None:
    for name in ("XDG_CACHE_HOME", cache.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/a/user")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache._directory() == (None if place is None else Path(place))


def test_the_text_of_an_answer_is_plain_json(run: Run, kept: Path) -> None:
    ended: Ended = run("chimera", "--emit", "report")
    (file,) = kept.iterdir()
    assert json.loads(file.read_bytes().partition(b"\n")[2])["printed"] == ended.out
