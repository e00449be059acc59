"""The examples for several nodes, with two nodes that are one machine."""

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.ranks import MODELS, PATIENCE, compiled, environment
from tests.programs import free_port

NODES = Path(__file__).resolve().parents[2] / "examples" / "nodes"


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = compiled(tmp_path_factory.mktemp("nodes"), "dapple", D=4, N=4)
    return [str(directory / "train.py"), "--model", str(MODELS / "zoo.py"), "--check-only"]


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``srun`` starts a command twice, and torchrun is that of these tests."""
    programs = {
        "scontrol": 'test "$*" = "show hostnames node[1-2]" && printf "localhost\\nelsewhere\\n"',
        "srun": 'test "$1" = --kill-on-bad-exit=1\nshift\n"$@" &\n"$@"\nwait $!',
        "torchrun": f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"',
    }
    for name, text in programs.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nset -e\n{text}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "PROCESSES": "2"}
    return environment() | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PORT": str(free_port())}


def test_the_file_for_slurm_trains(train: list[str], cluster: dict[str, str]) -> None:
    command = ["bash", str(NODES / "slurm.sh"), *train]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "check: passed" in done.stdout


def test_the_command_for_kubernetes_trains(train: list[str], cluster: dict[str, str]) -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((NODES / "kubernetes.yaml").read_text())
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = [word for word in container["command"] if word.startswith(("torchrun", "--nnodes", "--rdzv"))]
    assert words[1] == f"--nnodes={job['spec']['completions']}"
    first_pod = f"{job['metadata']['name']}-0.{service['metadata']['name']}:29400"
    assert f"--rdzv-endpoint={first_pod}" in words
    words = [word.replace(first_pod, f"localhost:{cluster['PORT']}") for word in words]
    both = [
        subprocess.Popen([*words, "--nproc-per-node=2", *train], env=cluster, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=PATIENCE)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert "check: passed" in "".join(said)
