"""The checkout itself: folders, modules, and the commands that its texts promise."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import pytest
from jaxtyping import TypeCheckError

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("lm", "data", "kernels")
FOLDERS = {*PACKAGES, "conf", "tests", "docs", "scripts", "slurm", "requirements"}
MADE_HERE = {"runs", "wandb", "__pycache__"}
TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")

SOURCES = sorted(
    [*ROOT.glob("*.py")]
    + [p for name in (*PACKAGES, "scripts") for p in ROOT.glob(f"{name}/**/*.py")]
)
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    .removesuffix(".__init__")
    .removesuffix(".__main__")
    for path in SOURCES
    if path.parent.name != "scripts"
)
# Where somebody's files lie on their machine; nothing here may depend on it.
MACHINE_PATH = re.compile(r"/(home|Users|root|work|opt|mnt)/\w|[A-Z]:\\\w")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def own_files() -> list[Path]:
    """All files of the project except licence and binary fixtures."""
    folders = [ROOT / name for name in (*sorted(FOLDERS), ".ci")]
    # .git is a file in a worktree, and names another folder.
    files = [p for p in ROOT.iterdir() if p.is_file() and p.name != ".git"]
    files += [p for folder in folders for p in folder.rglob("*") if p.is_file()]
    kinds = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".sh", ".sbatch", ""}
    return [p for p in files if p.suffix in kinds and "fixtures" not in p.parts]


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    lines = re.findall(r"^([a-z][a-z -]*):(?!=)", text, re.MULTILINE)
    return {target for line in lines for target in line.split()}


def code_of(text: str) -> str:
    """The parts of a Markdown text that are set as code."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))


def test_folders_are_those_of_the_plan():
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")}
    assert folders - MADE_HERE <= FOLDERS
    assert {*PACKAGES, "conf", "tests", "requirements"} <= folders


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text())), "the module has no docstring"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_can_be_imported_and_does_nothing(module, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    importlib.import_module(module)
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir()), "importing wrote a file"


def test_file_names_of_tests_are_unique():
    names = [p.name for p in ROOT.glob("tests/**/test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_nothing_names_a_path_of_one_machine():
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in own_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found


@pytest.mark.parametrize("text", TEXTS)
def test_commands_in_texts_exist(text):
    code = code_of((ROOT / text).read_text())
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", code))
    assert named <= make_targets()
    scripts = set(re.findall(r"\bpython (\w[\w/]*\.py)", code))
    assert scripts <= {name_of(path) for path in SOURCES}
    modules = set(re.findall(r"\bpython -m ((?:lm|data|kernels)[\w.]*)", code))
    assert modules <= set(MODULES)


def test_commands_of_the_makefile_exist():
    text = (ROOT / "Makefile").read_text()
    modules = set(re.findall(r"-m ((?:lm|data|kernels)[\w.]*)", text))
    scripts = set(re.findall(r"\$\(RUN\) (\S+\.py)", text))
    assert modules and scripts
    assert modules <= set(MODULES)
    assert scripts <= {name_of(path) for path in SOURCES}
    assert {"setup", "demo", "test", "test-slow", "test-faults", "lint", "bench", "clean"} <= (
        make_targets()
    )


def test_ci_runs_tests_and_checks_in_a_new_environment():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    lines = script.read_text().splitlines()
    assert lines.index("rm -rf .venv") < lines.index("make test") < lines.index("make lint")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_what_runs_make_is_ignored_by_git():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    made = [".venv/bin/python", "runs/demo/x", "lm/__pycache__/x.pyc", ".pytest_cache/x"]
    ignored = subprocess.run(
        ["git", "check-ignore", *made], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ignored.stdout.splitlines() == made


def test_types_are_checked_while_testing():
    from lm.model.positions import sinusoidal_table

    with pytest.raises(TypeCheckError):
        sinusoidal_table("3", 4)  # type: ignore[arg-type]


def test_the_network_is_out_of_reach():
    with pytest.raises(OSError, match="tests have no network"):
        socket.create_connection(("nowhere.invalid", 443), timeout=5)
    refused = pytest.raises(ConnectionRefusedError, match="tests have no network")
    with socket.socket() as connection, refused:
        connection.connect(("192.0.2.1", 443))
