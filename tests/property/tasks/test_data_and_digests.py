"""References never lead out of a directory, literals come back, and digests see content alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from controllers.tasks.api.data import Blob
from controllers.tasks.io.data import BadReference, DataError, open_data
from controllers.tasks.io.literals import BadLiteral, decode_literals, digest_of, encode_literals
from store.redaction import REDACTED, Redactor

PARTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["..", ".", "", "in", "link", "file", "%2e%2e", "..\\", "a\0b", "~", "*", "folder", "C:", "//"]
        ),
        st.text(max_size=6),
    ),
    min_size=1,
    max_size=5,
)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


@settings(max_examples=150)
@given(parts=PARTS, prefix=st.sampled_from(["{base}/", "{base}", "file:///", "", "{base}/../", "{base}/in/../../"]))
def test_no_reference_leads_out_of_the_directory(parts: list[str], prefix: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        outside, root = Path(name, "outside"), Path(name, "data")
        (outside / "in").mkdir(parents=True)
        (outside / "file").write_bytes(b"SHIBBOLETH")
        (root / "in").mkdir(parents=True)
        (root / "link").symlink_to(outside)
        (root / "in" / "link").symlink_to("../../outside")
        (root / "file").symlink_to(outside / "file")
        before = snapshot(outside)
        data = open_data(str(root))
        reference = prefix.format(base=data.base) + "/".join(parts)

        async def attempt() -> None:
            for call in (data.read(reference), data.write(reference, b"changed"), data.delete(reference)):
                with contextlib.suppress(DataError):
                    assert b"SHIBBOLETH" not in (await call or b"")
            try:
                built = data.construct_reference(data.base, *parts)
            except BadReference:
                return
            assert ".." not in built.removeprefix(data.base).split("/")

        asyncio.run(attempt())
        data.close()
        assert snapshot(outside) == before
        assert {path.name for path in Path(name).iterdir()} == {"outside", "data"}


MOMENTS = st.datetimes(min_value=datetime(1, 1, 2), max_value=datetime(9999, 12, 30), timezones=st.just(UTC))
LITERALS: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(codec="utf-8"), max_size=8), MOMENTS,
        st.timedeltas(min_value=timedelta(days=-(10**4)), max_value=timedelta(days=10**4)),
        st.builds(Blob, uri=st.text(st.characters(codec="utf-8"), max_size=8), hash=st.sampled_from(["", "h", "i"])),
    ),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["a", "b", "c", "literal"]), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
VALUES = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), LITERALS, max_size=4)


def shuffled(value: Any, rng: random.Random) -> Any:
    """Return an equal value whose mappings have another order."""
    if isinstance(value, dict):
        items = [(name, shuffled(each, rng)) for name, each in value.items()]
        rng.shuffle(items)
        return dict(items)
    return [shuffled(each, rng) for each in value] if isinstance(value, list) else value


@given(VALUES)
def test_literals_come_back(values: dict[str, Any]) -> None:
    assert decode_literals(encode_literals(values)) == values


@given(VALUES, st.randoms(use_true_random=False))
def test_the_order_of_names_is_no_part_of_a_digest(values: dict[str, Any], rng: random.Random) -> None:
    again = shuffled(values, rng)
    assert digest_of(again) == digest_of(values)
    assert encode_literals(again) == encode_literals(values)


@given(VALUES, VALUES)
def test_other_content_is_another_digest(one: dict[str, Any], other: dict[str, Any]) -> None:
    def by_hash(value: Any) -> Any:
        if isinstance(value, Blob):
            return ("hash", value.hash) if value.hash else ("uri", value.uri)
        if isinstance(value, dict):
            return {name: by_hash(each) for name, each in value.items()}
        return [by_hash(each) for each in value] if isinstance(value, list) else (type(value), str(value))

    assert (digest_of(one) == digest_of(other)) == (by_hash(one) == by_hash(other))


@given(st.binary(max_size=60) | st.text(max_size=60))
def test_any_document_is_read_or_refused(document: bytes | str) -> None:
    with contextlib.suppress(BadLiteral):
        decode_literals(document)


@given(st.lists(st.text(min_size=4, max_size=12), min_size=1, max_size=4), st.text(max_size=20))
def test_no_secret_stays_in_a_text(values: list[str], text: str) -> None:
    redactor = Redactor()
    for value in values:
        redactor.remember(value)
    for value in values:
        cleaned = redactor.text(f"{text}{value}{text}")
        assert value in REDACTED or len(value.strip()) < 4 or value not in cleaned.replace(REDACTED, "\0")
