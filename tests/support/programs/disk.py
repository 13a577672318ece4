"""A small file system, for tests of what happens when the disk is full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_file_system(mount_point: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of that size, as mount(8) takes it, at a new directory; skip the test where this is impossible."""
    mount_point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount_point)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs root and the permission to mount a tmpfs")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "-l", mount_point], check=True)
