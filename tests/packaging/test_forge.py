"""The files of the hosting service are valid, and the commands, files and names in them exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

if "SHMLOAD_INSTALLED" in os.environ:
    pytest.skip("an installed package is being tested", allow_module_level=True)

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOXFILE = (ROOT / "noxfile.py").read_text()
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": FORMS,
    "github-issue-config": [ROOT / ".github/ISSUE_TEMPLATE/config.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}
TOOLS = {"python", "bash", "git", "gh", "nox", "ruff", "mypy", "mkdocs", "mike"}  # commands with which a step may begin


def loaded(path: Path) -> Any:
    return yaml.load(path.read_text(), Loader=yaml.BaseLoader)  # as plain text, because `on` is not a boolean here


def jobs() -> list[tuple[str, str, dict[str, Any]]]:
    return [(path.name, name, job) for path in WORKFLOWS for name, job in loaded(path)["jobs"].items()]


def steps() -> list[dict[str, Any]]:
    return [step for _, _, job in jobs() for step in job.get("steps", [])]


def commands() -> list[list[str]]:
    """Returns the words of every line that a step runs, without expressions and without redirections."""
    lines = [line for step in steps() for line in step.get("run", "").splitlines()]
    return [shlex.split(re.sub(r"\$\{\{.*?\}\}", "X", line.split(" >")[0])) for line in lines]


@pytest.mark.slow(reason="each schema is compiled in a process of its own")
@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_match_the_schemas_of_the_service(schema: str) -> None:
    assert SCHEMAS[schema]
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *SCHEMAS[schema]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout


def test_commands_in_steps_exist() -> None:
    assert {words[0] for words in commands()} <= TOOLS
    ours = [
        word
        for words in commands()
        for word in words
        if re.match(r"\.?\w+/|\./", word) and not word.startswith(("dist/", "artifacts/"))
    ]
    assert len(ours) >= 2
    assert [word for word in ours if not (ROOT / word).exists()] == []
    named = {extra for words in commands() for word in words for extra in re.findall(r"\.\[(\w+)\]", word)}
    assert named
    assert named <= set(PROJECT["optional-dependencies"])


def test_nox_sessions_in_steps_exist() -> None:
    assert {words[words.index("-s") + 1] for words in commands() if words[0] == "nox"} == {"tests(torch-X-pyX)"}
    assert "def tests(session: " in NOXFILE


def test_called_workflows_are_callable() -> None:
    called = [(job["uses"], set(job.get("with", ()))) for _, _, job in jobs() if "uses" in job]
    assert called
    for path, given in called:
        on = loaded(ROOT / path)["on"]
        assert "workflow_call" in on
        assert given == set((on["workflow_call"] or {}).get("inputs", ())), path


def test_workflows_have_minimal_permissions() -> None:
    for path in WORKFLOWS:
        workflow = loaded(path)
        assert workflow["permissions"] == {"contents": "read"}, path
        assert set(workflow["concurrency"]) == {"group", "cancel-in-progress"}, path
    more = {(file, name): job["permissions"] for file, name, job in jobs() if "permissions" in job}
    assert more == {
        ("docs.yml", "publish"): {"contents": "write"},
        ("release.yml", "docs"): {"contents": "write"},
        ("release.yml", "forge"): {"contents": "write"},
        ("release.yml", "pypi"): {"id-token": "write"},
    }


def test_every_action_is_pinned_and_every_job_ends() -> None:
    used = {step["uses"] for step in steps() if "uses" in step}
    assert {each for each in used if not re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", each)} == set()
    assert [name for _, name, job in jobs() if "uses" not in job and "timeout-minutes" not in job] == []


def test_downloaded_artifacts_are_uploaded() -> None:
    made = [step["with"]["name"] for step in steps() if "upload-artifact" in step.get("uses", "")]
    assert {name.split("-")[0] for name in made} == {"archives", "notes"}
    assert len(set(made)) == len(made)


def test_version_pairs_equal_noxs_and_pythons_equal_the_wheels() -> None:
    tried = re.findall(r'^    \("([\d.]+t?)", "([\d.]+)", "[\d.]+"\),', NOXFILE, re.MULTILINE)
    rows = loaded(ROOT / ".github/workflows/tests.yml")["jobs"]["matrix"]["strategy"]["matrix"]["include"]
    assert [(row["python"], row["torch"]) for row in rows if "runner" not in row] == tried
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["build"]
    assert [f"cp{python.replace('.', '')}-*" for python in dict(tried)] == built
    assert f">={tried[0][0]}" == PROJECT["requires-python"]
    assert {f"Programming Language :: Python :: {python.rstrip('t')}" for python in dict(tried)} <= set(PROJECT["classifiers"])


def test_bug_report_asks_for_existing_commands() -> None:
    asked = {part["id"]: part for part in loaded(ROOT / ".github/ISSUE_TEMPLATE/bug.yml")["body"] if "id" in part}
    assert "`shmload doctor`" in asked["doctor"]["attributes"]["label"]
    assert (ROOT / "shmload/cli/doctor_command.py").exists()
    assert asked["doctor"]["validations"]["required"] == "true"


def test_citation_and_addresses_equal_the_projects() -> None:
    citation = loaded(ROOT / "CITATION.cff")
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]


@pytest.mark.parametrize(
    ("tag", "heading", "message"),
    [
        ("v{version}", "{version} (2026-11-23)", ""),
        ("v{version}", "{version} (unreleased)", "a release has a date"),
        ("v9.9.9", "{version} (2026-11-23)", "versions differ"),
        ("v{version}", "9.9.9 (2026-11-23)", "versions differ"),
    ],
)
def test_release_has_a_single_version(tmp_path: Path, tag: str, heading: str, message: str) -> None:
    version = PROJECT["version"]
    for name in (".ci/release", "pyproject.toml", "shmload/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    changes = f"# Changelog\n\n## {heading.format(version=version)}\n\n* new\n\n## 0.0.1 (2020-01-01)\n\n* old\n"
    (tmp_path / "CHANGELOG.md").write_text(changes)
    command = [sys.executable, tmp_path / ".ci/release", tag.format(version=version), tmp_path / "notes.md"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if message:
        assert done.returncode == 1
        assert message in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, f"version={version}\n")
        assert (tmp_path / "notes.md").read_text() == "* new\n"
