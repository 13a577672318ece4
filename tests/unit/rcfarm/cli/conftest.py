"""Fixtures for tests of the command line."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.programs.cli import CommandLine, command_line


@pytest.fixture
async def cli() -> AsyncIterator[CommandLine]:
    """A command line on a fresh embedded store, under the root `fleet`."""
    async with command_line() as line:
        yield line
