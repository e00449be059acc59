"""What is told of an error that the model file's code raises."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.blame import Calling, ModelError, describe

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
    with pytest.raises(ModelError) as raised, Calling("the forward of stage 3", 1):
        functions[function]()
    first, second, *rest = describe(raised.value, file).splitlines()
    assert first.startswith(f"the forward of stage 3: {headline.format(file)}")
    assert second == "Traceback (most recent call last):"
    assert f'  File "{file}", line ' in "\n".join(rest)
    assert raised.value.status == 1


def test_an_error_without_frames_of_the_user_is_a_line() -> None:
    dataset = {0: "item"}
    with pytest.raises(ModelError) as raised, Calling("an item of the dataset", 2):
        dataset[1]
    assert describe(raised.value, Path("model.py")).splitlines()[0].endswith("KeyError: 1")


def test_ctrl_c_passes_where_it_raises_and_is_an_error_of_the_model_elsewhere() -> None:
    with pytest.raises(KeyboardInterrupt), Calling("the loss", 1):
        raise KeyboardInterrupt
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with pytest.raises(ModelError), Calling("the loss", 1):
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_raises_nothing_passes_its_value_on() -> None:
    def call() -> int:
        with Calling("the loss", 1):
            return 5

    assert call() == 5
