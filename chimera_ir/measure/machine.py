"""Memory of the machine that a rank runs on."""

import os
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def memory(root: Path = _ROOT) -> int:
    """Bytes that all processes of this machine may use: its memory, or the lowest limit of a control group."""
    limits = [limit for limit in map(_limit, _control_files(root)) if limit is not None]
    return min([_physical(root), *limits])


def _physical(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))


def _control_files(root: Path) -> list[Path]:
    """Files with the limits of this process's control group and of all groups above it, of versions 1 and 2."""
    groups = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    files = [groups / "memory.max", groups / "memory/memory.limit_in_bytes"]
    for line in lines:
        number, controllers, path = line.split(":", 2)
        relative = PurePosixPath(path.lstrip("/"))
        folders = [relative, *relative.parents][:-1]
        if number == "0":
            files += [groups / folder / "memory.max" for folder in folders]
        elif "memory" in controllers.split(","):
            files += [groups / "memory" / folder / "memory.limit_in_bytes" for folder in folders]
    return files


def _limit(file: Path) -> int | None:
    """The limit in a control file; None if the file says "max" or does not exist."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
