"""The runtime's stages on their own: what is computed again is what was computed, and nothing happens twice.

The generated program is a directory of its own; a process of its own runs this file's `main` from there.
"""

import subprocess
import sys
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parent.parent.parent / "templates"


def main() -> None:
    """A stage with dropout and batch norm, whose output depends on a buffer that it updates; kept in two ways."""
    import torch
    from torch import nn

    from runtime import GradientSum
    from support.compute import Boundary, Seeds, Stage, Traits

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return self.drop(self.norm(self.linear(x))) * self.calls.clone()

    boundary = Boundary(True, ((3, 4),), (torch.float32,), (True,), (True,))
    seen = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        module = Counting()
        names = tuple(name for name, _ in module.named_buffers())
        sums = GradientSum(1, list(module.parameters()), None, (0,), None, None)
        stage = Stage(1, module, None, boundary, boundary, sums, Traits(names, "updates its buffers"), Seeds(5, 0, 2))
        x, dy = torch.randn(6, 4), torch.randn(3, 4)
        if recomputes:
            states, (y,) = stage.forward_keep_inputs((0, 1), (x,))
            dx = [stage.backward_recompute(state, (dy,))[0] for state in states]
        else:
            passes = [stage.forward(m, (part,)) for m, part in enumerate(x.split(3))]
            y = torch.cat([each.take()[0] for each in passes])
            dx = [stage.backward(each, (dy,))[0] for each in passes]
        seen.append([y, *dx, *(p.grad for p in module.parameters()), *module.buffers()])
        assert module.calls.item() == 2 == module.norm.num_batches_tracked.item()
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one, other)


def test_a_stage_that_recomputes_gives_bitwise_what_one_that_keeps_everything_gives() -> None:
    """Outputs, gradients and buffers; the buffers are updated once, and the second run sees them as the first did."""
    command = [sys.executable, "-c", f"import runpy; runpy.run_path({__file__!r})['main']()"]
    done = subprocess.run(command, cwd=TEMPLATES, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
