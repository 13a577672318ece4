"""Tar archives as an attacker would write them: any names, any links, in any order."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Mode = Literal["w:", "w:gz", "w:bz2", "w:xz"]


@dataclass(frozen=True)
class Member:
    """One member. A name that ends in `/` is a directory; `kind` is a type of `tarfile` for the others."""

    name: str
    content: bytes = b""
    mode: int = 0o644
    symlink: str | None = None
    hardlink: str | None = None
    kind: bytes | None = None

    def info(self) -> tarfile.TarInfo:
        info = tarfile.TarInfo(self.name)
        info.mode, info.size = self.mode, len(self.content)
        if self.symlink is not None:
            info.type, info.linkname = tarfile.SYMTYPE, self.symlink
        elif self.hardlink is not None:
            info.type, info.linkname = tarfile.LNKTYPE, self.hardlink
        elif self.kind is not None:
            info.type = self.kind
        elif self.name.endswith("/"):
            info.type = tarfile.DIRTYPE
        return info


def pack(path: Path, *members: Member, mode: Mode = "w:") -> Path:
    """Write an archive of the members, unchecked."""
    with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            tar.addfile(member.info(), io.BytesIO(member.content))
    return path
