"""RE2's patterns keep their meaning."""

from __future__ import annotations

import pytest

from controllers.framework.re2 import compile_re2


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        ("abc", "xabcx", "abc"),
        ("^abc$", "abc", "abc"),
        ("abc$", "abc\n", None),
        ("(?m)^b$", "a\nb\nc", "b"),
        ("a.c", "a\nc", None),
        ("(?s)a.c", "a\nc", "a\nc"),
        ("(?ms).*", "a\nb", "a\nb"),
        ("(?i)EVICTED", "Evicted", "Evicted"),
        ("a(?i)b|c", "C", "C"),
        ("a(?i)b|c", "aB", "aB"),
        ("a(?i)b|c", "AB", None),
        ("(a(?i)b)c", "aBC", None),
        ("(?i:a)b", "Ab", "Ab"),
        ("(?i:a)b", "AB", None),
        ("(?i)a(?-i)b", "AB", None),
        ("(?P<name>a)(?<other>b)", "ab", "ab"),
        (r"\d+", "٣", None),
        (r"\w+", "é", None),
        (r"\s", "\v", None),
        (r"[\d\s]+", "1 2", "1 2"),
        (r"[^\D]", "x5", "5"),
        (r"\bfoo\b", "a foo.", "foo"),
        (r"\bé", "é", None),
        (r"a\z", "a\n", None),
        (r"\Qa.b*\E+", "a.b**", "a.b**"),
        (r"\Q", "x", ""),
        ("[[:alpha:]]+", "12ab", "ab"),
        ("[[:^digit:]]+", "12ab", "ab"),
        ("[]a]+", "]a", "]a"),
        ("[^]a]+", "]ab", "b"),
        ("[a-]+", "a-", "a-"),
        ("[a&&b]+", "&&", "&&"),
        ("[[a]+", "[a", "[a"),
        ("x{,3}", "x{,3}", "x{,3}"),
        ("x{2,3}", "xxxx", "xxx"),
        ("x{2,3}?", "xxxx", "xx"),
        ("a+?", "aa", "a"),
        ("(?U)a+", "aa", "a"),
        ("(?U)a+?", "aa", "aa"),
        (r"\x41\x{1F600}\101", "A😀A", "A😀A"),
        (r"\.\-\_", ".-_", ".-_"),
        ("", "abc", ""),
        ("(|a)b", "ab", "ab"),
    ],
)
def test_what_a_pattern_finds(pattern: str, text: str, found: str | None) -> None:
    """The search is unanchored; None means no match."""
    match = compile_re2(pattern).search(text)
    assert (match[0] if match else None) == found


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)", "(?<=a)b", "(?!a)", "(?>a)", r"(a)\1", "a**", "a++", "a{2}{3}", "*a", "(", ")", "[", "[b-a]",
        r"\pL", r"\C", r"\Z", r"\y", "[[:nope:]]", "a\\", "(?z)a", r"[a-\d]", r"\x{110000}", "(?P<a>b)(?P<a>c)",
    ],
)  # fmt: skip
def test_what_is_not_re2_is_refused(pattern: str) -> None:
    """Python's `re` would accept some of these patterns, or give them another meaning."""
    with pytest.raises(ValueError, match=r"."):
        compile_re2(pattern)
