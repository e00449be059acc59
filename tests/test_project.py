"""The files that people and programs look for at the top of a repository."""

import re
import runpy
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
