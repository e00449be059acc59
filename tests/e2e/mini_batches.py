"""Mini-batches of every form, in a training loop of one's own, against one process: one rank of a job of several cases.

    torchrun --nproc-per-node=4 mini_batches.py DIRECTORY..

Each directory is a compiled program with D = 4. Every case trains some updates with it; each gradient is compared with
that of the whole model on the whole mini-batch, which every rank computes by itself. Rank 0 says what has passed.
"""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from chimera_runtime import Misuse, Outcome, Pipeline, auxiliary_loss, whole

D, B, WIDTH, WORDS, LENGTH = 4, 2, 6, 11, 5
IGNORED = -100


class Beside:
    """A pipeline, and the same model in one process."""

    def __init__(self, pipeline: Pipeline, build: Callable[[int, int], nn.Module]) -> None:
        self.pipeline = pipeline
        self.stages = [build(stage, D) for stage in range(D)]
        for stage, module in pipeline.stages.items():
            self.stages[stage].load_state_dict(module.state_dict())
        place = pipeline._context.world.place
        self.copies, self.copy = place.copies, place.copy
        self.items = B * pipeline._context.world.job.micro_batches
        mine = [p for module in pipeline.stages.values() for p in module.parameters()]
        self.optimizers = [
            torch.optim.SGD(ps, lr=0.1) for ps in (mine, [p for m in self.stages for p in m.parameters()])
        ]

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank's copy trains on, of the items of all copies."""
        return tensor[self.copy * self.items : (self.copy + 1) * self.items]

    def compare(self, outcome: Outcome, loss: torch.Tensor, expected: float | None = None) -> None:
        """The gradients that both have now, after the ``loss`` of one process has run backward."""
        wanted = float(loss) if expected is None else expected
        assert abs(outcome.loss - wanted) <= 1e-12 * max(1.0, abs(wanted)), (outcome.loss, wanted)
        for stage, module in self.pipeline.stages.items():
            theirs = dict(self.stages[stage].named_parameters())
            scale = max(float(p.grad.abs().max()) for p in theirs.values() if p.grad is not None) or 1.0
            for name, parameter in module.named_parameters():
                gradient = theirs[name].grad
                assert (parameter.grad is None) == (gradient is None), (stage, name)
                if parameter.grad is not None and gradient is not None:
                    error = float((parameter.grad - gradient).abs().max()) / scale
                    assert error <= 1e-12, (stage, name, error)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def seeded(stage: int, module: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(stage)
    return module().double()


# A sum and a count.


def words(stage: int, stages: int) -> nn.Module:
    """A small model of text."""
    return seeded(
        stage,
        lambda: (
            nn.Embedding(WORDS, WIDTH)
            if stage == 0
            else nn.Linear(WIDTH, WORDS if stage == stages - 1 else WIDTH)
            if stage % 2
            else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        ),
    )


def padded(update: int, items: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of several lengths, the rest ignored; the second micro-batch has nothing but padding."""
    generator = torch.Generator().manual_seed(update)
    text = torch.randint(WORDS, (items, LENGTH), generator=generator)
    target = torch.randint(WORDS, (items, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH + 1, (items, 1), generator=generator)
    lengths[B : 2 * B] = 0
    return text, target.masked_fill(torch.arange(LENGTH) >= lengths, IGNORED)


def entropy(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


def mean_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over all that is not ignored, as torch has it."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def counts(directory: str) -> None:
    text, target = padded(0, B)
    with Pipeline(directory, words, entropy, (text, target)) as pipeline:
        both = Beside(pipeline, words)
        whole = nn.Sequential(*both.stages)
        for update in range(3):
            text, target = padded(update, both.items * both.copies)
            outcome = pipeline.step((both.share(text), both.share(target)))
            loss = mean_entropy(whole(text), target)
            loss.backward()
            both.compare(outcome, loss)
            both.step()
        with torch.no_grad():
            expected = mean_entropy(whole(text), target)
        value = pipeline.evaluate([(both.share(text), both.share(target))])
        assert abs(value - float(expected)) <= 1e-13, (value, expected)
        # Two mini-batches as one: the second has far fewer words.
        batches = [padded(update, both.items * both.copies) for update in (5, 6)]
        batches[1][1][:, 1:] = IGNORED
        for text, target in batches:
            outcome = pipeline.step((both.share(text), both.share(target)), accumulate=True)
        text, target = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        loss = mean_entropy(whole(text), target)
        loss.backward()
        both.compare(outcome, loss, float(mean_entropy(whole(batches[1][0]), batches[1][1])))
        both.step()
        # Nothing counts: there is no loss, and nothing is learnt.
        outcome = pipeline.step((both.share(batches[0][0]), both.share(torch.full_like(batches[0][1], IGNORED))))
        assert outcome.loss != outcome.loss
        assert all(p.grad is None or not p.grad.any() for p in pipeline.parameters())


# Structures and keyword arguments.


class State(nn.Module):
    """Takes and hands on a dict; each stage knows other keyword arguments."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last = stage == stages - 1

    def run(self, state: Any, factor: Any) -> Any:
        assert state["nothing"] is None
        x, index = state["inside"]
        x = torch.tanh(self.linear(x)) * factor + index.double()[:, None]
        return x if self.last else {"inside": [x, index + 1], "nothing": None, "name": state["name"]}


class First(State):
    def forward(self, batch: Any) -> Any:
        return self.run({"inside": [batch["x"], batch["more"][0]], "nothing": None, "name": "state"}, 1.0)


class Scaling(State):
    def forward(self, state: Any, scale: Any) -> Any:
        return self.run(state, scale["by"])


class Masking(State):
    def forward(self, state: Any, *, mask: torch.Tensor) -> Any:
        return self.run(state, mask[:, None])


class Everything(State):
    def forward(self, state: Any, **keywords: Any) -> Any:
        return self.run(state, keywords["scale"]["by"] + keywords["mask"][:, None])


def structured(stage: int, stages: int) -> nn.Module:
    return seeded(stage, lambda: (First, Scaling, Masking, Everything)[stage](stage, stages))


def squares(output: torch.Tensor, target: Any) -> torch.Tensor:
    return ((output - target["y"]) ** 2).mean()


def structures(directory: str) -> None:
    def batch(update: int, items: int) -> Any:
        generator = torch.Generator().manual_seed(update)
        x, by, y = torch.randn(3, items, WIDTH, generator=generator, dtype=torch.float64)
        index = torch.arange(items) % 3
        mask = torch.rand(items, generator=generator, dtype=torch.float64)
        return {"x": x, "more": (index, None)}, {"y": y}, {"scale": {"by": by}, "mask": mask}

    with Pipeline(directory, structured, squares, batch(0, B)) as pipeline:
        both = Beside(pipeline, structured)
        for update in range(2):
            inputs, target, keywords = whole = batch(update, both.items * both.copies)
            outcome = pipeline.step(tree_map_only(torch.Tensor, both.share, whole))
            first, second, third, last = both.stages
            output = last(third(second(first(inputs), keywords["scale"]), mask=keywords["mask"]), **keywords)
            loss = squares(output, target)
            loss.backward()
            both.compare(outcome, loss)
            both.step()
        value = pipeline.evaluate([tree_map_only(torch.Tensor, both.share, whole)])
        with torch.no_grad():
            state = second(first(inputs), keywords["scale"])
            output = last(third(state, mask=keywords["mask"]), **keywords)
        assert abs(value - float(squares(output, target))) <= 1e-13
        (predicted,) = pipeline.predict([tree_map_only(torch.Tensor, both.share, (inputs, None, keywords))])
        torch.testing.assert_close(predicted, both.share(output), rtol=1e-12, atol=1e-13)


# Auxiliary losses: a small mixture of experts.


class Experts(nn.Module):
    """Each item goes to one of two experts; two losses keep them busy alike and the gate's outputs small."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.losses: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        shares = scores.softmax(1)
        chosen = functional.one_hot(shares.argmax(1), 2).double()
        self.losses = {
            "balance": 0.1 * 2 * (shares.mean(0) * chosen.mean(0)).sum(),
            "size": 0.01 * scores.logsumexp(1).square().mean(),
        }
        for name, value in self.losses.items():
            auxiliary_loss(name, value)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return x + ((chosen * shares)[:, :, None] * outputs).sum(1)


def mixture(stage: int, stages: int) -> nn.Module:
    """Experts in the two stages of the middle."""
    plain = stage in {0, stages - 1}
    return seeded(stage, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) if plain else Experts())


def experts(directory: str) -> None:
    def batch(update: int, items: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.randn(2, items, WIDTH, generator=torch.Generator().manual_seed(update), dtype=torch.float64)
        return x, y

    def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    def summed(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
        return (output - target).square().sum(), 3.0

    for loss in (mean, summed):
        with Pipeline(directory, mixture, loss, batch(0, B)) as pipeline:
            both = Beside(pipeline, mixture)
            count = both.items * both.copies // B * (3 if loss is summed else 1)
            for update in range(2):
                x, y = batch(update, both.items * both.copies)
                outcome = pipeline.step((both.share(x), both.share(y)))
                total = torch.zeros((), dtype=torch.float64)
                auxiliary = dict.fromkeys(("balance", "size"), 0.0)
                for first in range(0, len(x), B):
                    value = loss(nn.Sequential(*both.stages)(x[first : first + B]), y[first : first + B])
                    total = total + (value[0] if isinstance(value, tuple) else value)
                    for stage in both.stages:
                        for name, part in getattr(stage, "losses", {}).items():
                            (part / count).backward(retain_graph=True)
                            auxiliary[name] += float(part) / count
                (total / count).backward()
                both.compare(outcome, total / count)
                assert outcome.auxiliary.keys() == auxiliary.keys()
                assert all(abs(outcome.auxiliary[name] - auxiliary[name]) <= 1e-13 for name in auxiliary)
                assert all(auxiliary.values())
                both.step()


# Lengths.


class Mixing(nn.Module):
    """Mixes the words of a text, of whatever length, and hands on a second tensor of another shape."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.linear, self.first, self.last = nn.Linear(WIDTH, WIDTH), stage == 0, stage == stages - 1

    def forward(self, state: Any, scale: Any = None) -> Any:
        x, mean = (state, state.mean(2)) if self.first else (state["x"], state["mean"])
        x = torch.tanh(self.linear(x)).cumsum(1) * scale[:, :, None] + mean[:, :, None]
        return x if self.last else {"x": x, "mean": mean * 2}


def lengths(directory: str) -> None:
    def build(stage: int, stages: int) -> nn.Module:
        return seeded(stage, lambda: Mixing(stage, stages))

    def batch(seed: int, items: int, length: int) -> tuple[Any, Any, Any]:
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, items, length, WIDTH, generator=generator, dtype=torch.float64)
        return x, y, {"scale": torch.rand(items, length, generator=generator, dtype=torch.float64)}

    def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    with Pipeline(directory, build, mean, batch(0, B, LENGTH), varying=True) as pipeline:
        both = Beside(pipeline, build)
        for update, length in enumerate((3, LENGTH, 1, 3, 2, LENGTH)):
            x, y, keywords = whole = batch(update, both.items * both.copies, length)
            outcome = pipeline.step(tree_map_only(torch.Tensor, both.share, whole))
            for stage in both.stages:
                x = stage(x, **keywords)
            loss = mean(x, y)
            loss.backward()
            both.compare(outcome, loss)
            both.step()
        # Copies may differ from one another.
        if both.copies == 2:
            parts = [batch(9 + copy, both.items, 2 + copy) for copy in range(2)]
            outcome = pipeline.step(parts[both.copy])
            total = torch.zeros((), dtype=torch.float64)
            for x, y, keywords in parts:
                for stage in both.stages:
                    x = stage(x, **keywords)
                total = total + mean(x, y) / 2
            total.backward()
            both.compare(outcome, total)
            both.step()
        larger = f"({B}, {LENGTH + 1}, {WIDTH}), and the example's is ({B}, {LENGTH}, {WIDTH})"
        with pytest.raises(Misuse, match=re.escape(larger)):
            pipeline.step(batch(0, both.items, LENGTH + 1))
        evaluate_lengths(pipeline, both, batch, larger)


def evaluate_lengths(pipeline: Pipeline, both: Beside, batch: Callable[[int, int, int], Any], larger: str) -> None:
    """Batches of several lengths, seen in training or not, in several rounds or less than a micro-batch."""
    sizes = [(2 * both.items + 1, 3), (1, 4), (both.items, LENGTH), (B + 1, 2), (1, 4)]
    batches = [batch(20 + number, *size) for number, size in enumerate(sizes)]
    with pytest.raises(Misuse, match=re.escape(larger)):
        pipeline.evaluate([*batches[:1], batch(0, 1, LENGTH + 1)])
    total, outputs = 0.0, []
    with torch.no_grad():
        for x, y, keywords in batches:
            for stage in both.stages:
                x = stage(x, **keywords)
            outputs.append(x)
            total += float((x - y).square().mean()) * len(y)
    assert pipeline.evaluate(batches) == pytest.approx(total / sum(items for items, _ in sizes), rel=1e-12)
    for output, expected in zip(pipeline.predict(batches), outputs, strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


# Keyword arguments that are whole.


class Bordered(nn.Module):
    """Takes a mask by item, and a structure that belongs to all items."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, borders: Any) -> torch.Tensor:
        at, (table, scale) = borders["at"], borders["of"]
        return torch.tanh(self.linear(x) * mask[:, None] + table) + scale * at.double().mean() / len(at)


def wholes(directory: str) -> None:
    """Of any length, that of the items by chance included, in every form of a batch."""

    def build(stage: int, _stages: int) -> nn.Module:
        return seeded(stage, Bordered)

    def batch(seed: int, items: int, entries: int) -> tuple[Any, Any, Any]:
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, items, WIDTH, generator=generator, dtype=torch.float64)
        mask = torch.rand(items, generator=generator, dtype=torch.float64)
        borders = {"at": torch.arange(entries) * (seed + 1), "of": (x[:1] * 2, torch.tensor(0.5 + seed))}
        return x, y, {"mask": mask, whole("borders"): borders}

    def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    def outputs(both: Beside, x: torch.Tensor, keywords: Any) -> torch.Tensor:
        for stage in both.stages:
            x = stage(x, **keywords)
        return x

    for varying in (False, True):
        with Pipeline(directory, build, mean, batch(0, B, 3), varying=varying) as pipeline:
            both = Beside(pipeline, build)
            everything = both.items * both.copies

            def share(tensors: Any, both: Beside = both) -> Any:
                """The part of this copy; later batches have plain names."""
                x, y, keywords = tensors
                mine = {"mask": both.share(keywords["mask"]), "borders": keywords["borders"]}
                return both.share(x), None if y is None else both.share(y), mine

            for update, entries in enumerate((B, both.items, everything + 1, 1)):
                tensors = x, y, keywords = batch(update, everything, entries)
                mine = share(tensors)
                rows = [slice(m * B, (m + 1) * B) for m in range(pipeline.micro_batches)]
                parts = [(mine[0][r], mine[1][r], mine[2] | {"mask": mine[2]["mask"][r]}) for r in rows]
                outcome = pipeline.step(micro_batches=parts) if update % 2 else pipeline.step(mine)
                loss = mean(outputs(both, x, keywords), y)
                loss.backward()
                both.compare(outcome, loss)
                both.step()
            assert pipeline.remarks == ()
            assert "one process" in pipeline.check(mine)
            with torch.no_grad():
                expected = outputs(both, x, keywords)
                assert abs(pipeline.evaluate([mine]) - float(mean(expected, y))) <= 1e-13
                short = x[: B + 1], y[: B + 1], {"mask": keywords["mask"][: B + 1], "borders": keywords["borders"]}
                (predicted,) = pipeline.predict([short])
            torch.testing.assert_close(predicted, expected[: B + 1], rtol=1e-12, atol=1e-13)
            with pytest.raises(Misuse, match=r"dimension 0 of the keyword argument mask is 1, .*whole\(\"mask\"\)"):
                pipeline.step((*mine[:2], {**mine[2], "mask": mine[2]["mask"][:1]}))
            wholes_of_loader(pipeline, both, outputs)


def wholes_of_loader(
    pipeline: Pipeline, both: Beside, outputs: Callable[[Beside, torch.Tensor, Any], torch.Tensor]
) -> None:
    """One for all items of a dataset, or made by collate for each micro-batch."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(2, both.items * both.copies, WIDTH, generator=generator, dtype=torch.float64)
    borders = {"at": torch.arange(B), "of": (x[:1], torch.tensor(1.5))}
    items = [(x[i], y[i], {"mask": x[i, 0], whole("borders"): borders}) for i in range(len(x))]

    def collate(some: list[Any]) -> Any:
        x, y, mask = (
            torch.stack(tensors) for tensors in zip(*((x, y, named["mask"]) for x, y, named in some), strict=True)
        )
        return x, y, {"mask": mask, "borders": borders | {"at": torch.arange(7) * x[0, 0]}}

    for collate_fn in (None, collate):
        (batch,) = pipeline.loader(items, collate_fn=collate_fn)
        outcome = pipeline.step(batch)
        losses = []
        for first in range(0, len(x), B):
            rows = x[first : first + B]
            named = borders if collate_fn is None else borders | {"at": torch.arange(7) * rows[0, 0]}
            output = outputs(both, rows, {"mask": rows[:, 0], "borders": named})
            losses.append((output - y[first : first + B]).square().mean())
        loss = torch.stack(losses).mean()
        loss.backward()
        both.compare(outcome, loss)
        both.step()


CASES: dict[str, Callable[[str], None]] = {
    "counts": counts,
    "structures": structures,
    "experts": experts,
    "lengths": lengths,
    "wholes": wholes,
}


def main(directories: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for directory in directories:
        for name, case in CASES.items():
            case(directory)
            dist.barrier()
            if dist.get_rank() == 0:
                print(f"{name}: passed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
