"""``chimera-plan``: what is listed compiles as it was predicted; what is left out, or in doubt, is told."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chimera_ir import library
from chimera_ir.options import Options
from chimera_ir.planner.judge import Judged
from chimera_ir.planner.listing import compile_line, scheme_argument
from chimera_ir.planner.space import MAX_OPERATIONS, Configuration
from chimera_ir.profile.costs import ModelProfile
from chimera_ir.profile.write import write_profile
from chimera_ir.source import Source
from chimera_ir.syntax.formatter import Change
from tests.unit.command import TINY, Run
from tests.unit.test_measured import FAST_MIDDLE
from tests.unit.test_measured import profile as staged
from tests.unit.test_plan import FULL, cluster, compiled, found, named, profile
from tests.unit.test_slice_costs import setting

WARNING = "stage 0 of 4: too noisy to use: after 30 rounds the median may be off by more than 5 %: step 7.6 %"
STREAMS = {"amdp", "pipedream", "pipedream_2bw"}


def own(name: str, clause: str = "") -> Path:
    """A library scheme as a file of one's own, with a clause more."""
    text = library.source(name).text.replace(f"scheme {name}", "scheme mine")
    file = Path("mine.chim")
    file.write_text(text.replace("pipe down", f"{clause}\npipe down", 1), encoding="utf-8")
    return file


def reasons(result: dict[str, Any]) -> dict[str, set[str]]:
    schemes: dict[str, set[str]] = {}
    for left_out in result["left_out"]:
        schemes.setdefault(left_out["reason"], set()).add(left_out["scheme"])
    return schemes


def test_a_bound_on_weights_that_only_the_versions_of_a_stream_exceed_leaves_it_out(plan: Run) -> None:
    model, on, asked = profile((4,), (1,)), cluster(4), ("--mini-batch", 8, "--scheme", "mine.chim")
    own("pipedream_2bw", "memory weights <= 1")
    ended = plan(model, on, *asked)
    assert "No configuration is left." in ended.out
    assert "worker 0 holds the weights of 2 stages (M_theta), more than the declared 1" in ended.out
    own("pipedream_2bw", "memory weights <= 2")
    assert [each["N"] for each in found(plan(model, on, *asked, "--json"))["choices"]] == [8]


def test_a_declared_bound_that_holds_with_recomputation_has_it_tried(plan: Run, run: Run) -> None:
    model, on = profile((4,), (1,)), cluster(4)
    own("dapple", "memory activations <= 1")
    asked = model, on, "--mini-batch", 8, "--scheme", "mine.chim"
    result = found(plan(*asked, "--json"))
    assert [each["recompute"] for each in result["choices"]] == [True]
    assert compiled(run, result["commands"][0])["stashed_inputs"] == [4, 3, 2, 1]
    assert "out of memory" in plan(*asked, "--no-recompute").out


def test_a_declared_bound_in_bytes_leaves_a_worker_less_than_the_cluster_has(plan: Run) -> None:
    """By recomputation worker 0 keeps four inputs of 8 bytes, and the activations of the one that runs again.

    A receive is posted an operation ahead, that is before a recomputation, so one buffer of 8 bytes is enough for two.
    """
    model, on = profile((4,), (1,)), cluster(4)
    asked = model, on, "--mini-batch", 8, "--scheme", "mine.chim"
    own("dapple")
    (free,) = found(plan(*asked, "--json"))["choices"]
    assert not free["recompute"]
    own("dapple", f"memory bytes <= {max(free['memory']) - 1}")
    (bounded,) = found(plan(*asked, "--json"))["choices"]
    assert bounded["recompute"]
    assert bounded["memory"][0] == free["memory"][0] - 3 * FULL + 4 * 8 - 8
    own("dapple", f"memory bytes on w <= if w == 3 then 1 else {max(free['memory'])}")
    ended = plan(*asked)
    assert "No configuration is left." in ended.out
    assert "worker 3 needs at least 2.861 MiB, 2.861 MiB more than the scheme declares" in ended.out
    own("dapple", "memory host_bytes on w <= 1 - w")
    assert "worker 3 needs host memory of 0, 2 B more than the scheme declares" in plan(*asked).out


@pytest.mark.parametrize("name", ["chimera", "gems", "chimera_doubling", "pipedream_2bw"])
def test_sums_are_launched_as_in_the_compilation_by_what_each_stage_takes(plan: Run, name: str, run: Run) -> None:
    """Sums are slow, so that T depends on when they are launched."""
    model, on = staged(FAST_MIDDLE), cluster(4, sums="10 MB/s")
    result = found(plan(model, on, "--mini-batch", 8, "--scheme", name, "--json", "--set", "D=4"))
    prediction = compiled(run, result["commands"][0])["prediction"]
    for key in ("T", "T_replay"):
        assert result["choices"][0][key] == pytest.approx(prediction[key], rel=1e-12)


@pytest.mark.parametrize("name", ["dapple", "chimera", "interleaved", "chimera_doubling", "pipedream_2bw"])
def test_stages_that_share_parameters_are_predicted_as_the_line_that_compiles_them_does(
    plan: Run, name: str, run: Run
) -> None:
    model, on = staged(FAST_MIDDLE), cluster(4, sums="10 MB/s")
    asked = ("--mini-batch", 8, "--scheme", name, "--tied", "first,last", "--tied", "1,2", "--json")
    result = found(plan(model, on, *asked))
    report = compiled(run, result["commands"][0])
    best, prediction = result["choices"][0], report["prediction"]
    assert len(prediction["Comm_allreduce"]) == report["stages"] + 2
    assert [best["T"], best["T_replay"]] == pytest.approx([prediction["T"], prediction["T_replay"]], rel=1e-12)
    assert best["memory"] == prediction["memory"]


def test_what_the_ends_of_a_pipe_share_is_summed_between_them_after_the_last_backward(plan: Run) -> None:
    """1 MB at 100 MB/s between two workers, of which the first has nothing to do meanwhile: 2 * (1 / 2) * 10 ms."""
    model, on = profile((4,), (1,)), cluster(4, sums="100 MB/s")
    asked = model, on, "--mini-batch", 8, "--scheme", "dapple", "--json"
    (apart,), (shared,) = (found(plan(*asked, *more))["choices"] for more in ((), ("--tied", "0,3")))
    assert shared["T"] - apart["T"] == pytest.approx(0.01)
    assert shared["T_replay"] - apart["T_replay"] == pytest.approx(0.01)


def test_what_cannot_be_tied_is_left_out(plan: Run) -> None:
    """A stage that is not there, and stages that read different versions, also of a scheme of the library."""
    model, on = profile((2, 4), (1,)), cluster(4)
    schemes = named("dapple", "chimera", "pipedream")
    asked = "--mini-batch", 8, "--asynchronous", "--tied", "0,3", "--json", *schemes
    result = found(plan(model, on, *asked))
    assert {each["D"] for each in result["choices"]} == {4}
    assert "pipedream" not in {each["scheme"] for each in result["choices"]}
    why = {
        (each["scheme"], each["settings"].get("D")): each["detail"]
        for each in result["left_out"]
        if each["reason"] == "refused by the scheme"
    }
    assert why["dapple", 2] == "--tied 0,3: the scheme has the stages 0 to 1"
    assert why["pipedream", 4] == "stages 0 and 3 are tied, but read different versions of the weights"


def test_the_compile_line_raises_the_limit_where_the_compilation_would_stop_at_it() -> None:
    """Whether the plan's limit was raised, or the baseline of the report has more operations than the scheme."""
    options = Options(profile="m.toml", cluster="c.toml", max_operations=MAX_OPERATIONS)

    def judged(depth: int, workers: int, micro_batches: int) -> Judged:
        sizes = depth, workers, 1, micro_batches, 1
        choice = Configuration(library.source("dapple"), (("D", depth),), *sizes, Change())
        return Judged(choice, "dapple", False, False, 1.0, 1.0, (), 0)

    assert "--max-operations" not in compile_line(judged(4, 4, 8), options)
    raised = replace(options, max_operations=3_000_000)
    assert compile_line(judged(4, 4, 8), raised).endswith(" --max-operations 3000000")
    assert compile_line(judged(1, 600, 2000), options).endswith(" --max-operations 2400000")


def test_a_file_is_never_taken_for_an_option() -> None:
    assert scheme_argument(Source("-x.chim", "")) == "./-x.chim"


def test_a_scheme_without_a_flush_is_considered_where_it_is_asked_for(plan: Run) -> None:
    model, on = profile((4,), (1,)), cluster(4)

    def schemes(*asked: str) -> tuple[set[str], set[str]]:
        result = found(plan(model, on, "--mini-batch", 4, "--json", *asked))
        return {each["scheme"] for each in result["choices"]}, reasons(result).get("without a flush", set())

    listed, left_out = schemes()
    assert (listed & STREAMS, left_out) == (set(), STREAMS)
    assert schemes("--asynchronous") == (listed | STREAMS, set())
    named = "--scheme", "dapple", "--scheme", "pipedream"
    assert schemes(*named) == ({"dapple", "pipedream"}, set())
    assert schemes(*named, "--synchronous-only") == ({"dapple"}, {"pipedream"})
    assert "--asynchronous considers it" in plan(model, on, "--mini-batch", 4, "--why").out


def test_a_scheme_for_several_parts_is_left_out_for_a_chain(plan: Run) -> None:
    model, on = profile((4, 5), (1,)), cluster(5)
    result = found(plan(model, on, "--mini-batch", 4, "--json"))
    left_out = reasons(result)["for another kind of model"]
    assert left_out == {"colocated", "colocated_nested", "encoder_decoder", "two_encoders"}
    assert not {choice["scheme"] for choice in result["choices"]} & left_out
    ended = plan(model, on, "--mini-batch", 4, "--scheme", "colocated", "--why")
    said = "it is for image and text, and the model of the profile is a chain of stages or layers"
    assert (ended.status, said in " ".join(ended.out.split())) == (1, True)


def test_slices_are_considered_where_they_are_named_or_measured_and_thin_ones_lose(plan: Run) -> None:
    """Each operation has an overhead of 8 ms, and a micro-batch takes 10 ms forward on a stage."""
    sliced = {"seq1f1b", "seq1f1b_interleaved", "seq1f1b_zb", "terapipe"}
    on, asked = cluster(4), ("--mini-batch", 2, "--json")
    model = profile((4,), (1,))
    overhead = '[model]\nname = "m"\n[operation]\nforward = "8 ms"\nbackward = "8 ms"'
    heavy = model.replace('[model]\nname = "m"', overhead)
    assert reasons(found(plan(model, on, *asked)))["in slices"] == sliced

    def slices(model: str) -> list[int]:
        result = found(plan(model, on, *asked, "--scheme", "seq1f1b", "--all"))
        return [choice["settings"]["k"] for choice in result["choices"]]

    assert slices(model) == [8, 4, 2]
    assert slices(heavy) == [2, 4, 8]
    sent = 3 * ['output = "2 B"'] + [""]
    head, *stages = model.split("\n[[depth.stage]]")
    slice_table = '\n[[depth.stage.at.slice]]\nforward = "2.5 ms"\nactivations = "1 MB"\n'
    measured = [f"{stage}{''.join(4 * [slice_table + of_stage])}" for stage, of_stage in zip(stages, sent, strict=True)]
    result = found(plan("\n[[depth.stage]]".join([head, *measured]), on, *asked, "--all"))
    assert "in slices" not in reasons(result)
    without_halves = sliced - {"seq1f1b_zb"}
    assert without_halves <= {choice["scheme"] for choice in result["choices"]}


def test_slices_of_equal_times_are_ranked_beside_equal_lengths_and_compile_as_predicted(plan: Run, run: Run) -> None:
    """Quarters of 2, 3, 4 and 5 seconds forward: 507 with equal lengths, 367.5 with equal times."""
    *stages, last = setting().stages
    timing = replace(last.at[1], output=0, gradient=0)
    slices = tuple(replace(part, output=0, gradient=0) for part in timing.slices)
    stages.append(replace(last, at={1: replace(timing, slices=slices)}))
    model, on = write_profile(ModelProfile("m", {4: tuple(stages)}, length=40)), cluster(4)
    asked = "--mini-batch", 8, "--scheme", "seq1f1b", "k=4", "--all"
    result = found(plan(model, on, *asked, "--json"))
    timed, equal = result["choices"]
    assert (timed["slice_lengths"], equal.get("slice_lengths")) == ([15, 10, 8, 7], None)
    assert [round(choice["T_replay"], 1) for choice in (timed, equal)] == [367.5, 507]
    assert any("must return a sum and a count" in note for note in result["notes"])
    line = result["commands"][0]
    assert "--slice-lengths 15,10,8,7" in line
    prediction = compiled(run, line)["prediction"]
    assert prediction["T_replay"] == timed["T_replay"]
    assert prediction["memory"] == timed["memory"]
    assert "k=4, equal-times" in plan(model, on, *asked).out
    # The greedy rule chooses B for both kinds of lengths; a sequence too short to be cut has one.
    assert len(found(plan(model, on, *asked, "--json", "--greedy"))["choices"]) == 2
    assert len(found(plan(model.replace("length = 40", "length = 3"), on, *asked, "--json"))["choices"]) == 1


def test_schemes_that_move_memory_are_ranked_if_the_cluster_has_a_link_to_the_host(plan: Run, run: Run) -> None:
    """1F1B needs 7 MB on its first worker, with off-load 6 MB, and 4 MB on the host."""
    model, on = profile((4,), (1,)), cluster(4)
    asked = "--mini-batch", 8, "--json", "--no-recompute"
    unknown = reasons(found(plan(model, on, *asked)))["without a link to the host"]
    assert unknown == {"dapple_offload", "interleaved_offload"}
    host = '[host]\nlatency = "0 s"\nbandwidth = "1 GB/s"\n'
    small = cluster(4, memory="6.5 MB") + host
    result = found(plan(model, small, *asked, "--all", "--scheme", "dapple", "--scheme", "dapple_offload"))
    assert {(each["scheme"], each["D"]) for each in result["choices"]} == {("dapple", 4), ("dapple_offload", 4)}
    (choice,) = (each for each in result["choices"] if each["scheme"] == "dapple_offload")
    files = "--profile m.toml --cluster c.toml --micro-batch-size 1"
    report = compiled(run, f"chimera compile dapple_offload D=4 N=8 {files}")
    assert max(report["prediction"]["memory"]) == max(choice["memory"])
    assert report["prediction"]["host_memory"] == [4 * FULL, 3 * FULL - 3 * 8, 0, 0]
    tight = small + f'memory = "{4 * FULL - 1} B"\n'
    ended = plan(model, tight, *asked, "--scheme", "dapple_offload")
    assert (ended.status, ended.err) == (1, "")
    assert "worker 0 needs host memory of 3.815 MiB, 1 B more than there is" in ended.out


def test_what_the_files_warn_of_is_said_in_notes_and_json(plan: Run) -> None:
    lines = [WARNING.replace("stage 0", f"stage {number}") for number in range(4)]
    noisy = profile((4,), (1,)) + "".join(f"\n# warning: {line}" for line in lines)
    asked = "--mini-batch", 8, "--scheme", "dapple"
    result = found(plan(noisy, cluster(4) + "# warning: it is not straight\n", *asked, "--json"))
    assert result["warnings"] == [*(f"m.toml: {line}" for line in lines), "c.toml: it is not straight"]
    assert [note for note in result["notes"] if note.startswith("warning: ")] == [
        *(f"warning: m.toml: {line}" for line in lines[:3]),
        "warning: 2 more such lines are in the files",
    ]
    assert "Warning: m.toml: stage 0 of 4: too noisy to use" in plan(noisy, cluster(4), *asked).out
    quiet = found(plan(profile((4,), (1,)) + "\n# a warning: none\n", cluster(4), *asked, "--json"))
    assert (quiet["warnings"], [note for note in quiet["notes"] if "warning" in note]) == ([], [])


def test_a_value_beyond_64_bits_is_left_out(plan: Run, tmp_path: Path) -> None:
    """Among the values that are tried beside a default; in a product of sizes."""
    (tmp_path / "huge.chim").write_text(TINY.replace("tiny(", f"huge(seed = {2**63 - 1}, "))
    asked = profile((2,), (1,)), cluster(2), "--mini-batch", 8, "--json", "--scheme"
    assert plan(*asked, "huge.chim").status == 0
    sizes = "--set", f"P={10**17}", "--set", f"v={10**17}"
    assert "and the limit is 65,536" in plan(*asked, "interleaved", *sizes).out


def test_a_depth_beyond_all_reason_is_answered(plan: Run) -> None:
    """Its divisors are not looked for one by one."""
    asked = "--mini-batch", 8, "--scheme", "dapple", "--scheme", "gems", "--set", f"D={10**18 - 1}", "--json"
    result = json.loads(plan(profile((2,), (1,)), cluster(2), *asked).out)
    assert {left_out["scheme"] for left_out in result["left_out"]} == {"dapple", "gems"}


# Split backwards, and moves to the host where memory is tight.


HALVES = 'input_gradient = "10 ms"\nweight_gradient = "10 ms"'


def test_split_backwards_are_ranked_where_the_profile_has_their_times(plan: Run) -> None:
    """D = 4, N = 8 without messages: 1F1B takes 3 (N + D - 1) times 10 ms, ZB-H1 3 N + D - 1 of them."""
    asked = "--mini-batch", 8, "--json", "--scheme", "dapple", "--scheme", "zb_h1"
    without = found(plan(profile((4,), (1,)), cluster(4), *asked))
    assert [choice["scheme"] for choice in without["choices"]] == ["dapple"]
    assert {left["scheme"] for left in without["left_out"]} >= {"zb_h1"}
    ranked = found(plan(profile((4,), (1,), more=HALVES), cluster(4), *asked))["choices"]
    assert [(choice["scheme"], choice["T"]) for choice in ranked] == [
        ("zb_h1", pytest.approx(0.27)),
        ("dapple", pytest.approx(0.33)),
    ]


@pytest.mark.parametrize(
    ("entries", "kept"), [("", 0), ('released = "1 MB"', -3 * (FULL - 8)), ('operands = "3 MB"', 12 * FULL)]
)
def test_what_is_kept_between_the_halves_decides_whether_a_choice_fits(plan: Run, entries: str, kept: int) -> None:
    """Of zb_h1 with D = 4 each worker keeps 4 micro-batches of 1 MB, 8 bytes of which are in a receive buffer.

    On the last worker all 4 may be between I and W, or 3 of them beside one that waits for I.
    """
    asked = "--mini-batch", 8, "--json", "--scheme", "zb_h1", "--no-recompute"
    whole = found(plan(profile((4,), (1,), more=HALVES), cluster(4), *asked))["choices"]
    ours = found(plan(profile((4,), (1,), more=f"{HALVES}\n{entries}"), cluster(4), *asked))["choices"]
    assert ours[0]["memory"][3] - whole[0]["memory"][3] == kept


def test_a_first_stage_that_has_all_in_its_second_half_is_no_slower_in_equation_1(plan: Run) -> None:
    """All backwards take 20 ms, and on the other stages both halves of them 10: so does the slowest stage."""
    asked = "--mini-batch", 8, "--json", "--scheme", "zb_h1"
    even = profile((4,), (1,), more=HALVES)
    first, rest = even.split(HALVES, 1)
    uneven = (
        first + HALVES.replace('input_gradient = "10 ms"', 'input_gradient = "0 s"').replace("10 ms", "20 ms") + rest
    )
    (of_even,), (of_uneven,) = (found(plan(text, cluster(4), *asked))["choices"] for text in (even, uneven))
    assert (of_uneven["T"], of_even["T"]) == (pytest.approx(0.27), pytest.approx(0.27))


HOST = '[host]\nlatency = "0 s"\nbandwidth = "200 MB/s"\n'
"""A transfer of the 2 MB of a micro-batch takes 10 ms, half as long as its forward."""

BOUNDED = library.source("dapple").text.replace("pipe down", "memory activations <= 2\npipe down")


@pytest.mark.parametrize("scheme", ["dapple", "./bounded.chim", "pipedream"])
def test_what_fits_only_with_moves_is_offered_and_compiles_as_predicted(plan: Run, scheme: str, run: Run) -> None:
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
    assert " --offload auto" in result["commands"][0]
    prediction = compiled(run, result["commands"][0])["prediction"]
    assert (moving["T"], moving["memory"]) == (pytest.approx(prediction["T"]), prediction["memory"])


def test_moves_that_do_not_make_it_fit_leave_recomputation(plan: Run) -> None:
    """Over a link a hundred times as slow nothing moves in time; what is left out says what it needs without moves."""
    asked = "--mini-batch", 16, "--scheme", "dapple", "--json"
    model, slow = profile((4,), (2,)), HOST.replace("200", "2")
    (again,) = found(plan(model, cluster(4, memory="8 MB") + slow, *asked))["choices"]
    assert again["recompute"]
    refused = [
        json.loads(plan(model, cluster(4, memory="8 MB") + link, *asked, "--no-recompute").out) for link in ("", slow)
    ]
    assert refused[0]["left_out"] == refused[1]["left_out"] != []
