"""Each mistake of a profile or a cluster file and its message: ``profiles/<mistake>.toml`` beside its ``.err``.

A file may say in its first lines what a schedule wants of it: ``#: wanted stages=8 workers=8 copies=1 size=8``, with
groups of stages ``groups=image:1,text:7``; the other file is then one without mistakes, with ``#: work`` a profile that
counts work.
"""

import re
from pathlib import Path

import pytest

from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.diagnostics.render import render_all
from chimera_ir.ir.graph import NamedStages
from chimera_ir.ir.ops import Stage
from chimera_ir.profile.choose import Unfit, Wanted, read_both
from chimera_ir.profile.document import MAX_LINE, MAX_TEXT
from chimera_ir.profile.read import read_cluster, read_profile
from chimera_ir.source import Source
from tests.errors.goldens import compare, inputs, read

PROFILES = Path(__file__).parent / "profiles"
MISTAKES = inputs(PROFILES, "*.toml")
NOT_IN_A_FILE = {"FileTooLarge", "LineTooLong", "NestedTooDeeply"}
"""Tested below: a golden pair of a million characters would teach nobody anything."""

PROFILE = """
[model]
name = "m"
[[depth]]
stages = 2
stage = [
  { weights = "1 MB", at = [{ micro_batch_size = 8, forward = "1 ms", activations = "1 MB", output = "1 MB" }] },
  { weights = "1 MB", at = [{ micro_batch_size = 8, forward = "1 ms", activations = "1 MB" }] },
]
"""
CLUSTER = """
[cluster]
name = "c"
workers = 64
memory = "16 GB"
[links.between]
latency = "0 s"
bandwidth = "unlimited"
"""


def diagnostics(source: Source) -> tuple[Diagnostic, ...]:
    try:
        wanted = re.search(
            r"^#: wanted stages=(\d+) workers=(\d+) copies=(\d+) size=(\d+)( moves)?(?: groups=(.+))?$",
            source.text,
            re.M,
        )
        if wanted:
            inputs = read_both(*_both(source))
            named, start = list[NamedStages](), 0
            for name, _, stages in (group.partition(":") for group in (wanted[6] or "").split(",") if group):
                named.append(NamedStages(name, Stage(start), Stage(start + int(stages))))
                start = named[-1].stop
            inputs.choose(Wanted(*map(int, wanted.groups()[:4]), moves=bool(wanted[5]), named=tuple(named)))
        elif source.name.endswith(".cluster.toml"):
            read_cluster(source)
        else:
            read_profile(source)
    except Rejected as rejected:
        return rejected.diagnostics
    except Unfit as unfit:
        ((found, told),) = unfit.texts
        assert found is source
        return told
    return ()


def _both(source: Source) -> tuple[Source, Source]:
    if source.name.endswith(".profile.toml"):
        return source, Source("c.cluster.toml", CLUSTER)
    counted = PROFILE.replace("ms", "MFLOP") if "#: work" in source.text else PROFILE
    return Source("m.profile.toml", counted), source


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_a_mistake_gets_its_message(path: Path, update_goldens: bool) -> None:
    source = read(path)
    compare(path, diagnostics(source), source, update_goldens)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#" * MAX_TEXT + "\n#", "has more than 4,194,304 characters"),
        (".".join("a" * MAX_LINE) + " = 1", "has a line of over 10,000 characters"),
        ("a = " + "[" * 5000, "is nested too deeply"),
    ],
)
def test_a_text_that_is_too_large_is_rejected(text: str, words: str) -> None:
    source = Source("large.toml", text)
    with pytest.raises(Rejected) as rejected:
        read_profile(source)
    said = render_all(rejected.value.diagnostics, source)
    assert said.startswith("error[CH703]: the file " + words)


@pytest.mark.parametrize(
    ("number", "said"),
    [("9" * 5000, "error[CH701]: this is not TOML: exceeds the limit"), (f"0x{'f' * 9000}", "error[CH709]: ")],
)
def test_a_number_of_thousands_of_digits_is_rejected_at_its_place(number: str, said: str) -> None:
    source = Source("long.toml", PROFILE.replace('"1 ms"', number, 1))
    with pytest.raises(Rejected) as rejected:
        read_profile(source)
    text = render_all(rejected.value.diagnostics, source)
    assert text.startswith(said)
    assert f"--> long.toml:{source.position(source.text.index(number)).line}:" in text


def test_errors_of_both_files_are_told_together() -> None:
    with pytest.raises(Unfit) as unfit:
        read_both(Source("a", PROFILE.replace('"1 ms"', "1", 1)), Source("b", CLUSTER.replace("64", "-64")))
    assert [(source.name, [each.code for each in found]) for source, found in unfit.value.texts] == [
        ("a", ["CH707"]),
        ("b", ["CH710"]),
    ]
