"""Fair shares, against water that is poured by bisection, and caps, against sums."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from scheduler.quota.decide import Book, takes_all
from store.schema.quota import QuotaGrant, QuotaLimit, QuotaTicket
from tests.support import require

NOW = 1000.0


def shares(demands: dict[str, int], weights: dict[str, float], units: int) -> dict[str, float]:
    """Return each key's part of the units when they are poured until all wants are met or the units are used."""
    low, high = 0.0, 1e9
    for _ in range(200):
        level = (low + high) / 2
        poured = sum(min(float(wanted), level * weights[key]) for key, wanted in demands.items())
        low, high = (level, high) if poured < units else (low, level)
    return {key: min(float(wanted), high * weights[key]) for key, wanted in demands.items()}


class Stream:
    """Requests and releases of one resource, decided as they come."""

    def __init__(self, limit: QuotaLimit) -> None:
        self.book, self.limit = Book(), limit
        self.queue = self.book.queue("gpu")
        self.queue.limit = limit
        self._count = 0

    def request(self, key: str, units: int = 1) -> None:
        self._count += 1
        token = f"{self._count:08}"
        self.book.enqueue("gpu", QuotaTicket(token=token, execution=token, order=token, key=key, units=units))

    def weights(self) -> dict[str, float]:
        keys = {*self.queue.of_key, *(ticket.key for ticket in self.queue.tickets.values())}
        return {key: self.limit.weights.get(key, 1.0) for key in keys}

    def demands(self) -> Counter[str]:
        wanted = Counter(self.queue.of_key)
        for ticket in self.queue.tickets.values():
            wanted[ticket.key] += ticket.units
        return wanted

    def grant_one(self) -> QuotaTicket | None:
        group = self.book.next_group("gpu", NOW)
        if not group:
            return None
        ticket = require(self.book.dequeue("gpu", group["gpu"].token))
        self.queue.grant(QuotaGrant(**{name: getattr(ticket, name) for name in ticket.__struct_fields__}))
        return ticket


weighted = st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from([0.5, 1.0, 2.0, 3.7, 40.0]), min_size=2)


@given(weighted, st.integers(1, 60))
def test_every_key_is_within_a_unit_of_its_share_at_any_time(weights: dict[str, float], units: int) -> None:
    """While all keys want more than there is, after every grant."""
    stream = Stream(QuotaLimit(units=units, weights=weights))
    for key in weights:
        for _ in range(units):
            stream.request(key)
    while stream.grant_one():
        fair = shares(stream.demands(), stream.weights(), stream.queue.used)
        for key, share in fair.items():
            assert abs(stream.queue.of_key[key] - share) < 1 + 1e-6, key
    assert stream.queue.used == units


@given(weighted, st.integers(1, 20), st.integers(0, 2**32))
def test_units_go_to_a_key_below_its_share(weights: dict[str, float], units: int, seed: int) -> None:
    """In a random stream of weighted requests and releases: what it holds then exceeds its share by less than its
    request, no limit is exceeded, and while a request that would fit waits, a larger one is ahead of it."""
    rng = random.Random(seed)
    stream = Stream(QuotaLimit(units=units, weights=weights))
    for _ in range(60):
        if rng.random() < 0.6:
            stream.request(rng.choice(sorted(weights)), rng.randint(1, max(1, units // 3)))
        elif stream.queue.grants:
            stream.queue.revoke(rng.choice(sorted(stream.queue.grants)))
        while True:
            before = Counter(stream.queue.of_key)
            fair = shares(stream.demands(), stream.weights(), stream.queue.used + 1)
            ticket = stream.grant_one()
            if ticket is None:
                break
            assert before[ticket.key] < fair[ticket.key] + 1e-6
            assert stream.queue.used <= units
        smallest = min((ticket.units for ticket in stream.queue.tickets.values()), default=units + 1)
        if smallest <= stream.queue.free:
            following = require(stream.queue.first(NOW, lambda ticket: True))
            assert following.units > stream.queue.free


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3)), max_size=40), st.integers(0, 2**32))
def test_no_request_is_starved(requests: list[tuple[str, int]], seed: int) -> None:
    """With holders that end and no new requests, all are granted, under caps that some of them fill alone."""
    rng = random.Random(seed)
    stream = Stream(QuotaLimit(units=4, keys={"a": 3}))
    for key, units in requests:
        stream.request(key, units)
    done = 0
    while stream.queue.tickets or stream.queue.grants:
        while stream.grant_one():
            done += 1
            assert stream.queue.of_key["a"] <= 3
        assert stream.queue.grants, "none holds units, and none is granted"
        stream.queue.revoke(rng.choice(sorted(stream.queue.grants)))
    assert done == len(requests)


def everything(ticket: QuotaTicket) -> bool:
    return True


@given(
    st.lists(st.sampled_from([0.5, 1.0, 3.0, 10.0]), min_size=2, max_size=8),
    st.sampled_from(
        [
            QuotaLimit(units=7),
            QuotaLimit(units=7, project_units=3),
            QuotaLimit(units=9, keys={"k0": 2}, weights={"k1": 5.0}),
        ]
    ),
    st.integers(0, 2**32),
)
def test_the_next_by_turn_is_the_next_by_all_shares(weights: list[float], limit: QuotaLimit, seed: int) -> None:
    """The decision that looks at the first lanes only equals the one that computes the shares of all keys, whatever
    came, went or was taken back since the last decision."""
    rng = random.Random(seed)
    stream = Stream(limit)
    queue, weight = stream.queue, dict(enumerate(weights))
    for step in range(60):
        key = rng.randrange(len(weights))
        token, priority = f"{rng.randrange(30):02}", rng.randrange(2)
        ticket = QuotaTicket(
            token=token,
            execution=token,
            order=f"{step:08}",
            key=f"k{key}",
            units=rng.choice([1, 1, 2]),
            weight=weight[key],
            priority=priority,
            project=f"p{token[-1]}",
        )
        match rng.randrange(5):
            case 0 | 1 if token not in queue.grants:
                stream.book.enqueue("gpu", ticket)
            case 2 if queue.free >= ticket.units:
                stream.book.dequeue("gpu", token)
                queue.grant(QuotaGrant(**{name: getattr(ticket, name) for name in ticket.__struct_fields__}))
            case 3 if queue.grants:
                queue.revoke(rng.choice(sorted(queue.grants)))
            case 4:
                stream.book.dequeue("gpu", token)
                if rng.random() < 0.1:
                    queue.limit = QuotaLimit(units=8, weights={"k0": rng.choice([1.0, 4.0])})
        for each in queue.priorities():
            assert queue.next_in(each, NOW, takes_all) == queue.next_in(each, NOW, everything)
