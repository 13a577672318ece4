"""Properties of all decoders of foreign input: one bad text is one error of one kind, and costs little."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.decoding import (
    CUT,
    MAX_DEPTH,
    Undecodable,
    cut_below,
    is_deep,
    load_yaml,
    plain_yaml_documents,
    yaml_documents,
)
from tests.fuzz_records import fuzz
from tests.support.decoders import DECODERS, Decoder
from tests.support.hostile import FRAGMENTS, explosive_yaml, mutations, nested, slow_yaml

BLOCKED = 0.2  # seconds of processor time: five times the real limit, for slow test machines
each_decoder = pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS.keys())


@pytest.fixture(scope="module", autouse=True)
def _no_collections() -> Iterator[None]:
    """Keep garbage collections, which are due to earlier tests, out of the measurement."""
    gc.disable()
    yield
    gc.enable()


@each_decoder
@settings(max_examples=150)
@given(raw=st.binary(max_size=300) | st.text(max_size=200).map(lambda text: text.encode(errors="replace")))
def test_no_bytes_raise_anything_but_the_decoders_own_error(decoder: Decoder, raw: bytes) -> None:
    """Arbitrary bytes and arbitrary text raise nothing else."""
    with contextlib.suppress(*decoder.errors):
        decoder.read(raw)


@each_decoder
def test_good_texts_are_read(decoder: Decoder) -> None:
    """Good texts are read; otherwise their mutations would prove nothing."""
    for seed in decoder.seeds:
        decoder.read(seed)


@each_decoder
def test_no_damaged_text_raises_anything_else(decoder: Decoder) -> None:
    """Nesting, huge numbers, broken UTF-8 and similar, alone and in the place of any value of a good text."""
    texts = (*FRAGMENTS, *mutations(random.Random(1), decoder.seeds, 1500 if decoder.seconds < 1 else 200))
    figures, culprit = fuzz("", decoder, texts)
    assert culprit is None, (figures, culprit[:400])


@each_decoder
def test_no_text_of_256_kib_holds_up_the_loop(decoder: Decoder) -> None:
    """Texts that take YAML's parser, merge keys or base-60 numbers seconds, or grow without bound."""
    for text in slow_yaml():
        began = time.thread_time()
        with contextlib.suppress(*decoder.errors):
            decoder.read(text)
        assert time.thread_time() - began < decoder.seconds, text[:40]


@pytest.mark.parametrize("text", list(slow_yaml()), ids=lambda text: str(text[:12]))
def test_no_yaml_takes_long(text: bytes) -> None:
    """Any YAML is read or refused within the time of about a thousand values."""
    began = time.thread_time()
    with contextlib.suppress(Undecodable):
        load_yaml(text)
    assert time.thread_time() - began < BLOCKED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (explosive_yaml(), "more than 5000 values with aliases written out"),
        (b"a: &a [*a]", r"line 1: the alias \*a refers to itself"),
        (b"a: *nowhere", r"line 1: the alias \*nowhere refers"),
        (b"a: 1\nb: 2\na: 3", "line 3: the field a is given twice"),
        (b"a: " + b"[" * 201 + b"]" * 201, "line 1: nested more than 200 levels"),
        (b"[" * 70_000, "nested more than 200 levels"),
        (b"!!int 1" + b":1" * 100, "characters are too many for tag:yaml.org,2002:int"),
        (b"a: 2001-99-99", "not valid YAML: month must be in 1..12"),
        (b"a: \xff", "not valid YAML"),
        (b"a\n---\nb", "another document"),
    ],
    ids=str,
)
def test_yaml_that_is_refused_says_why_and_where(text: bytes, message: str) -> None:
    """The error is one readable line."""
    with pytest.raises(Undecodable, match=message) as refused:
        load_yaml(text)
    assert "\n" not in str(refused.value)


def test_yaml_with_a_few_aliases_is_read() -> None:
    """Anchors and merge keys remain usable; a number with too many digits stays text."""
    text = b"base: &base {a: 1}\none: {<<: *base, b: 2}\ntwo: *base\nlong: " + b"1" * 101
    assert load_yaml(text) == {"base": {"a": 1}, "one": {"a": 1, "b": 2}, "two": {"a": 1}, "long": "1" * 101}


_WORDS = ["a: 1", "<<: ", "&x ", "*x", "!!str ", "0x1f", "1:30", "2001-12-24", "2001-99-99", "yes", "\n  ", "---\n"]
_PIECES = [*_WORDS, ": ", "- ", "9" * 101, *"abc1_.=~?{}[],|>#'\"\\é\u2028\x00@%\n"]


@settings(max_examples=2000)
@given(pieces=st.lists(st.sampled_from(_PIECES), max_size=12), is_mapping=st.booleans())
def test_what_is_read_as_plain_has_the_values_of_the_full_reader(pieces: list[str], is_mapping: bool) -> None:
    """Each document has the same values on the same line; what the full reader refuses is not plain."""
    text = "m: " * is_mapping + "".join(pieces)
    plain = plain_yaml_documents(text)
    if plain is not None:
        full = [(node.start_mark.line + 1, value_of()) for node, value_of in yaml_documents(text)]
        assert repr([tuple(each) for each in plain]) == repr(full)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=30,
)


def _cut(value: Any, depth: int) -> Any:
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        return json.loads(CUT)
    if isinstance(value, list):
        return [_cut(item, depth - 1) for item in value]
    return {name: _cut(item, depth - 1) for name, item in value.items()}


@given(value=json_values, depth=st.integers(min_value=0, max_value=4), ascii_only=st.booleans())
def test_cutting_a_text_is_cutting_the_value(value: Any, depth: int, ascii_only: bool) -> None:
    """Brackets and quotes within strings are ignored; a value that is not too deep is unchanged."""
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert json.loads(cut_below(text, depth)) == _cut(value, depth)
    assert is_deep(value, depth) == (_cut(value, depth) != value)


@given(raw=st.binary(max_size=200) | st.text('{}[]",\\:a', max_size=200).map(str.encode))
def test_cutting_any_bytes_leaves_no_more_levels(raw: bytes) -> None:
    """No bytes make it fail, and bytes without brackets are unchanged."""
    found = cut_below(raw)
    assert found == raw or CUT in found


def test_cutting_takes_time_by_the_length_of_the_text() -> None:
    """Unterminated strings are not scanned repeatedly."""
    for text in (nested(200_000), b'"\\"' * 500_000, b'{"' + b"\\" * 1_000_001, b'"a' * 500_001):
        began = time.thread_time()
        cut_below(text)
        assert time.thread_time() - began < 2.0
    assert json.loads(cut_below(nested(MAX_DEPTH))) == json.loads(nested(MAX_DEPTH))
