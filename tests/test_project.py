"""The files that people and programs look for at the top of a repository."""

import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import chimera_ir
from tests.test_architecture import ROOT

FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_a_citation_names_this_version_and_the_paper() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == chimera_ir.__version__
    assert citation["license"] == "Apache-2.0"
    assert [reference["doi"] for reference in citation["references"]] == ["10.1145/3458817.3476145"]


def test_the_changelog_begins_with_what_is_not_released_and_has_this_version() -> None:
    versions = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert chimera_ir.__version__ in versions


@pytest.mark.parametrize("name", ["bug.yml", "idea.yml"])
def test_a_form_for_issues_has_fields_of_names_of_their_own(name: str) -> None:
    form = read(FORMS / name)
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len({*ids})
    assert all(field["attributes"]["label"] for field in form["body"])


def test_a_report_of_a_bug_asks_for_the_bug_report_file() -> None:
    (field,) = (field for field in read(FORMS / "bug.yml")["body"] if field["id"] == "bundle")
    assert "--bundle" in field["attributes"]["description"]
    assert field["validations"] == {"required": True}
    assert "--bundle" in (ROOT / ".github" / "pull_request_template.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["chimera_ir", "chimera_runtime"])
def test_both_packages_are_marked_as_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_what_installs_looks_for_packages_where_pip_does() -> None:
    settings = """\
:env:.find-links='/wheels'
:env:.timeout='180'
global.constraint='/etc/pip/constraints.txt'
global.extra-index-url='\\nhttps://a.example/simple\\nhttps://b.example/simple'
global.find-links='/elsewhere'
"""
    assert runpy.run_path(str(ROOT / ".ci" / "install.py"))["for_uv"](settings) == {
        "UV_CONSTRAINT": "/etc/pip/constraints.txt",
        "UV_EXTRA_INDEX_URL": "https://a.example/simple https://b.example/simple",
        "UV_FIND_LINKS": "/wheels",
    }


def a_python(folder: Path, optimised: bool, version: tuple[int, int] = (3, 11)) -> Path:
    """A program that says of itself what such a Python says."""
    folder.mkdir()
    python = folder / "python3"
    python.write_text(f"#!/bin/sh\necho '{json.dumps([[*version, True], optimised])}'\n")
    python.chmod(0o755)
    return python


def test_of_the_interpreters_on_the_path_an_optimised_one_of_the_same_version_is_taken(tmp_path: Path) -> None:
    module = runpy.run_path(str(ROOT / ".ci" / "interpreter.py"))
    plain, optimised = a_python(tmp_path / "plain", False), a_python(tmp_path / "optimised", True)
    other, second = a_python(tmp_path / "other", True, (3, 12)), a_python(tmp_path / "second", True)
    broken = tmp_path / "broken" / "python3"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)

    def preferred(*pythons: Path) -> str:
        path = os.pathsep.join(str(python.parent) for python in pythons)
        return str(module["preferred"](module["on_path"](path)).path)

    assert preferred(plain, other, optimised, second) == str(optimised)
    assert preferred(optimised, second) == str(optimised)
    assert preferred(plain, other) == str(plain)
    assert preferred(broken, plain, broken) == str(plain)


def test_an_interpreter_says_what_it_is(tmp_path: Path) -> None:
    module = runpy.run_path(str(ROOT / ".ci" / "interpreter.py"))
    (tmp_path / "python3").symlink_to(sys.executable)
    (interpreter,) = module["on_path"](str(tmp_path))
    assert interpreter.kind[:2] == [*sys.version_info[:2]]
