"""The form of logged decisions: what is written of one, how it shrinks, and how it is restored.

A decision is a pair: the input of the planner, and its plan. Its *canonical bytes* are the MessagePack of both with
every mapping and set sorted, so equal decisions are equal bytes. They are encoded by the fields of the planner's own
types: a field that is added with a default leaves old logs readable.

The part `eligibility` is large and the same for many decisions, so it is stored once, under its digest. It and the rest
of a large decision are stored as a *patch* on a former one: what differs, field by field, key by key. Patches are made
of the planner's objects, because comparing these is quick, and applied to plain data, so that they can be read whatever
the types look like by then. The id of a decision is a digest of what is written of it: its canonical bytes, or the
patch with the id that it applies to; so an id answers for the whole chain.

A log is a folder of segments, which are read and removed alone: no patch refers to another segment. A segment is a line
that names the format, then frames: length, checksum, and compressed entries. The first frame begins with a `Header`;
its content is the dictionary with which all later ones are compressed, as their entries resemble it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import Any

import msgspec

from rcfarm.farm.planner import PlanInput

MAGIC = b"rcfarm decisions 2\n"
SUFFIX = ".decisions"
FRAME = struct.Struct(">II")  # length and checksum of the compressed entries
DICTIONARY = 32 * 1024  # bytes: zlib looks back no further
PATCHED_FROM = 4096  # bytes: smaller parts compress well enough
LONGEST_WHOLE = 16  # items of a sequence that is written whole

canonical = msgspec.msgpack.Encoder(order="deterministic").encode
plain = msgspec.msgpack.Encoder().encode  # of what was decoded: it has its order already


class Header(msgspec.Struct, tag="log", array_like=True, frozen=True):
    """The origin of a segment's decisions, and the names of the inputs, in the order in which they are written."""

    farm: str
    version: str
    inputs: tuple[str, ...]


class Nodes(msgspec.Struct, tag="nodes", array_like=True, frozen=True, gc=False):
    """An eligibility. `base`: the digest of the one that `content` is a patch of; "": `content` is the whole."""

    digest: str
    base: str
    content: msgspec.Raw


class Entry(msgspec.Struct, tag="rc", array_like=True, gc=False):
    """One decision. `at`: Unix seconds. `nodes`: the digest of its eligibility. `index`: of the transaction that wrote
    it, 0: nothing was written. `base`: the id of the decision that `content` is a patch of; "": `content` is the whole.
    """

    id: str
    at: float
    rc: str
    nodes: str
    index: int
    base: str
    content: msgspec.Raw


entries_decoder = msgspec.msgpack.Decoder(list[Header | Nodes | Entry])


APART = "eligibility"  # of the input, stored apart
INPUTS = tuple(one.name for one in dataclasses.fields(PlanInput) if one.name != APART)
inputs_of: Callable[[PlanInput], tuple[Any, ...]] = attrgetter(*INPUTS)


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def id_of(nodes: str, base: str, content: bytes) -> str:
    """Return a decision's id. `nodes`: the digest of its eligibility; `base`: see `Entry`."""
    return digest_of(nodes.encode() + base.encode() + content)


def frame(entries: Sequence[Header | Nodes | Entry], dictionary: bytes) -> tuple[bytes, bytes]:
    """Return a frame, and its content."""
    content = msgspec.msgpack.encode(entries)
    packer = zlib.compressobj(1, zdict=dictionary) if dictionary else zlib.compressobj(1)
    packed = packer.compress(content) + packer.flush()
    return FRAME.pack(len(packed), zlib.crc32(packed)) + packed, content


def unpacked(packed: bytes, dictionary: bytes) -> bytes:
    """Return a frame's content. Raises `zlib.error`."""
    unpacker = zlib.decompressobj(zdict=dictionary) if dictionary else zlib.decompressobj()
    return unpacker.decompress(packed) + unpacker.flush()


def patch(old: Any, new: Any) -> list[Any] | None:
    """Return what makes `new` of `old`, None if they are equal; `patched` applies it to their plain data."""
    if old is new or old == new:
        return None
    if type(old) is type(new) and (names := _fields(new)):
        if isinstance(new, tuple):  # a NamedTuple, which is a list in plain data
            return patch_of_items(old, new)
        parts = {name: part for name in names if (part := patch(getattr(old, name), getattr(new, name))) is not None}
        return ["fields", parts]
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        removed = sorted(old.keys() - new.keys())
        changed = {key: value for key, value in new.items() if key not in old or old[key] != value}
        return ["keys", changed, removed]
    if isinstance(old, AbstractSet) and isinstance(new, AbstractSet):
        return ["set", sorted(old - new), sorted(new - old)]
    if _is_long(old) and _is_long(new):
        return _resequenced(old, new)
    return ["whole", new]


def patch_of_items(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    """Return the patch of a thing with as many items."""
    changes = ((str(number), patch(*pair)) for number, pair in enumerate(zip(old, new, strict=True)))
    return ["items", {number: change for number, change in changes if change is not None}]


def patched(old: Any, change: list[Any] | None) -> Any:
    """Apply what `patch` has returned to plain data."""
    if change is None:
        return old
    kind, *parts = change
    if kind == "whole":
        return parts[0]
    if kind == "set":
        return sorted(set(old).difference(parts[0]).union(parts[1]))
    if kind == "sequence":
        gone = set(parts[0])
        found = [item for item in old if item not in gone]
        for position, item in parts[1]:
            found.insert(position, item)
        return found
    if kind == "items":
        return [patched(item, parts[0].get(str(number))) for number, item in enumerate(old)]
    if kind == "fields":
        return {name: patched(value, parts[0].get(name)) for name, value in old.items()}
    changed, removed = parts
    gone = set(removed)
    kept = {key: value for key, value in old.items() if key not in gone}
    return dict(sorted((kept | changed).items()))


def _fields(thing: Any) -> tuple[str, ...]:
    """Return the names of the fields of a struct, a NamedTuple or a dataclass, () for anything else."""
    if isinstance(thing, msgspec.Struct):
        return thing.__struct_fields__
    if isinstance(thing, tuple):
        return getattr(thing, "_fields", ())
    return tuple(getattr(thing, "__dataclass_fields__", ()))


def _is_long(thing: Any) -> bool:
    return isinstance(thing, list | tuple) and len(thing) > LONGEST_WHOLE and isinstance(thing[0], str)


def _resequenced(old: Sequence[str], new: Sequence[str]) -> list[Any]:
    """Return the patch of a sequence of which items left and came; the whole if others changed their places."""
    before, after = set(old), set(new)
    stays = [item for item in old if item in after]
    if len(before) != len(old) or len(after) != len(new) or stays != [item for item in new if item in before]:
        return ["whole", new]
    came = [(position, item) for position, item in enumerate(new) if item not in before]
    return ["sequence", [item for item in old if item not in after], came]
