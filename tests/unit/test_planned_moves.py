"""``chimera plan`` where memory is tight and workers have a link to their host: what fits once activations move."""

import json
import shlex
from pathlib import Path

import pytest

from chimera_ir import library
from chimera_ir.commands import compile_command
from tests.unit.test_plan import Plan, cluster, found, plan, profile

__all__ = ["plan"]

HOST = '[host]\nlatency = "0 s"\nbandwidth = "200 MB/s"\n'
"""A transfer of the 2 MB of a micro-batch takes 10 ms, half as long as its forward."""

BOUNDED = library.source("dapple").text.replace("pipe down", "memory activations <= 2\npipe down")


@pytest.mark.parametrize("scheme", ["dapple", "./bounded.chim", "pipedream"])
def test_what_fits_only_with_moves_is_offered_and_compiles_as_predicted(plan: Plan, scheme: str) -> None:
    """1F1B on 4 workers keeps 4 of 2 MB beside its weights, and 2 with moves: in the same time."""
    Path("bounded.chim").write_text(BOUNDED, encoding="utf-8")
    asked = "--mini-batch", 16 if scheme != "pipedream" else 2, "--scheme", scheme, "--json"
    model, tight = profile((4,), (2,)), cluster(4, memory="8 MB" if scheme != "pipedream" else "11 MB")
    (again,) = found(plan(model, tight, *asked))["choices"]
    result = found(plan(model, tight + HOST, *asked))
    (moving,) = result["choices"]
    assert (again["recompute"], "offload" in again) == (True, False)
    assert (moving["recompute"], moving["offload"]) == (False, "auto")
    unbounded = [word if word != "./bounded.chim" else "dapple" for word in asked]
    (roomy,) = found(plan(model, cluster(4) + HOST, *unbounded))["choices"]
    assert "offload" not in roomy
    assert moving["T_replay"] == pytest.approx(roomy["T_replay"])
    words = shlex.split(result["commands"][0])[2:]
    assert words[words.index("--offload") + 1] == "auto"
    ended = plan(model, tight + HOST, *words, "--emit", "report", command=compile_command.main, name="chimera-compile")
    prediction = json.loads(ended.out)["prediction"]
    assert (moving["T"], moving["memory"]) == (pytest.approx(prediction["T"]), prediction["memory"])


def test_moves_that_do_not_make_it_fit_leave_recomputation(plan: Plan) -> None:
    """Over a link a hundred times as slow nothing moves in time; what is left out says what it needs without moves."""
    asked = "--mini-batch", 16, "--scheme", "dapple", "--json"
    model, slow = profile((4,), (2,)), HOST.replace("200", "2")
    (again,) = found(plan(model, cluster(4, memory="8 MB") + slow, *asked))["choices"]
    assert again["recompute"]
    refused = [
        json.loads(plan(model, cluster(4, memory="8 MB") + link, *asked, "--no-recompute").out) for link in ("", slow)
    ]
    assert refused[0]["left_out"] == refused[1]["left_out"] != []
