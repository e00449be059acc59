"""What is told of an error that the model file's code raises."""

import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from chimera_runtime.blame import LaneOperation, Located, ModelError, UserCode, describe, during, ran_out
from chimera_runtime.errors import BadCheckpoint, BadModel, Misuse, PeerLost, PlacedError, ScriptPlace
from chimera_runtime.values.boundary import Stack


class Alone(torch.nn.Module):
    """A layer that takes a carry and returns none."""

    def forward(self, x: torch.Tensor, carry: object = None) -> torch.Tensor:
        return x


SOURCE = """
import torch

class Unprintable(Exception):
    def __str__(self):
        raise SystemExit("not even this")

class Silent(Exception):
    pass

def plain():
    deeper()

def deeper():
    raise ValueError("first line\\n  second line")

def unprintable():
    raise Unprintable

def silent():
    raise Silent

def left():
    raise SystemExit(3)

def torchs():
    torch.nn.Linear(2, 3)(torch.ones(5))

def endless():
    endless()

def chained():
    try:
        deeper()
    except ValueError as error:
        raise KeyError("after") from error
"""


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, Callable[[], None]]]:
    file = tmp_path / "model.py"
    file.write_text(SOURCE)
    names: dict[str, Callable[[], None]] = {}
    exec(compile(SOURCE, str(file), "exec"), names)
    return file, names


@pytest.mark.parametrize(
    ("function", "headline"),
    [
        ("plain", "{}:15 in deeper: ValueError: first line"),
        ("unprintable", "{}:18 in unprintable: Unprintable: (its message cannot be shown: __str__ raises an error)"),
        ("silent", "{}:21 in silent: Silent"),
        ("left", "{}:24 in left: SystemExit: 3"),
        ("torchs", "{}:27 in torchs: RuntimeError: "),
        ("endless", "{}:30 in endless: RecursionError: "),
        ("chained", "{}:36 in chained: KeyError: 'after'"),
    ],
)
def test_an_error_is_told_by_its_line_and_with_the_traceback_from_there(
    model: tuple[Path, dict[str, Callable[[], None]]], function: str, headline: str
) -> None:
    file, functions = model
    with pytest.raises(ModelError) as raised, UserCode("the forward of stage 3", 1):
        functions[function]()
    first, second, *rest = describe(raised.value).splitlines()
    assert first.startswith(f"the forward of stage 3: {headline.format(file)}")
    assert second == "Traceback (most recent call last):"
    assert f'  File "{file}", line ' in "\n".join(rest)
    assert raised.value.status == 1


def test_an_error_without_frames_of_the_user_is_a_line() -> None:
    dataset = {0: "item"}
    with pytest.raises(ModelError) as raised, UserCode("an item of the dataset", 2):
        dataset[1]
    assert describe(raised.value).splitlines()[0].endswith("KeyError: 1")


def test_ctrl_c_passes_where_it_raises_and_is_an_error_of_the_model_elsewhere() -> None:
    with pytest.raises(KeyboardInterrupt), UserCode("the loss", 1):
        raise KeyboardInterrupt
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with pytest.raises(ModelError), UserCode("the loss", 1):
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_loss_of_another_rank_is_nobodys_code() -> None:
    """The user's code may wait for others, as in ``on_step``."""
    with pytest.raises(PeerLost), UserCode("on_step(pipe, outcome)", 1):
        raise PeerLost("rank 0: wait recv m0 s0->s1: rank 1: no answer", [1])


def test_what_raises_nothing_passes_its_value_on() -> None:
    def call() -> int:
        with UserCode("the loss", 1):
            return 5

    assert call() == 5


def test_what_a_call_within_the_call_has_blamed_stays_so() -> None:
    with pytest.raises(ModelError) as raised, UserCode("the step", 1), UserCode("the hook", 2):
        raise ValueError("no")
    assert (raised.value.doing, raised.value.status) == ("the hook", 2)
    assert isinstance(raised.value.__cause__, ValueError)


HELPER = """
def scale(x):
    raise ValueError("no scale")
"""

USER = """
import helper

class Module:
    def __call__(self, x):
        return helper.scale(x)
"""


def test_an_error_in_a_module_that_the_file_imports_is_named_by_its_own_line_and_where_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "user.py").write_text(USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    import user  # type: ignore[import-not-found]

    with pytest.raises(ModelError) as raised, UserCode("the forward of stage 0", 1):
        user.Module()(1)
    headline, *_ = describe(raised.value).splitlines()
    assert headline == (
        f"the forward of stage 0: {tmp_path}/helper.py:3 in scale (from {tmp_path}/user.py:6 in __call__): "
        "ValueError: no scale"
    )


def failing() -> None:
    raise ValueError("went wrong")


def test_an_uncaught_error_is_the_users_traceback_once_and_then_the_line_that_called() -> None:
    """With rank, worker, stage, micro-batch, update and operation, and without a frame of what lies between."""

    def step() -> None:
        with Located(3, 1, lambda: "never asked for"):
            deep()

    def deep() -> None:
        with during(lambda: LaneOperation("F", 2, (5,), 8)), UserCode("the forward of stage 2", 1):
            failing()

    with pytest.raises(ModelError) as raised:
        step()
    error = raised.value
    shown = "".join(traceback.format_exception(error))
    assert shown.count("in failing\n") == shown.count('raise ValueError("went wrong")') == 1
    assert "in deep" not in shown
    assert "in step" not in shown
    assert "__exit__" not in shown
    last = shown.splitlines()[-1]
    words = "rank 3 (worker 1): the forward of stage 2 (micro-batch 5 of update 9, F m5 s2): "
    assert last.startswith(f"chimera_runtime.blame.ModelError: {words}")
    assert last.endswith("in failing: ValueError: went wrong")
    assert (error.rank, error.worker, error.operation) == (3, 1, LaneOperation("F", 2, (5,), 8))
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (LaneOperation("B", 0, (1,), 0), "micro-batch 1 of update 1, B m1 s0"),
        (LaneOperation("F", 3, (0, 1), 2), "micro-batches 0, 1 of update 3, F m0,m1 s3"),
        (LaneOperation("step", 3, (), 2), "update 3, step s3"),
        (LaneOperation("F", 1, (5,), 0, slices=4), "slice 1 of micro-batch 1 of update 1, F m1 q1 s1"),
    ],
)
def test_an_operation_is_told_as_in_the_schedule_and_in_words(operation: LaneOperation, words: str) -> None:
    assert operation.words == words


@pytest.mark.parametrize("kind", [BadCheckpoint, BadModel, Misuse, PeerLost])
def test_an_error_in_an_update_keeps_the_line_of_the_script_without_its_traceback(kind: type[PlacedError]) -> None:
    class Lane:
        first = 4

        def forward(self) -> None:
            raise kind("wrong")

    script: dict[str, Callable[[Lane], None]] = {}
    exec("INTERFACE = PROGRAM = 0\ndef update(lane):\n    m = 7\n    lane.forward()\n", script)
    with pytest.raises(kind) as raised, Located(0, 0, lambda: "never asked for"):
        script["update"](Lane())
    assert raised.value.place == ScriptPlace(4, 4, {"m": 7})


def test_what_memory_there_was_is_noted_where_it_ran_out() -> None:
    """On a GPU and on the host, in the user's code and in ours."""
    host = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), host):
        assert ran_out(error)
        with pytest.raises(type(error)) as ours, Located(0, 0, lambda: "memory: all used"):
            raise error
        assert ours.value.__notes__ == ["memory: all used"]
        with pytest.raises(ModelError) as users, Located(0, 0, lambda: "memory: all used"), UserCode("the loss", 1):
            raise error
        assert describe(users.value).splitlines()[-1] == "memory: all used"
    assert not ran_out(RuntimeError("another"))
    assert not ran_out(None)


def test_what_this_package_finds_wrong_inside_of_a_forward_is_one_line_unless_the_users_code_asked_for_it(
    model: tuple[Path, dict[str, Callable[[], None]]],
) -> None:
    layers = Stack({"0": Alone()})
    with pytest.raises(ModelError) as found, UserCode("the forward of stage 0", 1):
        layers(torch.ones(1, 2), _of_layers={"carry": None})
    assert describe(found.value).startswith("the forward of stage 0: the forward of layer 0 has a parameter carry")
    assert "\n" not in describe(found.value)
    _, names = model

    def wrong() -> None:
        raise BadModel("a loss is named twice")

    names["plain"].__globals__["deeper"] = wrong
    with pytest.raises(ModelError) as asked, UserCode("the forward of stage 0", 1):
        names["plain"]()
    assert "Traceback" in describe(asked.value)


def test_a_write_into_what_a_forward_has_received_gets_a_hint() -> None:
    received = torch.ones(2, requires_grad=True)
    for write in (lambda: received.mul_(2), lambda: received[:1].mul_(2)):
        with pytest.raises(ModelError) as raised, UserCode("the forward of stage 0", 1):
            write()
        assert "let it work on a copy" in describe(raised.value).splitlines()[-1]
