"""Who gets the free units of a resource."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from scheduler.quota.decide import Book, Queue
from store.schema.quota import QuotaGrant, QuotaLimit, QuotaTicket, Rate

NOW = 1000.0
_numbers = count()


def book(**limits: QuotaLimit | int) -> Book:
    made = Book()
    for name, limit in limits.items():
        made.queue(name).limit = limit if isinstance(limit, QuotaLimit) else QuotaLimit(units=limit)
    return made


def ticket(token: str, **fields: Any) -> QuotaTicket:
    return QuotaTicket(**{"token": token, "execution": token, "order": f"{next(_numbers):08}", **fields})


def wait(on: Book, *tickets: QuotaTicket, resource: str = "gpu") -> None:
    for each in tickets:
        on.enqueue(resource, each)


def hold(on: Book, each: QuotaTicket, resource: str = "gpu") -> None:
    fields = {name: getattr(each, name) for name in each.__struct_fields__}
    on.queue(resource).grant(QuotaGrant(**fields))


def granted(on: Book, resource: str = "gpu", now: float = NOW) -> list[str]:
    """Grant all that can be granted, and return the tokens in order."""
    tokens: list[str] = []
    while group := on.next_group(resource, now):
        for name, each in group.items():
            on.dequeue(name, each.token)
            hold(on, each, name)
            on.queue(name).head = on.queue(name).head_after(each.key, now)
        tokens.append(next(iter(group.values())).token)
    return tokens


def test_the_oldest_of_equals_are_granted_up_to_the_limit() -> None:
    """With a quota of three, the fourth request waits, and says what is held."""
    queues = book(gpu=3)
    wait(queues, *(ticket(f"t{number}") for number in range(4)))
    assert granted(queues) == ["t0", "t1", "t2"]
    found = queues.queue("gpu").waits(NOW)["t3"]
    assert (found.code, found.used, found.limit, found.position) == ("LimitReached", 3, 3, 1)


def test_a_higher_priority_is_first_whatever_its_age() -> None:
    queues = book(gpu=1)
    wait(queues, ticket("old"), ticket("urgent", priority=1))
    assert granted(queues) == ["urgent"]
    wait(queues, ticket("next", priority=1))
    waits = queues.queue("gpu").waits(NOW)
    assert (waits["next"].code, waits["next"].position) == ("LimitReached", 1)
    assert (waits["old"].code, waits["old"].position) == ("BehindHigherPriority", 2)


def test_a_key_that_holds_its_share_waits_for_the_others() -> None:
    """What runs counts: a key with three units gets none while another has none."""
    queues = book(gpu=4)
    for number in range(3):
        hold(queues, ticket(f"a{number}", key="a"))
    wait(queues, ticket("a3", key="a"), ticket("b0", key="b"), ticket("b1", key="b"))
    assert granted(queues) == ["b0"]
    waits = queues.queue("gpu").waits(NOW)
    assert (waits["a3"].code, waits["b1"].code) == ("FairShare", "LimitReached")


def test_weights_divide_the_units() -> None:
    queues = book(gpu=QuotaLimit(units=6, weights={"a": 2.0}))
    wait(queues, *(ticket(f"a{number}", key="a") for number in range(9)))
    wait(queues, *(ticket(f"b{number}", key="b") for number in range(9)))
    keys = [token[0] for token in granted(queues)]
    assert (keys.count("a"), keys.count("b")) == (4, 2)


def test_a_heavy_key_among_many_light_ones_gets_its_share() -> None:
    """Neither of the usual rules of "lowest level first" would hold here: light keys would each get a whole unit."""
    queues = book(gpu=QuotaLimit(units=100, weights={"heavy": 100.0}))
    wait(queues, *(ticket(f"heavy{number}", key="heavy") for number in range(100)))
    wait(queues, *(ticket(f"light{number}", key=f"light{number}") for number in range(99)))
    heavy = sum(token.startswith("heavy") for token in granted(queues))
    assert abs(heavy - 100 * 100 / 199) <= 1


@pytest.mark.parametrize(
    ("limit", "code", "scope"),
    [
        (QuotaLimit(units=9, keys={"a": 1}), "KeyLimitReached", "key"),
        (QuotaLimit(units=9, project_units=1), "LimitReached", "project"),
        (QuotaLimit(units=9, namespace_units=1), "LimitReached", "namespace"),
    ],
)
def test_a_cap_skips_and_blocks_none_behind(limit: QuotaLimit, code: str, scope: str) -> None:
    queues = book(gpu=limit)
    wait(queues, *(ticket(f"a{number}", key="a", project="a", priority=1) for number in range(3)))
    wait(queues, ticket("ab", key="ab", project="ab"))
    assert granted(queues) == ["a0", "ab"]
    found = queues.queue("gpu").waits(NOW)["a1"]
    assert (found.code, found.scope, found.used, found.limit) == (code, scope, 1, 1)


def test_units_collect_under_a_cap_for_a_large_request_and_others_are_not_blocked() -> None:
    """Younger small requests of the same key would keep the key at its cap for ever; other keys go on."""
    queues = book(gpu=QuotaLimit(units=9, keys={"a": 3}))
    hold(queues, ticket("running", key="a"))
    wait(queues, ticket("large", key="a", units=3), ticket("small", key="a"), ticket("other", key="b"))
    assert granted(queues) == ["other"]
    assert queues.queue("gpu").waits(NOW)["small"].code == "KeyLimitReached"
    queues.queue("gpu").revoke("running")
    assert granted(queues) == ["large"]


def test_a_project_never_counts_another_whose_name_begins_alike() -> None:
    queues = book(gpu=9)
    wait(queues, ticket("a0", project="a"), ticket("a1", project="a", project_constraint=1))
    wait(queues, ticket("ab", project="ab", project_constraint=1))
    assert granted(queues) == ["a0", "ab"]


def test_the_constraints_of_a_request_hold_for_its_namespace() -> None:
    """None: unconstrained; 0: always refused; a full namespace refuses its own and no other."""
    queues = book(gpu=9)
    wait(queues, ticket("one", domain="ns1"))
    wait(queues, ticket("full", domain="ns1", namespace_constraint=1))
    wait(queues, ticket("other", domain="ns2", namespace_constraint=1), ticket("never", namespace_constraint=0))
    assert granted(queues) == ["one", "other"]
    assert queues.queue("gpu").waits(NOW)["full"].scope == "namespace"


def test_units_collect_for_a_large_request_that_is_next() -> None:
    """A small request behind it does not take them, so the large one is not starved."""
    queues = book(gpu=4)
    hold(queues, ticket("running", units=2))
    wait(queues, ticket("large", units=3), ticket("small"))
    assert granted(queues) == []
    queues.queue("gpu").revoke("running")
    assert granted(queues) == ["large", "small"]


def test_a_request_above_the_limit_is_infeasible_and_a_paused_one_is_not() -> None:
    queue = book(gpu=QuotaLimit(units=4, keys={"a": 2})).queue("gpu")
    assert (found := queue.infeasible(ticket("t", units=5))) is not None
    assert (found.code, found.scope) == ("Infeasible", "resource")
    assert (found := queue.infeasible(ticket("t", units=3, key="a"))) is not None
    assert found.scope == "key"
    queue.limit = QuotaLimit(units=0)
    assert queue.infeasible(ticket("t")) is None


def test_a_ticket_that_a_lowered_limit_made_infeasible_blocks_none() -> None:
    queues = book(gpu=4)
    wait(queues, ticket("large", units=5), ticket("small"))
    assert granted(queues) == ["small"]
    assert queues.queue("gpu").waits(NOW)["large"].code == "Infeasible"


def test_a_rate_limit_delays_and_says_until_when() -> None:
    """Two at once, then one each half second."""
    queues = book(gpu=QuotaLimit(units=9, rate=Rate(2)))
    wait(queues, *(ticket(f"t{number}") for number in range(4)))
    assert granted(queues) == ["t0", "t1"]
    queue = queues.queue("gpu")
    assert queue.waits(NOW)["t2"].code == "RateLimited"
    assert queue.waits(NOW)["t2"].until == queue.wake(NOW) == NOW + 0.5
    assert granted(queues, now=NOW + 0.49) == []
    assert granted(queues, now=NOW + 0.5) == ["t2"]
    assert granted(queues, now=NOW + 9) == ["t3"]
    assert queue.wake(NOW + 9) is None


def test_the_rate_of_a_key_skips_the_key_alone() -> None:
    queues = book(gpu=QuotaLimit(units=9, key_rates={"a": Rate(1, 60.0)}))
    wait(queues, ticket("a0", key="a"), ticket("a1", key="a"), ticket("b0", key="b"))
    assert granted(queues) == ["a0", "b0"]
    assert queues.queue("gpu").wake(NOW) == NOW + 60


def test_a_token_gets_all_of_its_resources_or_none() -> None:
    queues = book(gpu=1, net=1)
    hold(queues, ticket("other"), "net")
    both = ticket("both")
    wait(queues, both)
    wait(queues, both, resource="net")
    assert granted(queues) == []
    queues.queue("net").revoke("other")
    assert granted(queues, "net") == ["both"]
    assert queues.queue("gpu").used == queues.queue("net").used == 1


def test_two_tokens_that_want_the_same_two_resources_do_not_wait_for_each_other() -> None:
    """Fair shares put each of them first in another resource; one of them goes ahead."""
    queues = book(gpu=2, net=2)
    hold(queues, ticket("x", key="a"), "gpu")
    hold(queues, ticket("y", key="b"), "net")
    for each in (ticket("a", key="a"), ticket("b", key="b")):
        wait(queues, each)
        wait(queues, each, resource="net")
    assert granted(queues) == ["a"]
    queues.queue("gpu").revoke("a")
    queues.queue("net").revoke("a")
    assert granted(queues) == ["b"]


def test_the_first_of_those_that_want_several_is_not_starved_by_those_that_want_one() -> None:
    """Units collect for it in every resource, although single requests keep coming and are younger."""
    queues = book(gpu=1, net=1)
    hold(queues, ticket("g"), "gpu")
    hold(queues, ticket("n"), "net")
    both = ticket("both")
    wait(queues, both)
    wait(queues, both, resource="net")
    wait(queues, ticket("single"))
    queues.queue("gpu").revoke("g")
    assert granted(queues) == []
    queues.queue("net").revoke("n")
    assert granted(queues, "net") == ["both"]


def test_those_that_want_one_are_not_starved_by_those_that_want_several() -> None:
    """The resource collects units only for a ticket that is older than its next one."""
    queues = book(gpu=1, net=1)
    hold(queues, ticket("n"), "net")
    wait(queues, ticket("single"))
    both = ticket("both")
    wait(queues, both)
    wait(queues, both, resource="net")
    assert granted(queues) == ["single"]


@pytest.mark.parametrize("limit", [QuotaLimit(units=50), QuotaLimit(units=50, project_units=10_000)])
def test_a_decision_among_ten_thousand_keys_looks_at_a_few(limit: QuotaLimit, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does the reason of one more that waits; else each of them would cost a pass over all keys."""
    made = book(gpu=limit)
    for number in range(50):
        hold(made, ticket(f"h{number}", key=f"k{number}"))
    wait(made, *(ticket(f"t{number}", key=f"k{number}") for number in range(10_000)))
    queue, looked = made.queue("gpu"), 0
    queue.wait(queue.tickets["t0"], NOW)
    passes = Queue.passes

    def counted(self: Queue, one: QuotaTicket, now: float) -> bool:
        nonlocal looked
        looked += 1
        return passes(self, one, now)

    monkeypatch.setattr(Queue, "passes", counted)
    for number in range(50):
        queue.revoke(f"h{number}")
        assert granted(made) == [f"t{number}"]
        late = ticket(f"late{number}", key=f"k{number}")
        wait(made, late)
        assert queue.wait(late, NOW).code == "FairShare"
    assert looked < 20_000, "each decision and each reason has looked at all keys"


def test_a_resource_with_an_unreadable_holder_grants_nothing() -> None:
    queues = book(gpu=1)
    queues.queue("gpu").unreadable = "rcfarm/quota/gpu/grants/x"
    wait(queues, ticket("t"))
    assert granted(queues) == []
    assert "rcfarm/quota/gpu/grants/x" in queues.queue("gpu").waits(NOW)["t"].message
