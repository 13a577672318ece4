"""Tar archives as an attacker would write them: any names, any links, in any order."""

from __future__ import annotations

import gzip
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


def header(name: str, size: int, kind: bytes) -> bytes:
    """Write one header block with any content."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\x80" + size.to_bytes(11, "big")  # the size in base 256
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * 32 + sum(block[156:512]))
    return bytes(block)


def extended(path: Path, content: bytes, kind: bytes = tarfile.XHDTYPE, size: int | None = None) -> Path:
    """Write a compressed archive that begins with an extended header of that content, then has one file."""
    padding = bytes(-len(content) % 512)
    file = tarfile.TarInfo("file").tobuf(tarfile.GNU_FORMAT)
    with gzip.open(path, "wb") as packed:
        packed.write(header("header", len(content) if size is None else size, kind))
        packed.write(content + padding + file + bytes(1024))
    return path


def hostile(directory: Path) -> dict[str, tuple[Path, str]]:
    """Return archives that once stopped, filled or froze an agent, with words of the reason of each refusal."""
    names = ["/".join("d" * depth) for depth in range(1, 1501)]
    record = b"path=" + b"a/" * 20_000 + b"\n"
    made = {
        "deep": (pack(directory / "deep", *(Member(f"{name}/") for name in names), mode="w:gz"), "64 levels at most"),
        "long-name": (extended(directory / "long", b"40010 " + record), "64 levels at most"),
        "slow-header": (extended(directory / "slow", b"1" * 200_000), "an extended header of 200000 bytes"),
        "huge-size": (extended(directory / "huge", b"", size=2**62), "an extended header of"),
    }
    for name, kind in {"l": tarfile.GNUTYPE_LONGNAME, "x": tarfile.XHDTYPE, "g": tarfile.XGLTYPE}.items():
        bomb = extended(directory / f"bomb-{name}", bytes(300 * 1024 * 1024), kind)
        made[f"bomb-{name}"] = (bomb, "an extended header of 314572800 bytes")
    return made
