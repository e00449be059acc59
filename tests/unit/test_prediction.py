"""``chimera-compile --profile --cluster``: a prediction in the table and in report.json, or a message that helps."""

import json
from math import asinh, exp
from pathlib import Path

import pytest

from chimera_ir.commands.common import WRONG_COMMAND, WRONG_TEXT
from tests.unit.command import Ended, Run

PROFILE = """
[model]
name = "m"
[[depth]]
stages = 2
stage = [
  { weights = "10 MB", optimizer = "5 MB", at = [
    { micro_batch_size = 4, forward = "10 ms", activations = "3 MB", input = "1 MB", output = "2 MB" },
  ] },
  { weights = "20 MB", at = [{ micro_batch_size = 4, forward = "10 ms", activations = "3 MB" }] },
]
"""
CLUSTER = """
[cluster]
name = "c"
workers = 4
per_node = 2
memory = "80 MB"
[links]
between = { latency = "1 ms", bandwidth = "1 GB/s" }
within = { latency = "0 s", bandwidth = "2 GB/s" }
"""
DAPPLE = ("dapple", "--set", "D=2", "--set", "N=2")


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    """The options that name a profile and a cluster in the directory of the call."""
    (tmp_path / "m.toml").write_text(PROFILE, encoding="utf-8")
    (tmp_path / "c.toml").write_text(CLUSTER, encoding="utf-8")
    return "--profile", "m.toml", "--cluster", "c.toml", "--micro-batch-size", "4"


def predicted(ended: Ended) -> dict[str, object]:
    assert (ended.status, ended.err) == (0, "")
    return json.loads(ended.out)["prediction"]


def test_the_report_has_every_term_of_equation_1(run: Run, files: tuple[str, ...]) -> None:
    """By hand: 2 MB within a node take 1 ms, C_f = C_b = 3; r = 2, an all-reduce of L takes 2 ms + L / (1 GB/s).

    P0 0-1-....0===1===, so nothing is free for its 12 ms; P1 is done a backward, 21 ms, earlier, and its 22 ms need 1
    more.
    """
    found = predicted(run(*DAPPLE, *files, "--copies", "2", "--emit", "report"))
    assert (found["F_t"], found["B_t"], found["C_f"], found["C_b"]) == (0.01, 0.02, 3, 3)
    assert found["Comm_p2p"] == pytest.approx(0.001)
    assert found["Comm_allreduce"] == pytest.approx([0.012, 0.022])
    assert found["free_regions"] == [[{"stage": 0, "region": 0.0}], [{"stage": 1, "region": pytest.approx(0.021)}]]
    assert found["Comm_unoverlapped"] == pytest.approx([0.012, 0.001])
    assert found["T"] == pytest.approx(3 * 0.011 + 3 * 0.021 + 0.012)
    assert found["throughput"] == pytest.approx(2 * 4 * 2 / (3 * 0.032 + 0.012))
    assert (found["memory_available"], found["copies"], found["micro_batch_size"]) == (80_000_000, 2, 4)


def test_the_replay_stands_beside_it(run: Run, files: tuple[str, ...], tmp_path: Path) -> None:
    """By hand, in ms; one copy of two workers on one node sums nothing, and a message takes 1.

    P0 F0 0-10, F1 10-20, B0 42-62, B1 72-92; P1 F0 11-21, B0 21-41, F1 41-51, B1 51-71.
    """
    found = predicted(run(*DAPPLE, *files, "--emit", "report"))
    assert found["T_replay"] == pytest.approx(0.092)
    assert found["throughput_replay"] == pytest.approx(2 * 4 / 0.092)
    assert found["T"] == pytest.approx(0.096)
    ended = run(*DAPPLE, *files, "--out", "o")
    assert "speed:  92 ms an update, 86.96 items/s (messages, sums and steps counted)" in ended.out
    assert "times:  trust the replay, 92 ms; equation 1 says 96 ms, 4.3% more: it hides no message" in ended.out
    assert "program     92 ms, 86.96 items/s" in run(*DAPPLE, *files, "--details", "--out", "o").out


def test_whole_milliseconds_add_up_to_whole_milliseconds(run: Run, files: tuple[str, ...]) -> None:
    times = [
        predicted(run("dapple", "--set", "D=2", "--set", f"N={N}", *files, "--emit", "report"))["T_replay"]
        for N in range(40, 48)
    ]
    assert times == [round(time, 3) for time in times]
    [row, *_] = json.loads(run("dapple", "--set", "D=2", "--set", "N=40,41", *files, "--table", "json").out)
    assert row["T_replay"] == times[0]


def test_the_noise_of_the_profile_makes_an_update_longer(run: Run, files: tuple[str, ...], tmp_path: Path) -> None:
    """By hand: two forwards and backwards on one worker take 60 ms, and of lognormal times the mean exp(s s / 2) more.

    s = asinh(noise / 2) / 0.6745, as quartiles 0.6745 deviations of the logarithm from the median are so far apart.
    """
    alone = """
[model]
name = "m"
[[depth]]
stages = 1
stage = [{ weights = "1 MB", at = [{ micro_batch_size = 4, forward = "10 ms", activations = "1 MB"NOISE }] }]
"""
    scheme = "dapple", "--set", "D=1", "--set", "N=2", *files
    for noise in ("", ', noise = "0 %"'):
        (tmp_path / "m.toml").write_text(alone.replace("NOISE", noise), encoding="utf-8")
        assert "T_expected" not in predicted(run(*scheme, "--emit", "report"))
        assert "noise" not in run(*scheme, "--details", "--out", "o").out
    (tmp_path / "m.toml").write_text(alone.replace("NOISE", ', noise = "40 %"'), encoding="utf-8")
    found = predicted(run(*scheme, "--emit", "report"))
    assert found["T_replay"] == pytest.approx(0.060)
    assert found["T_expected"] == pytest.approx(0.060 * exp((asinh(0.2) / 0.6745) ** 2 / 2), rel=0.005)
    assert "T with the profile's noise     62." in run(*scheme, "--details", "--out", "o").out


def test_the_layout_says_which_link_a_message_takes(run: Run, files: tuple[str, ...]) -> None:
    """Two nodes of two: by copy, the two workers of a pipeline share a node; by worker, they do not."""
    common = *DAPPLE, *files, "--copies", "2", "--emit", "report"
    assert predicted(run(*common, "--layout", "pipeline"))["Comm_p2p"] == pytest.approx(0.001)
    assert predicted(run(*common, "--layout", "replica"))["Comm_p2p"] == pytest.approx(0.003)


def test_the_details_show_every_term(run: Run, files: tuple[str, ...], tmp_path: Path) -> None:
    ended = run(*DAPPLE, *files, "--details", "--out", "o")
    assert ended.status == 0
    for words in ("c: 1 copy, micro-batches of 4", "C_f, C_b", "3, 3"):
        assert words in ended.out
    assert json.loads((tmp_path / "o" / "report.json").read_text())["prediction"]["T"] == pytest.approx(0.096)
    assert "C_f, C_b" not in run(*DAPPLE, *files, "--out", "o").out


@pytest.mark.full
@pytest.mark.parametrize(
    ("available", "status", "answer"),
    [
        ("80 MB", 0, "memory: fits: the fullest worker, P1, needs 65.8 MiB of 76.29 MiB, 86.2%"),
        ("69 MB", 0, "memory: fits: the fullest worker, P1, needs 65.8 MiB of 65.8 MiB, 100.0%"),
        (
            "68 MB",
            3,
            "memory: does not fit: 1 worker needs up to 65.8 MiB, and there are 64.85 MiB; most are gradients",
        ),
        (
            "45 MB",
            3,
            "memory: does not fit: 2 workers need up to 65.8 MiB, and there are 42.92 MiB; most are gradients",
        ),
    ],
)
def test_what_does_not_fit_is_written_and_ends_with_a_status_of_its_own(
    run: Run, files: tuple[str, ...], tmp_path: Path, available: str, status: int, answer: str
) -> None:
    (tmp_path / "c.toml").write_text(CLUSTER.replace("80 MB", available), encoding="utf-8")
    ended = run(*DAPPLE, *files, "--out", "o")
    told_last = "" if status == 0 else "the program does not fit the memory of the cluster's workers\n"
    assert (ended.status, ended.err) == (status, told_last)
    assert answer in ended.out
    quiet = run(*DAPPLE, *files, "--out", "o", "--quiet")
    assert (quiet.status, quiet.err, quiet.out) == (status, told_last, "")
    assert "verified: " in ended.out
    assert (tmp_path / "o" / "train.py").is_file()
    told = json.loads((tmp_path / "o" / "report.json").read_text())["summary"]["memory"]
    assert (told["fits"], told["needed"], told["worker"]) == (status == 0, 69 * 10**6, 1)
    assert run(*DAPPLE, *files, "--emit", "report").status == 0, "a level alone is no program that is to run"


def test_memory_is_told_in_bytes(run: Run, files: tuple[str, ...]) -> None:
    """Worker 0: 10 + 10 + 5 MB, two forwards of 3, two gradients to receive of 2, two activations to send of 2.

    Worker 1: 20 + 20, one forward of 3 of which 2 are a receive buffer, two of these, two gradients to send of 2. On
    both the first backward makes the gradients once more.
    """
    found = predicted(run(*DAPPLE, *files, "--emit", "report"))
    assert found["memory"] == [(35 + 6 + 4 + 4) * 10**6, (60 + 1 + 4 + 4) * 10**6]


def test_what_the_files_warn_of_stands_below_the_prediction(run: Run, files: tuple[str, ...], tmp_path: Path) -> None:
    assert predicted(run(*DAPPLE, *files, "--emit", "report"))["warnings"] == []
    (tmp_path / "m.toml").write_text(f"{PROFILE}# warning: stage 0 is too noisy to use\n", encoding="utf-8")
    assert predicted(run(*DAPPLE, *files, "--emit", "report"))["warnings"] == ["m.toml: stage 0 is too noisy to use"]
    assert "\nwarning: m.toml: stage 0 is too noisy to use\n" in run(*DAPPLE, *files, "--out", "o").out


def test_without_the_files_there_is_no_prediction(run: Run) -> None:
    assert "prediction" not in json.loads(run(*DAPPLE, "--emit", "report").out)


@pytest.mark.parametrize(
    "given", [["--copies", "2"], ["--profile", "m.toml", "--cluster", "c.toml"], ["--layout", "replica"]]
)
def test_options_that_belong_together_are_given_together(run: Run, files: tuple[str, ...], given: list[str]) -> None:
    run(*DAPPLE, *given).assert_refused(WRONG_COMMAND, given[0], "--profile, --cluster and --micro-batch-size together")


@pytest.mark.parametrize("given", [["--copies", "0"], ["--micro-batch-size", "x"], ["--profile", "none.toml"]])
def test_a_wrong_value_is_the_command_lines_mistake(run: Run, files: tuple[str, ...], given: list[str]) -> None:
    run(*DAPPLE, *files, *given).assert_refused(WRONG_COMMAND, given[0])


def test_what_does_not_go_with_the_files_is_the_option_as_it_is_written(run: Run, files: tuple[str, ...]) -> None:
    run(*DAPPLE, *files, "--split", "0,1").assert_refused(WRONG_COMMAND, "Error: --split: the profile has the costs")
    streaming = "pipedream", "--set", "D=2", *files, "--shard-optimizer"
    run(*streaming).assert_refused(WRONG_COMMAND, "Error: --shard-optimizer: pipedream has no flush")


def test_files_in_each_others_place_are_one_message(run: Run, files: tuple[str, ...]) -> None:
    swapped = "--profile", "c.toml", "--cluster", "m.toml", "--micro-batch-size", "4"
    said = "Error: --profile c.toml is a cluster file, and --cluster m.toml a profile: exchange them"
    run(*DAPPLE, *swapped).assert_refused(WRONG_COMMAND, said)


def test_what_the_files_lack_for_the_schedule_is_said_where_they_lack_it(run: Run, files: tuple[str, ...]) -> None:
    run(*DAPPLE, *files, "--copies", "3").assert_refused(WRONG_TEXT, "CH719", "c.toml:4:11")
    run(*DAPPLE, *files, "--micro-batch-size", "8").assert_refused(
        WRONG_TEXT, "CH718", "stage 0 of 2", "(and 1 more", "m.toml:"
    )
    run("dapple", *files).assert_refused(WRONG_TEXT, "CH717", "m.toml", "depths: 2")


def test_a_mistake_of_the_files_is_said_whatever_is_wanted(run: Run, files: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(PROFILE.replace('"10 ms"', "10"), encoding="utf-8")
    (tmp_path / "c.toml").write_text(CLUSTER.replace("= 4", "= 0"), encoding="utf-8")
    run(*DAPPLE, *files, "--emit", "plan").assert_refused(WRONG_TEXT, "CH707", "m.toml:8", "CH710", "c.toml:4")


def test_the_line_that_runs_a_program_is_the_one_that_was_predicted(run: Run, tmp_path: Path) -> None:
    examples = Path(__file__).resolve().parents[2] / "docs" / "examples"
    files = ["--profile", str(examples / "small.profile.toml"), "--cluster", str(examples / "small.cluster.toml")]
    asked = ["--copies", "2", "--micro-batch-size", "8", "--layout", "replica", "--out", str(tmp_path / "o")]
    last = run("chimera", *files, *asked).out.splitlines()[-1].split()
    assert last[:2] == ["torchrun", "--nnodes=4"], "8 ranks, 2 to a node"
    assert last[-7:] == ["--model", "MODEL.py", "--micro-batch-size", "8", "--layout", "replica", "--check"]
