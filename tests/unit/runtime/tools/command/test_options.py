"""The command line of train.py: what is read, and what each option refuses."""

import re
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from chimera_runtime.errors import Misuse
from chimera_runtime.program.job import Feed, Job
from chimera_runtime.tools.command.options import parse, require_fitting
from tests.unit.runtime.thread_ranks import job

MODEL = ("--model", "m.py")


def refused(*arguments: str) -> str:
    with pytest.raises(Misuse) as error:
        parse([*MODEL, *arguments])
    assert str(error.value).endswith(" (see --help)")
    return str(error.value)


def test_a_model_is_all_that_is_needed() -> None:
    options = parse(MODEL)
    assert (options.model, options.steps, options.micro_batch_size, options.seed) == (Path("m.py"), 10, 1, 0)
    assert (options.timeout, options.backend, options.layout) == (60.0, "gloo", "pipeline")
    assert options.communicators is None
    assert (options.check, options.check_only) == (False, False)
    assert {options.rehearse, options.metrics, options.trace, options.memory_limit} == {None}


def test_options_are_read() -> None:
    options = parse(
        [*MODEL, "--steps=7", "--micro-batch-size=4", "--seed=-3", "--check", "--timeout=0.5", "--layout=replica"]
    )
    assert (options.steps, options.micro_batch_size, options.seed, options.check) == (7, 4, -3, True)
    assert (options.timeout, options.layout) == (0.5, "replica")
    assert parse([*MODEL, "--rehearse", "F=0.005,B=1e-2"]).rehearse == {"F": 0.005, "B": 0.01}


def test_a_split_lists_the_first_layer_of_each_stage() -> None:
    assert parse(MODEL).split is None
    assert parse([*MODEL, "--split", "0,9,17,25"]).split == (0, 9, 17, 25)
    for text in ("", "a", "0,", "0;1", "0,-1", "0, 1", "0,²"):
        assert f"argument --split: {text!r} does not list the first layer of each stage, as in 0,9" in refused(
            f"--split={text}"
        )


def test_without_a_model_nothing_starts() -> None:
    with pytest.raises(Misuse, match="the following arguments are required: --model"):
        parse([])


def test_a_model_of_transformers_takes_the_place_of_a_model_file() -> None:
    options = parse(["--hf", "gpt2", "--text", "book.txt"])
    assert (options.hf, options.text, options.learning_rate) == ("gpt2", Path("book.txt"), 5e-5)
    for words, complaint in (
        (["--hf", "gpt2"], "--hf needs --text FILE, to train on"),
        ([*MODEL, "--hf", "gpt2", "--text", "t"], "a model of transformers needs no model file; leave --model out"),
        (["--hf", "gpt2", "--text", "t", "--", "x"], "leave -- out"),
        ([*MODEL, "--length", "4"], "--length goes with --hf"),
        ([*MODEL, "--checkpoint-layers"], "--checkpoint-layers goes with --hf"),
    ):
        with pytest.raises(Misuse, match=complaint):
            parse(words)


@pytest.mark.parametrize("option", ["--steps", "--micro-batch-size"])
@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "many", "²", "9" * 5000])
def test_a_count_is_a_positive_whole_number(option: str, text: str) -> None:
    assert f"argument {option}: {text!r} is not a positive whole number" in refused(f"{option}={text}")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "1e300"])
def test_a_time_out_is_a_number_of_seconds_that_a_clock_can_count(text: str) -> None:
    assert f"argument --timeout: {text!r} is not a positive number of seconds, 1000000000 at most" in refused(
        f"--timeout={text}"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F=1", "'F=1' needs both F and B, as in F=0.005,B=0.010"),
        ("F=1,B=", "'F=1,B=' is not of the form F=SECONDS,B=SECONDS"),
        ("F=1,W=2", "'F=1,W=2' needs both F and B, as in F=0.005,B=0.010, or F, I and W where backwards are split"),
        ("F=1,G=2", "is not of the form F=SECONDS,B=SECONDS"),
        ("F=1,F=2", "is not of the form F=SECONDS,B=SECONDS"),
        ("", "'' is not of the form F=SECONDS,B=SECONDS"),
        ("F=1,B=-2", "'-2' is not a positive number of seconds"),
    ],
)
def test_a_rehearsal_has_a_duration_of_both(text: str, words: str) -> None:
    assert words in refused(f"--rehearse={text}")


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1.5KiB", 1536), ("16GiB", 2**34), ("2 MiB", 2**21), ("0.5TiB", 2**39)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse([*MODEL, "--memory-limit", text]).memory_limit == size


def test_a_limit_may_be_that_of_the_device() -> None:
    assert parse([*MODEL, "--memory-limit", "device"]).memory_limit == "device"


@pytest.mark.parametrize("text", ["16GB", "-1", "0", "0.4", "GiB", "1e9", "nan", "9" * 400, ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    assert f"--memory-limit: {text!r} is not a number of bytes, as in 16GiB" in refused(f"--memory-limit={text}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--seed=x",), "argument --seed: invalid int value: 'x'"),
        (("--backend=mpi",), "--backend mpi: gloo, nccl, or a backend that --backend-module FILE registers"),
        (("--backend=nccl", "--device=cpu"), "--device cpu --backend nccl: NCCL is for GPUs; leave --device out, or"),
        (("--device=tpu",), "argument --device: invalid choice: 'tpu'"),
        (("--backend-module=strict.py",), "--backend-module: --backend NAME says which backend the file registers"),
        (("--communicators=single",), "argument --communicators: invalid choice: 'single'"),
        (("--layout=ring",), "argument --layout: invalid choice: 'ring'"),
        (("--check", "--check-only"), "argument --check-only: not allowed with argument --check"),
        (("--check", "--rehearse", "F=1,B=2"), "not allowed with argument --check"),
        (("--trace", "D", "--check-only"), "--trace records the training, of which --check-only does none"),
        (("--no-such-option",), "unrecognized arguments: --no-such-option"),
        (("stray",), "unrecognized arguments: stray"),
        (("--steps",), "argument --steps: expected one argument"),
    ],
)
def test_what_cannot_be_is_one_message(arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(*arguments)


def test_help_is_printed_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    assert end.value.code == 0
    assert "Trains a model with the program beside it." in capsys.readouterr().out


def test_no_option_is_one_that_torchrun_would_read_in_another_way(capsys: pytest.CaptureFixture[str]) -> None:
    """torchrun takes what begins several of its own options for a mistake, also behind the name of the script."""
    with pytest.raises(SystemExit):
        parse(["--help"])
    options = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert len(options) > 20
    for option in options:
        assert get_args_parser().parse_args(["train.py", option, "x"]).training_script_args == [option, "x"]


def test_what_follows_two_dashes_is_the_model_files() -> None:
    options = parse([*MODEL, "--steps=2", "--", "--layers", "3", "--", "x"])
    assert (options.steps, options.args) == (2, ["--layers", "3", "--", "x"])
    assert parse(MODEL).args == []


def test_autocast_is_in_bfloat16_and_a_peak_is_a_number_or_that_of_the_device() -> None:
    assert parse([*MODEL, "--autocast", "bf16"]).autocast == "bf16"
    assert refused("--autocast=fp16").startswith("argument --autocast: invalid choice: 'fp16'")
    assert parse([*MODEL, "--device-peak", "auto"]).device_peak == "auto"
    assert parse([*MODEL, "--device-peak", "312"]).device_peak == 312.0
    for wrong in ("0", "-1", "nan", "H100"):
        assert refused(f"--device-peak={wrong}").startswith(
            f"argument --device-peak: '{wrong}' is not a positive number"
        )


def test_an_empty_path_is_none() -> None:
    assert refused("--save=") == "argument --save: an empty path (see --help)"


@pytest.mark.parametrize("option", ["--eval-every=2", "--autocast=bf16", "--device-peak=auto", "--peak-memory"])
def test_a_rehearsal_computes_nothing(option: str) -> None:
    words = refused("--rehearse", "F=1,B=1", option)
    assert words.startswith(f"--rehearse computes nothing: leave {option.partition('=')[0]} out")


def test_clipping_takes_a_norm_and_a_rehearsal_has_neither_gradients_nor_a_loss() -> None:
    assert parse([*MODEL, "--clip-norm", "0.5"]).clip_norm == 0.5
    for wrong in ("0", "-1", "nan", "inf", "much"):
        assert refused(f"--clip-norm={wrong}").startswith(f"argument --clip-norm: '{wrong}' is not a positive number")
    for option in ("--clip-norm=1", "--stop-on-nan"):
        assert refused("--rehearse", "F=1,B=1", option).startswith("--rehearse computes no gradients and no loss")


# Options of train.py that the program cannot follow are refused, with what to do in their place.


STREAM = job(period=1, lag=1)
HALVES = job(parts=2)
SPLIT = job(kinds=("F", "I", "W"))
GRAPH = job(feeds=(Feed(0, 1),))


def require(program: Job, *words: str) -> None:
    model = [] if any(word.startswith("--hf") for word in words) else ["--model", "model.py"]
    require_fitting(parse([*model, *words]), program)


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        (STREAM, ("--clip-norm=1",), "--clip-norm: two has no flush, .*; take a scheme with a flush, or clip in"),
        (STREAM, ("--shard-optimizer",), "--shard-optimizer: two has no flush, .*, or leave the option out"),
        (
            GRAPH,
            ("--hf=DIR", "--text=FILE"),
            "--hf: the layers of a transformer are a chain, and the stages of two are",
        ),
        (HALVES, (), "--micro-batch-size 1: two cuts .* into 2 halves; choose an even size"),
        (HALVES, ("--micro-batch-size=3",), "--micro-batch-size 3: two cuts every micro-batch"),
        (
            job(kinds=("F", "B", "pair")),
            ("--rehearse=F=0.01,B=0.02",),
            "lacks pair: two has such operations; give F=0.01,B=0.02,pair=0.03",
        ),
        (SPLIT, ("--rehearse=F=0.01,B=0.02",), "--rehearse lacks I and W: two has such operations; give F=0.01,I="),
        (
            job(kinds=("F", "B", "I", "W")),
            ("--rehearse=F=0.01,I=0.01,W=0.01",),
            "--rehearse lacks B: two has such operations",
        ),
        (job(), ("--rehearse=F=0.01,I=0.01,W=0.01",), "--rehearse lacks B: two has such operations; give F=0.01,B="),
        (job(), ("--backend=nccl", "--communicators=pair"), "communicators pair: two could wait for ever"),
    ],
)
def test_what_the_program_cannot_do_is_refused(program: Job, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(Misuse, match=message):
        require(program, *words)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (STREAM, ()),
        (job(), ("--clip-norm=1", "--shard-optimizer")),
        (HALVES, ("--micro-batch-size=4",)),
        (SPLIT, ("--rehearse=F=0.01,I=0.02,W=0.03",)),
        (job(communicators=("directed", "pair")), ("--backend=nccl", "--communicators=pair")),
    ],
)
def test_what_it_can_do_is_not(program: Job, words: tuple[str, ...]) -> None:
    require(program, *words)
