"""``--check`` finds a program that trains wrong, names the stage, and leaves no trace in the training that follows."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.ranks import Job, compiled, run_all
from tests.repeatable import also

CLEARING = """\
        for parameter in self._parameters:
            parameter.grad = None
        self._absent = list(self._parameters)
"""
ALONE = """\
        if self.group is None:
            return self
"""


@dataclass(frozen=True)
class Sabotage:
    """A change to what was generated, by which it trains wrong, and how the check names it."""

    scheme: str
    file: str
    right: str
    wrong: str
    said: tuple[str, ...]
    dtype: str = "float32"

    def inflict(self, directory: Path) -> None:
        script = directory / self.file
        text = script.read_text()
        assert text.count(self.right) == 1, f"{self.file} has changed"
        script.write_text(text.replace(self.right, self.wrong))


SABOTAGES = {
    "the gradients of the stage where they are small have the wrong sign": Sabotage(
        "dapple",
        "chimera_runtime/stage/gradient_sums.py",
        "        self._works = ()\n",
        "        self._works = ()\n        [flat.neg_() for flat in self._flats if self.name == 's0']\n",
        ("stage 0: gradients of update 1 differ by 2.00e+00, most in linear.weight",),
    ),
    "gradients are not cleared": Sabotage(
        "dapple",
        "chimera_runtime/stage/gradient_sums.py",
        CLEARING,
        "",
        ("stage 0: gradients of update 2 differ", "stage 1: gradients of update 2 differ"),
    ),
    "every update has the same data": Sabotage(
        "dapple",
        "chimera_runtime/data/micro_batch_source.py",
        "divmod(update, count // share.items)",
        "divmod(0, count // share.items)",
        ("stage 0: gradients of update 2 differ", "stage 1: gradients of update 2 differ"),
    ),
    "the replicas of a stage are not summed": Sabotage(
        "chimera",
        "chimera_runtime/stage/gradient_sums.py",
        ALONE,
        "        if self.group is None or self.name == 's0':\n            return self\n",
        ("replicas of stage 0: NOT bitwise equal; ranks that agree: 0 | 1", "stage 0: gradients of update 1 differ"),
    ),
    "the gradient of one replica is scaled": Sabotage(
        "chimera",
        "chimera_runtime/stage/gradient_sums.py",
        ALONE,
        ALONE + "        [flat.mul_(1.01) for flat in self._flats if (self.name, self.names.rank) == ('s1', 1)]\n",
        ("replicas of every stage: bitwise equal", "stage 1: gradients of update 1 differ by"),
    ),
    "operations read the oldest weights instead of their version": Sabotage(
        "pipedream",
        "chimera_runtime/stage/weight_versions.py",
        "tensors = self._alive[version]",
        "tensors = self._alive[min(self._alive)]",
        ("stage 0: gradients of update ",),
        "float64",
    ),
    "the optimizer steps twice": Sabotage(
        "dapple",
        "chimera_runtime/stage/weight_versions.py",
        "            self.weights.step()\n",
        "            self.weights.step()\n            self.number == 1 and self.weights.step()\n",
        ("stage 1 on rank 1: the optimizer has made 6 steps in 3 updates",),
    ),
    "one stage leaves a step out": Sabotage(
        "dapple",
        "chimera_runtime/stage/weight_versions.py",
        "            self.weights.step()\n",
        "            (self.number, self.updates) == (0, 1) or self.weights.step()\n",
        ("stage 0 on rank 0: the optimizer has made 2 steps in 3 updates",),
    ),
    "the last step is another one than the optimizer's": Sabotage(
        "dapple",
        "chimera_runtime/stage/weight_versions.py",
        "            self.weights.step()\n",
        "            self.weights.step()\n"
        "            (self.number, self.updates) == (1, 2) and self.module.linear.weight.data.mul_(1.001)\n",
        ("stage 1: weights after 3 updates differ by", "most in linear.weight"),
    ),
    "a gradient is there where one process has none": Sabotage(
        "dapple",
        "chimera_runtime/stage/weight_versions.py",
        "            self.weights.step()\n",
        "            self.module.unused.weight.grad = self.module.unused.weight.detach()\n"
        "            self.weights.step()\n",
        ("stage 0: gradients of update 1 differ by inf, most in unused.weight",),
    ),
    "a loss is not that of its update": Sabotage(
        "dapple",
        "chimera_runtime/stage/stage_output.py",
        "self._losses.pop(update, {}).values()",
        "self._losses.pop(2 - update, {}).values()",
        ("losses: max |difference| / mean |loss| = ",),
    ),
}


def test_the_check_finds_each_fault_and_names_the_stage(tmp_path: Path) -> None:
    dtypes = {"dapple": "float32", "chimera": "bfloat16", "pipedream": "float64"}
    sound = {scheme: compiled(tmp_path, scheme, D=2) for scheme in dtypes}
    listed = [
        Job(scheme, sound[scheme], model="scaled.py", environment={"DTYPE": dtype}) for scheme, dtype in dtypes.items()
    ]
    for name, sabotage in SABOTAGES.items():
        directory = tmp_path / name
        shutil.copytree(sound[sabotage.scheme], directory)
        sabotage.inflict(directory)
        listed.append(Job(name, directory, model="scaled.py", environment={"DTYPE": sabotage.dtype}))
    outcomes = run_all(tmp_path, 2, listed)
    for name, outcome in outcomes.items():
        if name not in SABOTAGES:
            outcome.assert_passed()
            assert "check: passed" in outcome.said[0], name
            continue
        assert "0" not in outcome.statuses, f"{name}: {outcome}"
        assert "train.py: check: FAILED\n" in outcome.said[0], f"{name}: {outcome}"
        for words in SABOTAGES[name].said:
            assert words in outcome.said[0], f"{name}: {outcome.said[0]}"


def losses(folder: Path, name: str) -> list[float]:
    numbers: list[float] = json.loads((folder / f"{name}.json").read_text())["loss"]
    return numbers


def test_training_after_a_check_is_bitwise_training_without_one(tmp_path: Path) -> None:
    """Weights, optimizer state, dropout, batch statistics and data; also where build_stage makes its modules once."""
    variants = {"dropout": ("zoo.py", {}), "made-once": ("vary.py", {"VARY": "made-once"})}
    listed = [
        Job(
            f"{scheme}-{variant}{check}",
            compiled(tmp_path, scheme, D=2),
            ("--steps", "4", "--metrics", str(tmp_path / f"{scheme}-{variant}{check}.json"), *check.split()),
            model,
            environment,
        )
        for scheme, variant in also(
            (("chimera", "dropout"), ("pipedream", "made-once")), (("chimera", "made-once"), ("pipedream", "dropout"))
        )
        for model, environment in [variants[variant]]
        for check in ("", " --check")
    ]
    for name, outcome in run_all(tmp_path, 2, listed).items():
        outcome.assert_passed()
        assert ("check: passed" in outcome.said[0]) == name.endswith("--check")
        assert losses(tmp_path, name) == losses(tmp_path, name.removesuffix(" --check"))
        assert len(set(losses(tmp_path, name))) == 4
