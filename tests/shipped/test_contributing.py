"""What a contributor is asked to run exists, and is the same everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_hooks_run_what_make_check_runs() -> None:
    """One hook for each line of `make check`, all local."""
    (recipe,) = re.findall(r"^check:.*\n((?:\t.+\n)+)", MAKEFILE, re.MULTILINE)
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    assert [hook["entry"] for hook in repository["hooks"]] == [
        line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()
    ]
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}


def test_the_guide_names_targets_and_files_that_exist() -> None:
    """Each `make` target, benchmark and link of CONTRIBUTING.md."""
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
    assert {"dev", "test", "check", "fmt"} <= set(re.findall(r"^\$ make ([a-z]+)", GUIDE, re.MULTILINE)) <= targets
    for module in re.findall(r"-m (benchmarks\.\w+)", GUIDE):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", GUIDE):
        assert (ROOT / link).is_file(), link
    for name in re.findall(r"-k (test_\w+)", GUIDE):
        assert any(f"def {name}(" in path.read_text() for path in (ROOT / "tests").rglob("test_*.py")), name


def test_the_decisions_are_all_listed() -> None:
    """Each record is in the index and in the navigation, and has the four parts."""
    folder = ROOT / "docs" / "pages" / "adr"
    index, navigation = (folder / "README.md").read_text(), (ROOT / "docs" / "mkdocs.yml").read_text()
    records = sorted(path.name for path in folder.glob("0*.md"))
    assert [int(name[:4]) for name in records] == list(range(1, len(records) + 1))
    for name in records:
        assert f"({name})" in index
        assert f"adr/{name}" in navigation
        parts = re.findall(r"^## (.+)$", (folder / name).read_text(), re.MULTILINE)
        assert parts == ["Context", "Decision", "Consequences", "Considered"], name
