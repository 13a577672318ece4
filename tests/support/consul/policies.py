"""The ACL policies of the documentation, and tokens that have exactly these."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]


def documented_policy(name: str) -> str:
    """Return an ACL policy as the operating page shows it."""
    page = (ROOT / "docs" / "pages" / "operating.md").read_text()
    found = re.search(rf"```hcl\n# policy: {name}\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


def token_file(directory: Path, tokens: Mapping[str, str], name: str) -> dict[str, str]:
    """Write a token to a file, and return the environment that names it."""
    path = directory / f"{name}-token"
    path.write_text(tokens[name])
    return {"CONSUL_HTTP_TOKEN_FILE": str(path)}
