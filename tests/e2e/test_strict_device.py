"""The strict backend's stream of computations: it computes what torch does, later, and no failure of it is lost."""

import re
from pathlib import Path

import pytest

from tests import forkserver
from tests.e2e.ranks import HERE, environment

ROOT = HERE.parent.parent

TRAINING = """
import torch
from torch import nn
torch.set_num_threads(1)
if {is_put_off}:
    from tests.e2e.strict_computations import put_off
    put_off()
torch.manual_seed(1)
model = nn.Sequential(
    nn.Embedding(9, 6), nn.Linear(6, 6), nn.Dropout(0.3), nn.Flatten(), nn.BatchNorm1d(24), nn.Linear(24, 9)
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(6):
    words = torch.randint(0, 9, (5, 4))
    output = model(words)
    output[words[:, 0] > 4] *= 2
    loss = nn.functional.cross_entropy(output, words[:, 1])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
print([value.tolist() for value in [*model.state_dict().values(), loss.detach(), output.detach().t().contiguous()]])
"""

BEGIN = """
import os, threading, time, torch
from tests.e2e.strict_computations import put_off
from tests.e2e.strict_device import DEVICE
put_off()
x = torch.arange(3.0)
"""

WRONG = BEGIN + "torch.nn.functional.embedding(torch.tensor([7]), torch.eye(2))\n"


def run(folder: Path, program: str, **variables: str) -> tuple[int, str, str]:
    """The status, standard output and standard error of a program."""
    done = forkserver.run(("-c", program), environment() | {"PYTHONPATH": str(ROOT)} | variables, folder, 100)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("variables", [{}, {"STRICT_LATE": "1"}, {"STRICT_DELAY": "0.003"}], ids=str)
def test_what_is_put_off_comes_to_the_same_bits(tmp_path: Path, variables: dict[str, str]) -> None:
    at_once = run(tmp_path, TRAINING.format(is_put_off=False))
    assert at_once[0] == 0, at_once[2]
    assert run(tmp_path, TRAINING.format(is_put_off=True), **variables)[:2] == at_once[:2]


def test_the_host_goes_on_until_it_reads(tmp_path: Path) -> None:
    program = BEGIN + (
        "array = x.numpy()\n"
        "x.mul_(2)\n"
        "y = x + 1\n"
        "print(array.tolist(), DEVICE.heads())\n"
        "print(y.tolist(), array.tolist(), DEVICE.heads())\n"
    )
    status, said, errors = run(tmp_path, program, STRICT_LATE="1")
    assert status == 0, errors
    assert said.splitlines() == [
        "[0.0, 1.0, 2.0] computations: aten.mul_.Tensor",
        "[1.0, 3.0, 5.0] [0.0, 2.0, 4.0] none",
    ]


def test_a_failure_in_the_stream_is_an_error_of_the_next_read(tmp_path: Path) -> None:
    status, said, errors = run(tmp_path, WRONG + "y = x + 1\nprint('on', flush=True)\nprint(y.tolist())")
    assert (status, said) == (1, "on\n")
    assert re.search("RuntimeError: .*index out of range", errors), errors


def test_a_failure_in_the_stream_ends_a_rank_that_never_reads(tmp_path: Path) -> None:
    status, said, errors = run(tmp_path, WRONG + "print('on', flush=True)\nthreading.Event().wait(90)\nprint('late')")
    assert (status, said) == (1, "on\n")
    assert "index out of range" in errors


def test_a_forked_process_computes_by_itself(tmp_path: Path) -> None:
    program = BEGIN + (
        "y = x + 1\n"
        "torch.cpu.synchronize()\n"
        "if os.fork() == 0:\n"
        "    print((y + 1).tolist(), DEVICE.heads(), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    status, said, errors = run(tmp_path, program, STRICT_LATE="1")
    assert (status, said) == (0, "[2.0, 3.0, 4.0] none\n"), errors


def test_a_copy_that_the_host_has_waited_for_may_be_read(tmp_path: Path) -> None:
    copy = BEGIN + "y = torch.zeros(3)\ny.copy_(x + 1, non_blocking=True)\n"
    status, said, errors = run(tmp_path, copy + "torch.cpu.synchronize()\nprint(y.numpy().tolist())")
    assert (status, said) == (0, "[1.0, 2.0, 3.0]\n"), errors
    status, _, errors = run(tmp_path, copy + "print(y.numpy().tolist())")
    assert status == 1
    assert "the host reads memory that a copy writes which does not block it" in errors
