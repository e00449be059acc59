"""``chimera plan --search``: what it finds is faster by the replay, fits, and compiles as it was predicted."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from chimera_ir import rank_schemes
from chimera_ir.commands.common import WRONG_COMMAND
from chimera_ir.errors import OptionError
from chimera_ir.orders import cp_sat
from tests.unit.command import Run
from tests.unit.test_plan import FULL, cluster, compiled, found, profile

pytestmark = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-Tools is not installed: the extra search")

ASKED = ("--mini-batch", 6, "--scheme", "waves", "--set", "P=2", "--set", "w=1", "--json")
FILE = Path("waves-P2-w1-N6.sir")


def test_a_better_order_is_ranked_with_its_gain_and_compiles_as_predicted(plan: Run, run: Run) -> None:
    """Proven by the search: 0.39 s, where the scheme takes 0.4 s."""
    model, on = profile((4,), (1,), weights="100 B"), cluster(2)
    (plain,) = found(plan(model, on, *ASKED))["choices"]
    assert (plain["T_replay"], "search" in plain) == (0.4, False)
    result = found(plan(model, on, *ASKED, "--search", 600))
    (best,) = result["choices"]
    assert (best["T"], best["T_replay"], best["search"]["T_replay_before"]) == (0.39, 0.39, 0.4)
    assert "the order that was found for waves takes 2.5 % less time than its own" in result["notes"]
    # The printed command compiles the order that was found, to the same time and bytes.
    assert result["commands"][0].split()[2] == str(FILE)
    prediction = compiled(run, result["commands"][0])["prediction"]
    assert (prediction["T"], prediction["memory"]) == (pytest.approx(best["T"]), best["memory"])
    assert "waves.out/train.py" in result["commands"][1]
    # Another call finds and writes the same.
    text = FILE.read_text(encoding="utf-8")
    assert found(plan(model, on, *ASKED, "--search", 600)) == result
    assert FILE.read_text(encoding="utf-8") == text


def test_a_program_gets_the_same_ranking_and_compiles_its_best_order(plan: Run) -> None:
    model, on = profile((4,), (1,), weights="100 B"), cluster(2)
    result = found(plan(model, on, *ASKED, "--search", 600))
    files = {"profile": "m.toml", "cluster": "c.toml"}
    ranked = rank_schemes("waves", **files, mini_batch=6, settings={"P": 2, "w": 1}, search=600)
    assert ranked.rows == result["choices"]
    best = ranked.compilation()
    assert best.prediction.replay.seconds == pytest.approx(0.39)
    # Without a search, it compiles the scheme: 0.4 s.
    plain = rank_schemes("waves", **files, mini_batch=6, settings={"P": 2, "w": 1}).compilation()
    assert (plain.scheme.name.text, plain.prediction.replay.seconds) == ("waves", pytest.approx(0.4))
    for argument, says in {"mini_batch": "0: it is a whole", "seed": "it is for a search", "workers": "has 2"}.items():
        arguments = {"mini_batch": 6, argument: {"mini_batch": 0, "seed": 1, "workers": 3}[argument]}
        with pytest.raises(OptionError, match=f"{argument}.*{says}"):
            rank_schemes("waves", **files, **arguments)  # type: ignore[arg-type]


def test_an_order_keeps_the_memory_of_the_workers(plan: Run) -> None:
    """The order above keeps five micro-batches on a worker, and there is room for four."""
    model, asked = profile((4,), (1,), weights="100 B"), (*ASKED, "--search", 600)
    (roomy,) = found(plan(model, cluster(2), *asked))["choices"]
    assert max(roomy["memory"]) > 5 * FULL
    tight = found(plan(model, cluster(2, memory=f"{5 * FULL} B"), *asked[:-1], 1))
    (choice,) = tight["choices"]
    assert max(choice["memory"]) <= 5 * FULL
    assert choice["T_replay"] == 0.4
    assert any(note.startswith("no order was found that makes waves faster by 0.5 %") for note in tight["notes"])


def test_the_table_and_the_prediction_show_the_order_that_was_found(plan: Run) -> None:
    model, on = profile((4,), (1,), weights="100 B"), cluster(2)
    shown = plan(model, on, *ASKED[:-1], "--search", 600).out
    assert "found order: -2.5 %" in shown
    assert "Predicted: 15.38 items/s, 390 ms for an update" in shown


def test_a_schedule_without_a_flush_and_a_single_worker_are_not_searched(plan: Run) -> None:
    asked = "--mini-batch", 8, "--json", "--search", 600, "--scheme", "pipedream"
    result = found(plan(profile((4,), (1,)), cluster(4), *asked))
    assert not any("order" in note for note in result["notes"])
    assert not any("search" in choice for choice in result["choices"])


def test_a_file_that_is_no_found_order_stays(plan: Run) -> None:
    model, on = profile((4,), (1,), weights="100 B"), cluster(2)
    FILE.write_text("mine\n", encoding="utf-8")
    ended = plan(model, on, *ASKED, "--search", 600)
    ended.assert_refused(WRONG_COMMAND, f"--search {FILE}: exists", "move it")
    assert FILE.read_text(encoding="utf-8") == "mine\n"


def test_a_seed_without_a_search_and_a_missing_solver_are_refused(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    model, on = profile((4,), (1,)), cluster(2)
    plan(model, on, *ASKED, "--seed", 1).assert_refused(WRONG_COMMAND, "--seed: it is for a search; add --search")
    monkeypatch.setattr(cp_sat, "find_spec", lambda _: None)
    plan(model, on, *ASKED, "--search", 1).assert_refused(WRONG_COMMAND, "pip install 'chimera_ir[search]'")
