"""The sorted set of keys behind an embedded store."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from store.embedded.state import RUN, SortedKeys

KEYS = st.text(alphabet="ab/\U0010ffff", max_size=4)


@given(st.lists(st.tuples(st.booleans(), KEYS)), KEYS)
def test_it_answers_like_a_sorted_set(steps: list[tuple[bool, str]], prefix: str) -> None:
    """After any insertions and removals, the keys under any prefix come in order, each once."""
    keys, model = SortedKeys(), set[str]()
    for insert, key in steps:
        keys.add(key) if insert else keys.discard(key)
        model.add(key) if insert else model.discard(key)
    assert keys.under(prefix) == sorted(key for key in model if key.startswith(prefix))
    assert len(keys.under("")) == len(model)


def test_a_prefix_may_span_many_runs() -> None:
    """Ranges are whole across the runs that the keys lie in, however they were filled and emptied."""
    names = [f"{group}/{number:05}" for group in "abc" for number in range(3 * RUN)]
    keys = SortedKeys(names[::2])
    for name in names[1::2]:
        keys.add(name)
    assert keys.under("b/") == names[3 * RUN : 6 * RUN]
    for name in names[: 4 * RUN]:
        keys.discard(name)
    assert keys.under("") == names[4 * RUN :]
    assert keys.under("b/") == names[4 * RUN : 6 * RUN]
