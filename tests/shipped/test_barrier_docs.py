"""The barrier's page matches its behaviour."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from controllers.framework.api.wire import decode_framework
from controllers.framework.barrier import barrier
from controllers.framework.barrier.barrier import Exit
from store.kube.api.objects import Object

PAGE = (Path(__file__).parents[2] / "docs" / "pages" / "barrier.md").read_text()


def example(kind: str) -> Object:
    """Return the example of that kind on the page."""
    documents = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    return next(document for document in documents if document["kind"] == kind)


def test_the_example_is_a_good_framework() -> None:
    """The example can be copied: it is valid, and each of its roles has the barrier."""
    framework = decode_framework(example("Framework"))
    assert not framework.problems
    for role in framework.spec.task_roles:
        spec = role.task.pod["spec"]
        assert spec["restartPolicy"] == "Never"
        assert spec["initContainers"][0]["command"][0] == barrier.COMPONENT_NAME


@pytest.mark.parametrize("code", list(Exit))
def test_every_exit_code_is_explained(code: Exit) -> None:
    """The table has a line for each exit code."""
    assert re.search(rf"^\| {code.value} \|", PAGE, re.MULTILINE)


def test_bounds_are_the_real_ones() -> None:
    """Defaults and bounds of the environment variables are those of the code."""
    assert f"`BARRIER_CHECK_TIMEOUT_SEC` | {barrier.DEFAULT_TIMEOUT_SEC} |" in PAGE
    assert f"{barrier.MIN_TIMEOUT_SEC} to {barrier.MAX_TIMEOUT_SEC} seconds" in PAGE
    assert f"`BARRIER_CHECK_INTERVAL_SEC` | {barrier.DEFAULT_INTERVAL_SEC} | at least 5" in PAGE
