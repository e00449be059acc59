"""The output directory: written whole or not at all, and nothing else is written anywhere."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chimera_ir import output
from chimera_ir.commands.common import OUR_FAULT, WRONG_COMMAND, WRONG_TEXT
from tests.patience import PATIENCE
from tests.unit import dying
from tests.unit.command import TINY, Run, contents, shell

ROOT = Path(__file__).resolve().parent.parent.parent

SHARED = ("train.py", "chimera_runtime/lane/lane.py", "schedule.sir", "report.json", "timeline.svg")


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
    run("chimera", "--out", out).assert_refused(WRONG_COMMAND, "--out")
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


@pytest.mark.skipif(sys.platform == "win32", reason="needs processes that fork")
@pytest.mark.parametrize("how", dying.HOW)
def test_whatever_happens_to_writers_one_program_is_there_with_all_files_of_the_user(how: str, tmp_path: Path) -> None:
    """Deaths, failures, interrupts at every step; launches meanwhile; writers killed at random; several; no rights."""
    command = [sys.executable, "-m", "tests.unit.dying", how, str(tmp_path / "folder")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on processes")
@pytest.mark.parametrize("existing", [False, True])
def test_a_disk_without_room_is_status_two_and_leaves_everything_as_it_was(tmp_path: Path, existing: bool) -> None:
    if existing:
        assert shell("chimera", "--out", "o", cwd=tmp_path).returncode == 0
    before = contents(tmp_path)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

    done = shell("chimera", "--set", "D=2", "--out", "o", cwd=tmp_path, preexec_fn=limit)
    assert (done.returncode, done.stdout) == (WRONG_COMMAND, b"")
    assert done.stderr == b"Error: --out o: File too large\n"
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == (["o"] if existing else [])


# Directories in every state.


def test_the_directory_in_which_the_command_runs_can_be_replaced(run: Run, tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    os.chdir(tmp_path / "o")
    assert run("chimera", "--out", ".").status == 0
    (tmp_path / "o" / "mine").write_text("mine")
    assert run("chimera", "--set", "D=2", "--out", ".").status == 0
    assert {*os.listdir(".")} >= {"mine", "train.py", "rank_1.py"}
    assert not Path("rank_2.py").exists()


def test_a_directory_on_a_file_system_of_its_own_can_be_replaced(run: Run, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "none", str(tmp_path / "disk")]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount")
    try:
        for size in (4, 2):
            assert run("chimera", "--set", f"D={size}", "--out", "disk").status == 0
            (tmp_path / "disk" / "mine").write_text("mine")
        assert [path.name for path in tmp_path.iterdir()] == ["disk"]
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_a_working_directory_that_is_gone_is_status_two(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for arguments in ([], ["--out", "."], ["--out", "x/y"]):
        run("chimera", *arguments).assert_refused(WRONG_COMMAND, "--out ", "the working directory is gone")


@pytest.mark.parametrize("target", ["link", "chimera_runtime", "train.py", "rank_1.py"])
def test_links_that_the_user_put_in_the_place_of_files_are_not_followed(run: Run, tmp_path: Path, target: str) -> None:
    """A link to the directory is, and stays one."""
    assert run("chimera", "--set", "D=2", "--out", "o").status == 0
    (tmp_path / "link").symlink_to("o")
    path = tmp_path / "o" / target
    if target != "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path)
    ended = run("chimera", "--set", "D=4", "--out", "link")
    if target == "link":
        assert ended.status == 0
        assert (tmp_path / "link").is_symlink()
    else:
        ended.assert_refused(WRONG_COMMAND, f"{target} was not written by chimera-compile and is in the way")
        assert contents(tmp_path) == before
    run("chimera", "--set", "D=2", "--out", "o")
    assert path.is_symlink() == (target != "link")


def test_a_link_in_the_place_of_what_is_no_longer_needed_stays_with_what_it_leads_to(run: Run, tmp_path: Path) -> None:
    assert run("chimera", "--set", "D=4", "--out", "o").status == 0
    (tmp_path / "mine").write_text("mine")
    for name in ("rank_2.py", "rank_3.py"):
        (tmp_path / "o" / name).unlink()
    (tmp_path / "o" / "rank_2.py").symlink_to(tmp_path / "mine")
    (tmp_path / "o" / "rank_3.py").mkdir()
    assert run("chimera", "--set", "D=2", "--out", "o").status == 0
    assert (tmp_path / "mine").read_text() == (tmp_path / "o" / "rank_2.py").read_text() == "mine"
    assert (tmp_path / "o" / "rank_3.py").is_dir()


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (b"train.py\n\xff\xfe\n", "is damaged: it is not UTF-8"),
        (b"train.py\n../mine\n", "is damaged: it lists '../mine', which lies elsewhere"),
        (b"/etc/hostname\n", "is damaged: it lists '/etc/hostname'"),
        (b"support/../../mine\n", "is damaged: it lists 'support/../../mine'"),
        (b"a\0b\n", "is damaged: it lists 'a\\x00b'"),
        (b"\x1b[2J/../..\n", "is damaged: it lists '\\x1b[2J/../..'"),
    ],
)
@pytest.mark.parametrize("where", [output.MANIFEST, f"{output.MANIFEST}.new/{output.MANIFEST}"])
def test_a_damaged_manifest_is_refused(run: Run, tmp_path: Path, manifest: bytes, words: str, where: str) -> None:
    (tmp_path / "mine").write_text("mine")
    assert run("chimera", "--out", "o").status == 0
    (tmp_path / "o" / where).parent.mkdir(exist_ok=True)
    (tmp_path / "o" / where).write_bytes(manifest)
    before = contents(tmp_path)
    run("chimera", "--set", "D=2", "--out", "o").assert_refused(WRONG_COMMAND, "--out o: .chimera-compile", words)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_called_like_a_manifest_and_is_no_file_makes_no_directory_ours(
    run: Run, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "o").mkdir()
    make(tmp_path / "o" / output.MANIFEST)
    run("chimera", "--out", "o").assert_refused(WRONG_COMMAND, "was not written by chimera-compile")


def test_names_of_a_manifest_that_are_the_users_by_now_are_left_alone(run: Run, tmp_path: Path) -> None:
    """A manifest may list whatever lies below; only regular files go."""
    assert run("chimera", "--out", "o").status == 0
    (tmp_path / "o" / "folder").mkdir()
    (tmp_path / "o" / "folder" / "mine").write_text("mine")
    with (tmp_path / "o" / output.MANIFEST).open("a") as file:
        file.write("folder\n.\nnowhere/x\nlink/mine\n")
    (tmp_path / "o" / "link").symlink_to("folder")
    assert run("chimera", "--set", "D=2", "--out", "o").status == 0
    assert (tmp_path / "o" / "folder" / "mine").read_text() == "mine"


def test_what_an_interrupted_run_has_left_is_not_put_over_a_file_of_the_user(run: Run, tmp_path: Path) -> None:
    assert run("chimera", "--set", "D=2", "--out", "o").status == 0
    left = tmp_path / "o" / f"{output.MANIFEST}.new"
    left.mkdir()
    (left / "rank_2.py").write_text("left")
    (left / output.MANIFEST).write_text("rank_0.py\nrank_2.py\n")
    (tmp_path / "o" / "rank_2.py").write_text("mine")
    before = contents(tmp_path)
    run("chimera", "--out", "o").assert_refused(WRONG_COMMAND, "rank_2.py was not written by", "is in the way")
    assert contents(tmp_path) == before
    (tmp_path / "o" / "rank_2.py").rename(tmp_path / "o" / "mine.py")
    assert run("chimera", "--out", "o").status == 0
    assert (tmp_path / "o" / "mine.py").read_text() == "mine"
    assert not left.exists()


PLACED = {
    "pipe": (os.mkfifo, "is no regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
    "directory": (Path.mkdir, "is a directory"),
    "huge": (lambda path: path.touch() or os.truncate(path, 2**40), "it is larger than 1,024 MiB"),
}


@pytest.mark.parametrize(("make", "words"), PLACED.values(), ids=PLACED.keys())
def test_a_single_file_takes_the_place_of_no_other_thing(
    tmp_path: Path, make: Callable[[Path], object], words: str
) -> None:
    make(tmp_path / "p.toml")
    with pytest.raises(output.OutputRefused, match=f"^--out .*p.toml: {words}"):
        output.write_file(tmp_path / "p.toml", "text", "mark", force=words.endswith("file"))
    assert [path.name for path in tmp_path.iterdir()] == ["p.toml"]


def test_a_single_file_is_written_whole_after_one_that_died_and_others_stay(tmp_path: Path) -> None:
    for name in (".p.toml.a1b2.part", ".q.toml.a1b2.part", ".p.toml.swp"):
        (tmp_path / name).write_text("half")
    for text in ("old", "new"):
        output.write_file(tmp_path / "p.toml", text, "mark\n", force=False)
    assert contents(tmp_path) == {".q.toml.a1b2.part": b"half", ".p.toml.swp": b"half", "p.toml": b"mark\nnew"}
    with pytest.raises(output.OutputRefused, match=r"--out .*: No such file or directory"):
        output.write_file(tmp_path / "nowhere" / "p.toml", "text", "mark", force=False)


def test_a_writer_that_does_not_end_is_not_waited_for_without_end(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(output, "PAUSE", 0.0)
    assert run("chimera", "--out", "o").status == 0
    handle = os.open("o", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        ended = run("chimera", "--out", "o")
    finally:
        os.close(handle)
    ended.assert_refused(WRONG_COMMAND, "--out o: another command writes there and does not end")
    assert run("chimera", "--out", "o").status == 0


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
