"""Links measured between real ranks under torchrun: the file reads back, and a rank that dies is named."""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from chimera_ir.measure.links import WARM_UP
from chimera_ir.profile.read import read_cluster
from chimera_ir.source import Source
from tests.e2e.ranks import torchrun_script

ROOT = Path(__file__).resolve().parents[2]
SIZE = r"# +(\d+ [KM]?i?B)  "
MAIN = "from chimera_ir.start import profile; profile()"
DYING = f"""
import os, sys
from chimera_ir.source import templates
sys.path.insert(0, str(templates()))
from chimera_ir.measure import links
if os.environ["RANK"] == "1":
    links._Bench.group = lambda *_: os._exit(1)
{MAIN}
"""

STAGED = f"""
import atexit, sys
from chimera_runtime.ranks import world
from chimera_runtime.ranks.messages import Staging
from tests.unit.runtime.gpu_model import ModelGpu
gpu = ModelGpu(("outgoing", "incoming"))
world.staging_of = lambda _device, _backend: Staging(gpu)
says = "posted by the thread: {{staging}} by the host: {{MainThread}}".format_map
atexit.register(lambda: print(says(gpu.blocked)))
{MAIN}
"""


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The messages of ours; the summary of torchrun, indented, has them once more."""
    return [line for line in done.stderr.splitlines() if line.startswith("chimera-profile: ")]


def launched(program: str, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "profile_links.py"
        script.write_text(program)
        return torchrun_script(script, ranks, "links", *arguments, PYTHONPATH=str(ROOT))


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_links_between_ranks_are_a_cluster_file(tmp_path: Path, ranks: int) -> None:
    out = tmp_path / "desk.toml"
    done = launched(MAIN, ranks, "--out", str(out), "--rounds", "5")
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    cluster = read_cluster(Source(out.name, text))
    assert (cluster.name, cluster.workers, cluster.per_node, cluster.reserved) == ("desk", ranks, ranks, 0)
    assert 0 < cluster.memory < 2**50
    assert cluster.between == cluster.within
    assert 1 <= cluster.host.workers <= ranks
    for link in (cluster.within, cluster.between, cluster.sums, cluster.host.link):
        assert link.alpha >= 0
        assert link.beta > 0
        assert link.message(16 << 20) > link.message(64)
    assert text.count("\n# messages within a node") == 1
    assert text.count("to two ranks at once take" if ranks == 3 else "was not measured") == 1
    assert text.count("\n# sums over") == (1 if ranks == 2 else 2)
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert all("too noisy" in line or "straight line" in line for line in warnings)
    assert [line for line in text.splitlines() if "warning" in line] == [f"# {line}" for line in warnings]


def test_sums_are_measured_over_as_many_ranks_as_are_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "c.toml"
    asked = "--out", str(out), "--rounds", "5", "--largest", "1"
    done = launched(MAIN, 3, *asked, "--sum-ranks", "2")
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert [line for line in text.splitlines() if "# sums over" in line] == [
        line for line in text.splitlines() if line.startswith("# sums over 2 ranks,")
    ]
    messages, sums, moves = re.split("# sums over|# transfers to", text)
    assert re.findall(SIZE, moves) == ["64 B", "256 B", "1 KiB"]
    assert re.findall(SIZE, sums) == ["64 B", "256 B", "1 KiB"]
    assert re.findall(SIZE, messages) == ["64 B", "256 B", "1 KiB"]
    done = launched(MAIN, 3, *asked, "--sum-ranks", "4")
    assert done.returncode != 0
    assert said(done) == ["chimera-profile: --sum-ranks 4: torchrun started 3 ranks; choose 2 to 3"]


def test_with_gloo_for_gpus_messages_and_sums_are_staged(tmp_path: Path) -> None:
    """On a model of a GPU: each message and each sum is posted by the thread, when its copy is over."""
    out = tmp_path / "c.toml"
    done = launched(STAGED, 2, "--out", str(out), "--rounds", "5", "--largest", "1")
    assert done.returncode == 0, done.stderr
    cluster = read_cluster(Source(out.name, out.read_text()))
    assert cluster.within.alpha >= 0
    assert cluster.sums.alpha >= 0
    counts = re.findall(r"posted by the thread: (\d+) by the host: (\d+)", done.stdout)
    assert len(counts) == 2
    rounds, sizes, warm_up = 5, 3, 2 * WARM_UP
    assert all(int(thread) >= sizes * 2 * (rounds + warm_up) for thread, _ in counts)
    assert [host for _, host in counts] == ["0", "0"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("options", [("--device", "cuda"), ("--backend", "nccl")])
def test_links_of_gpus_where_there_are_none_are_one_message(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = launched(MAIN, 2, "--out", str(tmp_path / "c.toml"), *options)
    assert done.returncode != 0
    (message,) = said(done)
    assert message.startswith(f"chimera-profile: {' '.join(options)} needs ")
    assert message.endswith(": use --device cpu --backend gloo")


def test_a_rank_that_dies_is_named_in_one_message_and_nothing_is_written(tmp_path: Path) -> None:
    done = launched(DYING, 2, "--out", str(tmp_path / "c.toml"), "--rounds", "5")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("chimera-profile: ")]
    assert len(said) == 1, done.stderr
    assert "rank 0 (worker 0): wait" in said[0]
    assert "rank 1" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_others_stops_every_rank_with_one_message(tmp_path: Path) -> None:
    out = tmp_path / "c.toml"
    out.write_text("# by hand\n")
    done = launched(MAIN, 2, "--out", str(out), "--rounds", "5")
    assert done.returncode != 0
    (message,) = said(done)
    assert message.startswith(f"chimera-profile: --out {out}: exists and was not written by this command")
    assert out.read_text() == "# by hand\n"


def test_one_rank_has_no_links(tmp_path: Path) -> None:
    done = launched(MAIN, 1, "--out", str(tmp_path / "c.toml"))
    assert done.returncode != 0
    assert [line.partition(": start")[0] for line in said(done)] == ["chimera-profile: links lie between ranks"]
