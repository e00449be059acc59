"""What a rank finds out about the machine that it runs on."""

import os
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def memory(root: Path = _ROOT) -> int:
    """Bytes that the processes of this machine may have together: its memory, or less where a control group says so.

    ``root`` is where /proc and /sys lie.
    """
    limits = [limit for limit in map(_limit, _control_files(root)) if limit is not None]
    return min([_physical(root), *limits])


def _physical(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))


def _control_files(root: Path) -> list[Path]:
    """The limits of this process's control group and of all above it: version 2, and version 1's for memory."""
    groups = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = [groups / "memory.max", groups / "memory/memory.limit_in_bytes"]
    for line in lines:
        number, controllers, path = line.split(":", 2)
        relative = PurePosixPath(path.lstrip("/"))
        folders = [relative, *relative.parents][:-1]
        if number == "0":
            found += [groups / folder / "memory.max" for folder in folders]
        elif "memory" in controllers.split(","):
            found += [groups / "memory" / folder / "memory.limit_in_bytes" for folder in folders]
    return found


def _limit(file: Path) -> int | None:
    """What a control file says, unless it says "max" or is not there."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
