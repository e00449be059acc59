"""Several versions of a stage's weights at once: what a backward finds, what a step changes, how much is kept."""

from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chimera_runtime.stage.weight_versions import Versions, masters

WIDTH = 6
UPDATES = 9
WORDS = torch.randint(7, (UPDATES, 3, 4), generator=torch.Generator().manual_seed(0))


class Stage(nn.Module):
    """Embeds its input and hands it to a layer; the result has the same shape for all layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(7, WIDTH)
        self.layer = layer

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result = self.layer(self.words(words))
        return result[0] if isinstance(result, tuple) else result


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.one(x)))


class Checkpointed(nn.Module):
    """Runs its forward again during the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Partial(nn.Module):
    """A parameter that is never used, one that is used for some inputs only, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused, self.sometimes = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(torch.tanh(self.linear(x)))
        return x * self.sometimes if float(x.detach().sum()) > 0 else x


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    "norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True),
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
    "tied": Tied,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant": lambda: Checkpointed(reentrant=True),
    "partial": Partial,
}

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
}


def stage(layer: str) -> tuple[Stage, list[nn.Parameter]]:
    torch.manual_seed(1)
    module = Stage(LAYERS[layer]()).double()
    return module, [p for p in module.parameters() if p.requires_grad]


def loss(module: nn.Module, number: int) -> torch.Tensor:
    output: torch.Tensor = module(WORDS[number])
    return (output - 0.1 * number).square().mean()


class Delayed:
    """Training in which a backward comes ``delay`` forwards late, and every backward is followed by a step."""

    def __init__(self, layer: str, optimizer: str, delay: int) -> None:
        self.module, self.parameters = stage(layer)
        self.stepped = masters(self.parameters)
        self.versions = Versions(self.parameters, self.stepped, OPTIMIZERS[optimizer](self.stepped))
        self.delay = delay

    def run(self) -> Iterator[float]:
        under_way: deque[torch.Tensor] = deque()
        for time in range(UPDATES + self.delay):
            if time < UPDATES:
                self.versions.select(max(0, time - self.delay))
                under_way.append(loss(self.module, time))
            if time >= self.delay:
                yield self.finish(time - self.delay, under_way.popleft())

    def finish(self, number: int, value: torch.Tensor) -> float:
        read = number - self.delay
        self.versions.select(max(0, read))
        value.backward()
        if self.delay:
            if read >= 0:
                self.versions.drop(read)
            self.versions.stash(number)
        self.versions.step()
        for parameter in self.parameters:
            parameter.grad = None
        return value.item()


def plainly(layer: str, optimizer: str, delay: int) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and newest weights if each backward ran right after its forward, on copies of the weights."""
    module, parameters = stage(layer)
    steps, losses = OPTIMIZERS[optimizer](parameters), []
    history = [[p.detach().clone() for p in parameters]]

    def load(version: int) -> None:
        with torch.no_grad():
            for parameter, tensor in zip(parameters, history[version], strict=True):
                parameter.copy_(tensor)

    for number in range(UPDATES):
        load(max(0, number - delay))
        value = loss(module, number)
        value.backward()
        load(number)
        steps.step()
        steps.zero_grad()
        losses.append(value.item())
        history.append([p.detach().clone() for p in parameters])
    return losses, history[-1]


@pytest.mark.full
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layer", LAYERS)
def test_late_backwards_find_the_weights_of_their_forwards(layer: str, optimizer: str, delay: int) -> None:
    delayed = Delayed(layer, optimizer, delay)
    losses = list(delayed.run())
    wanted_losses, wanted = plainly(layer, optimizer, delay)
    assert losses == pytest.approx(wanted_losses, rel=1e-13)
    for found, expected in zip(delayed.stepped, wanted, strict=True):
        torch.testing.assert_close(found.detach(), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("delay", [1, 3])
def test_versions_matter(delay: int) -> None:
    """Otherwise the test above would prove nothing."""
    assert plainly("linear", "momentum", delay)[0] != pytest.approx(plainly("linear", "momentum", 0)[0], rel=1e-3)


@pytest.mark.parametrize("delay", [0, 1, 2, 5])
def test_no_more_copies_are_kept_than_versions_are_alive(delay: int) -> None:
    delayed = Delayed("linear", "momentum", delay)
    memory: set[int] = set()
    for _ in delayed.run():
        memory |= {parameter.data_ptr() for parameter in (delayed.parameters[0], delayed.stepped[0])}
    assert delayed.versions.copies == delay + 1
    assert len(memory) <= delay + 1


def test_nothing_changes_a_parameter_of_the_module_in_place() -> None:
    delayed = Delayed("linear", "adam", 2)
    before = [parameter._version for parameter in delayed.parameters]
    list(delayed.run())
    assert [parameter._version for parameter in delayed.parameters] == before


def test_a_step_leaves_no_gradient_with_the_masters() -> None:
    """The next update writes the memory of the gradients if nothing else holds it."""
    parameter = nn.Parameter(torch.ones(2))
    (master,) = stepped = masters([parameter])
    versions = Versions([parameter], stepped, torch.optim.SGD(stepped, lr=1.0))
    parameter.grad = torch.ones(2)
    parameter.main_grad = torch.ones(2)  # type: ignore[attr-defined]
    versions.step()
    assert (master.grad, master.main_grad) == (None, None)  # type: ignore[attr-defined]
    assert master.tolist() == [0, 0]


def test_a_version_that_is_not_alive_cannot_be_selected() -> None:
    versions = Delayed("linear", "momentum", 0).versions
    with pytest.raises(KeyError):
        versions.select(1)
    versions.step()
    with pytest.raises(KeyError):
        versions.select(0)
    versions.stash(1)
    versions.step()
    versions.drop(1)
    with pytest.raises(KeyError):
        versions.select(1)


def test_only_the_newest_weights_can_be_stashed() -> None:
    with pytest.raises(AssertionError, match="version 3 is not the newest, which is 0"):
        Delayed("linear", "momentum", 0).versions.stash(3)


def test_the_optimizer_sees_what_the_model_wrote_on_its_parameters() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.scale = 3
    (master,) = masters([parameter])
    assert master.scale == 3
    assert master.data_ptr() == parameter.data_ptr()


def test_a_stage_without_parameters_has_versions_too() -> None:
    versions = Versions([], [], torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    versions.stash(0)
    versions.step()
    versions.select(0)
    versions.drop(0)
    versions.select(1)


def test_a_run_begins_on_the_newest_weights_as_version_0() -> None:
    """Version 0 is shown by the parameters, and the optimizer continues with it."""
    twice, fresh = Delayed("linear", "momentum", 2), Delayed("linear", "momentum", 2)
    list(twice.run())
    for version in (UPDATES - 2, UPDATES - 1):
        twice.versions.drop(version)
    twice.versions.begin()
    for parameter, stepped in zip(twice.parameters, twice.stepped, strict=True):
        assert parameter.data_ptr() == stepped.data_ptr()
    fresh.module.load_state_dict(twice.module.state_dict())
    fresh.versions._optimizer.load_state_dict(deepcopy(twice.versions._optimizer.state_dict()))
    assert list(twice.run()) == list(fresh.run())
    assert twice.versions.copies == 3


def test_a_run_begins_when_no_older_version_is_alive() -> None:
    versions = Delayed("linear", "momentum", 2).versions
    versions.stash(0)
    versions.step()
    with pytest.raises(AssertionError, match=r"versions \[0, 1\] are alive"):
        versions.begin()
