"""What chimera-plan lists, chimera-compile accepts: random schemes with and without a flush, bounds and clauses."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from chimera_ir import library
from chimera_ir.commands.compile_command import compile_command
from chimera_ir.commands.plan_command import plan_command
from chimera_ir.compilation import Compilation
from chimera_ir.request import Request
from tests.repeatable import part, tries
from tests.sizes import all_sizes
from tests.unit.test_plan import cluster, profile

SEEDS = range(tries(10))

Plan = Callable[..., dict[str, Any]]

PLACES = {"s": ("D", 0), "D-1 - s": ("D", 0), "s % D": ("v*D", 1), "if s < D then s else 2*D-1 - s": ("2*D", 1)}
"""Where a stage may be, with the number of stages, and whether a worker has several."""


def random_scheme(random: Random) -> str:
    """A scheme of one pipe or two; many can run, some cannot, and which is which shows at every level."""
    stages, chunked = PLACES[place := random.choice([*PLACES])]
    streams, pipes = random.random() < 0.6, 1 if chunked else random.choice([1, 1, 2])
    chunks = ", v = 2" if "v" in stages else ""
    lines = [f"scheme drawn(D = 2{chunks}{'' if streams else ', N = 4'})", "workers D"]
    update = random.choice(["1", "2", "D", "2*D"])
    lines += [f"update every {update}"] if streams else []
    for quantity, unit in (("weights", 1), ("activations", 1), ("bytes", "MB")):
        limit, (on, by_worker) = f"{random.randint(1, 5)}*{unit}", random.choice([("", ""), (" on w", f" + w*{unit}")])
        lines += [f"memory {quantity}{on} <= {limit}{by_worker}"] if random.random() < 0.3 else []
    rate, lag = pipes * random.choice([2, 2, 3]) * (1 + chunked), random.randint(0, 5)
    for number in range(pipes):
        micros = f"0.. as {pipes}*m+{number}" if streams else f"0..share(N, {pipes}, {number})"
        late = number * random.choice([1, 2, 2, 3])
        where = f"D-1 - ({place})" if number else place
        lines += [f"pipe p{number} {{", f"  stages s in 0..{stages} on {where}", f"  micros m in {micros}"]
        lines += [f"  reads version max(0, ({pipes}*m+{number})/({update}) - {lag})"] if streams else []
        lines += ["  recompute when s > 0"] if random.random() < 0.2 else []
        lines += ["  sync lazy when s > 0"] if not streams and random.random() < 0.2 else []
        lines += [f"  F(m, s) @ {rate}*m + s + {late}"]
        lines += [f"  B(m, s) @ {rate}*m + 2*({stages})-1 - s + {late + random.choice([0, 0, 0, 1, 2])}", "}"]
    return "\n".join(lines)


def answer(command: Any, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Plans for the random scheme of a seed, as JSON."""
    monkeypatch.chdir(tmp_path)
    Path("m.toml").write_text(profile((2, 4), (1, 2)), encoding="utf-8")
    Path("c.toml").write_text(cluster(4, sums="100 MB/s"), encoding="utf-8")

    def call(seed: int, choose: int = 1) -> dict[str, Any]:
        Path("drawn.chim").write_text(random_scheme(Random(seed)), encoding="utf-8")
        files = "--profile", "m.toml", "--cluster", "c.toml", "--scheme", "drawn.chim"
        _, out = answer(plan_command, *files, "--mini-batch", "8", "--json", "--choose", str(choose))
        return json.loads(out)

    return call


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_listed_compiles(seed: int, plan: Plan) -> None:
    for number, choice in part(enumerate(plan(seed)["choices"], 1), 4):
        words = shlex.split(plan(seed, choose=number)["commands"][0])[2:]
        status, out = answer(compile_command, *words, "--emit", "report")
        assert status == 0, f"{words}\n{out}"
        prediction = json.loads(out)["prediction"]
        assert choice["T"] == pytest.approx(prediction["T"], rel=1e-12)
        assert choice["memory"] in (None, prediction["memory"])


@pytest.mark.parametrize("name", library.names())
def test_the_library_compiles_in_whatever_size_it_allows(name: str) -> None:
    """Which is why the planner does not verify it again."""
    source = library.source(name)
    accepted = [settings for settings, _ in all_sizes(source, (1, 2, 4, 6), (1, 2, 3, 4, 6, 8, 12), 500)]
    for settings in part(accepted, 6):
        assert Compilation(Request(source, settings), warn=lambda warning: pytest.fail(warning.code)).verified
    assert accepted


def test_some_of_the_schemes_can_run_and_some_cannot(plan: Plan) -> None:
    found = [plan(seed) for seed in SEEDS[:12]]
    assert sum(bool(each["choices"]) for each in found) >= 3
    assert sum(bool(each["left_out"]) for each in found) >= 3
