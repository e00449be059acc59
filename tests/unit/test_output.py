"""The output directory: written whole or not at all, and nothing else is written anywhere."""

import os
from pathlib import Path

import pytest

from chimera_ir import output
from chimera_ir.command import OUR_FAULT, WRONG_COMMAND, WRONG_TEXT
from tests.unit.command import TINY, Run, contents

SHARED = ("train.py", "runtime.py", "schedule.sir", "report.json", "timeline.svg")


def test_the_directory_holds_what_the_contract_lists_and_is_named_after_the_scheme(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file.chim").write_text(TINY)
    assert run("file.chim").status == 0
    found = contents(tmp_path / "tiny.out")
    assert {*SHARED, "rank_0.py", "rank_1.py"} <= found.keys()
    assert "rank_2.py" not in found
    assert all(text for name, text in found.items() if not name.endswith("__init__.py"))


def test_an_output_of_ours_is_replaced_and_files_of_others_stay(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "o"
    assert run("chimera", "--set", "D=4", "--out", "o").status == 0
    (out / "metrics.json").write_text("mine")
    (out / "runs").mkdir()
    (out / "runs" / "weights.bin").write_bytes(b"\0mine")
    (out / "link").symlink_to("runs/weights.bin")
    assert run("chimera", "--set", "D=2", "--out", "o/").status == 0
    assert not (out / "rank_2.py").exists()
    assert (out / "metrics.json").read_text() == "mine"
    assert (out / "runs" / "weights.bin").read_bytes() == b"\0mine"
    assert (out / "link").is_symlink()
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


def test_a_file_of_others_with_a_name_that_is_needed_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    assert run("chimera", "--set", "D=2", "--out", "o").status == 0
    (tmp_path / "o" / "rank_3.py").write_text("mine")
    before = contents(tmp_path)
    run("chimera", "--set", "D=4", "--out", "o").assert_refused(WRONG_COMMAND, "rank_3.py")
    assert contents(tmp_path) == before


def test_an_empty_directory_and_a_link_to_one_are_filled(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    assert run("chimera", "--out", "link").status == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty" / "train.py").is_file()


def test_a_directory_that_is_not_ours_is_refused_untouched(run: Run, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = contents(tmp_path)
    run("chimera", "--out", "src").assert_refused(WRONG_COMMAND, "was not written by chimera-compile")
    run("chimera", "--out", ".").assert_refused(WRONG_COMMAND, "was not written by chimera-compile")
    run("chimera", "--out", "").assert_refused(WRONG_COMMAND)
    run("chimera", "--out", "/").assert_refused(WRONG_COMMAND, "was not written by chimera-compile")
    run("chimera", "--out", "file").assert_refused(WRONG_COMMAND, "is not a directory")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("out", ["/dev/null/x", "/proc/x", "file/x/y", "x" * 300, "loop"])
def test_an_output_that_cannot_be_written_is_status_two(run: Run, tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    run("chimera", "--out", out).assert_refused(WRONG_COMMAND, "--out ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device", "report.json"), RuntimeError("broken")])
@pytest.mark.parametrize("existing", [False, True])
def test_a_write_that_fails_leaves_everything_as_it_was(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, existing: bool
) -> None:
    if existing:
        assert run("chimera", "--set", "D=2", "--out", "o").status == 0
        (tmp_path / "o" / "metrics.json").write_text("mine")
    before = contents(tmp_path)
    write = Path.write_text

    def fail(path: Path, *arguments: str, **options: str) -> int:
        if path.name == "report.json":
            raise error
        return write(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", fail)
    ended = run("chimera", "--out", "o")
    assert ended.status == (WRONG_COMMAND if isinstance(error, OSError) else OUR_FAULT)
    assert ended.out == ""
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == (["o"] if existing else [])


@pytest.mark.parametrize("error", [OSError(18, "Invalid cross-device link", "o"), KeyboardInterrupt()])
def test_a_replacement_that_fails_at_the_last_moment_brings_the_old_one_back(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    assert run("chimera", "--set", "D=2", "--out", "o").status == 0
    (tmp_path / "o" / "metrics.json").write_text("mine")
    before = contents(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("chimera_ir.output._carry_over", fail)
    assert run("chimera", "--out", "o").status != 0
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


@pytest.mark.parametrize("name", ["../x", "/x", "..", "a/b", "a.b", '"x"', "a-b", "$HOME", "a\\b", "~", "x\0y", "é"])
def test_no_name_in_a_text_leads_out_of_the_directory(run: Run, tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "s.chim").write_text(TINY.replace("tiny", name))
    (inside / "pipe.chim").write_text(TINY.replace("pipe p", f"pipe {name}"))
    program = run(*_file(tmp_path, "tiny.chim", TINY), "--emit", "program").out
    (inside / "p.sir").write_text(program.replace("program tiny", f"program {name}"))
    (inside / "pipe.sir").write_text(program.replace("pipe p ", f"pipe {name} "))
    os.chdir(inside)
    before = contents(tmp_path)
    for file in ("s.chim", "pipe.chim", "p.sir", "pipe.sir"):
        run(file).assert_refused(WRONG_TEXT, f"--> {file}:")
    assert contents(tmp_path) == before


def _file(folder: Path, name: str, text: str) -> list[str]:
    (folder / name).write_text(text)
    return [name]


def test_every_name_that_is_written_lies_below_the_directory(run: Run, tmp_path: Path) -> None:
    assert run("chimera", "--out", "o").status == 0
    listed = (tmp_path / "o" / output.MANIFEST).read_text().splitlines()
    assert listed == sorted(name for name in contents(tmp_path / "o") if name != output.MANIFEST)
    assert all(not name.startswith("/") and ".." not in Path(name).parts for name in listed)
