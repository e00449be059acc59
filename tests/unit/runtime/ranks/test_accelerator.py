"""torch.cuda as staging uses it: what it is asked for, as far as that can be seen without a GPU."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from chimera_runtime.ranks.devices import Accelerator

DEVICE = torch.device("cuda", 1)


class Calls(list[Any]):
    """What torch.cuda was asked for."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """In place of torch.cuda's streams and events."""
    made = Calls()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            made.append(("stream", device))

        def wait_event(self, event: Any) -> None:
            made.append(("wait", self, event))

    class Event:
        def __init__(self, **options: bool) -> None:
            made.append(("event", options))

        def record(self, stream: Stream) -> None:
            made.append(("record", self, stream))

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            made.append(("synchronise", self))

    @contextmanager
    def on(stream: Stream) -> Any:
        made.append(("on", stream))
        yield
        made.append("off")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("current", device))
    return made


def test_streams_and_events_are_those_of_the_device(calls: Calls) -> None:
    """A thread sleeps while it waits for an event: it does not spin."""
    gpu = Accelerator(DEVICE)
    assert gpu.computing == ("current", DEVICE)  # type: ignore[comparison-overlap]
    stream = gpu.stream()
    event = gpu.record(stream)
    gpu.wait(stream, event)
    gpu.synchronise(event)
    assert gpu.is_over(event) is False
    assert calls == [
        ("stream", DEVICE),
        ("event", {"blocking": True}),
        ("record", event, stream),
        ("wait", stream, event),
        ("synchronise", event),
    ]


def test_a_copy_is_put_into_its_stream_and_does_not_wait(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Accelerator(DEVICE)
    stream: Any = gpu.stream()

    class Target:
        def copy_(self, source: Any, non_blocking: bool) -> None:
            calls.append(("copy", source, non_blocking))

    gpu.copy(stream, Target(), "a tensor")  # type: ignore[arg-type]
    assert calls[1:] == [("on", stream), ("copy", "a tensor", True), "off"]


def test_a_thread_begins_on_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    Accelerator(DEVICE).enter()
    assert entered == [DEVICE]


def test_pinned_memory_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: asked.append((sizes, options)))
    Accelerator(DEVICE).pinned(512)
    assert asked == [((512,), {"dtype": torch.uint8, "pin_memory": True})]
