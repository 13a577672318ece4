"""What checks of the documentation share."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.support.modules import load_module

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="session")
def hooks() -> ModuleType:
    """docs/hooks.py, loaded as mkdocs does. Tests are skipped without the extra `docs`."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; install the extra `docs`")
    return load_module(DOCS / "hooks.py", "rcfarm_docs_hooks")
