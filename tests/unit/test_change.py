"""``chimera-compile --recompute`` and ``--sync``: clauses asked for on the command line."""

import json

import pytest

from chimera_ir import library
from chimera_ir.commands.common import WRONG_COMMAND, WRONG_TEXT
from tests.unit.command import Run


def test_recompute_makes_every_stage_keep_inputs_only_and_the_baseline_stays_plain(run: Run) -> None:
    """1F1B, D = 4, N = 8: min(D - s, N) inputs on stage s; 4 N + 3 (D - 1) = 41 against 3 (N + D - 1) = 33.

    Each recomputation but the first ones of a stage begins before the gradients arrive.
    """
    report = json.loads(run("dapple", "--recompute", "--emit", "report").out)
    assert (report["activations"], report["stashed_inputs"]) == ([1, 1, 1, 1], [4, 3, 2, 1])
    assert (report["makespan"], report["baseline"]["makespan"]) == (41, 33)


def test_what_is_asked_for_is_what_a_text_would_say(run: Run) -> None:
    text = library.source("dapple").text
    asked = run("dapple", "--recompute", "--sync", "lazy", "--emit", "program").out
    with open("dapple.chim", "w", encoding="utf-8") as file:
        file.write(text.replace("  micros m in 0..N\n", "  micros m in 0..N\n  recompute\n  sync lazy\n"))
    assert asked == run("dapple.chim", "--emit", "program").out
    assert "sync lazy" in run("dapple", "--sync", "lazy", "--emit", "ast").out


@pytest.mark.parametrize(("text", "asked"), [("recompute when s == 0", "--recompute"), ("sync eager", "--sync=lazy")])
def test_it_replaces_what_the_text_says(run: Run, text: str, asked: str) -> None:
    scheme = library.source("dapple").text
    with open("dapple.chim", "w", encoding="utf-8") as file:
        file.write(scheme.replace("  micros m in 0..N\n", f"  micros m in 0..N\n  {text}\n"))
    assert run("dapple.chim", asked, "--emit", "program").out == run("dapple", asked, "--emit", "program").out


def test_what_the_scheme_cannot_do_is_refused(run: Run) -> None:
    run("pipedream", "--sync", "lazy").assert_refused(WRONG_TEXT, "lazy")


@pytest.mark.parametrize("name", ["dapple_offload", "interleaved_offload"])
def test_a_scheme_that_moves_activations_to_the_host_cannot_be_asked_to_recompute(run: Run, name: str) -> None:
    run(name, "--recompute").assert_refused(WRONG_COMMAND, f"--recompute: {name}.chim moves activations to the host")
