"""How long a user waits from the shell prompt to the report.

    .venv/bin/python benchmarks/compile_time.py [--runs 9]

Every command runs as a process of its own, as a shell would start it; the first run of each, which fills the file
caches, is thrown away, and the commands take turns, so that a busy moment hits all of them. The unit is the start of
the same Python interpreter with nothing to do: a ratio says how many of those a compilation costs, on any machine.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from commands import COMPILE

COMMANDS: dict[str, Sequence[str]] = {
    "python -c pass": (sys.executable, "-c", "pass"),
    "chimera-compile --version": (*COMPILE, "--version"),
    "chimera D=4 N=4": (*COMPILE, "chimera", "--emit", "report"),
    "chimera D=8 N=32": (*COMPILE, "chimera", "--set", "D=8", "--set", "N=32", "--emit", "report"),
    "chimera D=32 N=128": (*COMPILE, "chimera", "--set", "D=32", "--set", "N=128", "--emit", "report"),
}
UNIT = "python -c pass"


def seconds(command: Sequence[str]) -> float:
    """The wall clock of one run of a command, nothing taken from an earlier one."""
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def measure(runs: int) -> dict[str, list[float]]:
    """The wall clocks of each command, without the first."""
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs + 1):
        for name, command in COMMANDS.items():
            taken[name].append(seconds(command))
    return {name: times[1:] for name, times in taken.items()}


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description="How long a user waits from the shell prompt to the report.")
    parser.add_argument("--runs", type=int, default=9, help="runs per command whose median counts [default: 9]")
    taken = measure(parser.parse_args().runs)
    unit = statistics.median(taken[UNIT])
    print(f"{'':<27}{'median':>9}{'fastest':>9}{'slowest':>9}{'units':>8}")
    for name, times in taken.items():
        middle = statistics.median(times)
        print(f"{name:<27}{middle:>8.3f}s{min(times):>8.3f}s{max(times):>8.3f}s{middle / unit:>8.1f}")


if __name__ == "__main__":
    main()
