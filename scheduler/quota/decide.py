"""Who gets the free units of a resource: the pure decision.

The order. The highest priority is served first. Within a priority, fair keys share by weighted max-min over what they
hold and what they are granted: with one unit more in use than now, every key has a fair level, the weight times a
common water level, or less if it wants less. Of the keys below their level, the one that would reach it first is next
(Balinski and Young's quota method: no key is ever more than a unit away from its share while the demand stays). Within
a key, the oldest ticket is first.

A ticket that a cap (of its key, project or namespace) or a rate limit holds back is skipped and blocks none behind it,
except those under the same cap, whose free units are kept for it. A ticket that passes its caps but finds too few free
units holds the queue: units collect for it, so that large requests are not starved by small ones.

A token with tickets of several resources gets all of them at once, or none. While one resource lacks units, such a
ticket is skipped in the others, except for the champion, the first of these tickets by priority and age: where it is
older than the ticket that is next, the resource collects units for it. There is one champion at a time, so two tickets
never wait for each other.

Tickets that differ only in age form a lane; only the lanes' oldest are looked at, in the order of `Turns`. The first
that nothing holds back is next if its key is certainly below its share, as always where all keys weigh the same.
Otherwise, and for tickets of several resources, the shares of all keys are computed, in proportion to the number of
lanes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Literal, NamedTuple

from scheduler.quota import rate
from scheduler.quota.turns import Turn, Turns
from store.schema.quota import QuotaGrant, QuotaHead, QuotaLimit, QuotaTicket

Code = Literal["Infeasible", "LimitReached", "KeyLimitReached", "RateLimited", "BehindHigherPriority", "FairShare"]
Scope = Literal["resource", "key", "project", "namespace"]
Takes = Callable[[QuotaTicket], bool]
_Rank = tuple[int, str, str]  # priority, negated; age; token
_LAST: _Rank = (2**32, "", "")
_SCOPES: tuple[Scope, ...] = ("key", "project", "namespace")
FEW = 64  # keys: of fewer, shares are always exact; of more, reasons may miss a change of one key in 64
SHARES_KEPT = 1.0  # seconds for which reasons may name the former shares
_CODES: dict[Scope, Code] = {"key": "KeyLimitReached"}
NO_LIMIT = QuotaLimit(units=0)
NO_HEAD = QuotaHead()


class Wait(NamedTuple):
    """The reason why a ticket waits. `used` and `limit`: of the scope that holds it back, in units. `until`: when a
    rate limit permits it, in seconds since the epoch. `position`: 1 is next; 0 where it was not asked for."""

    code: Code
    message: str
    scope: Scope = "resource"
    used: int = 0
    limit: int = 0
    until: float | None = None
    position: int = 0


class _LaneKey(NamedTuple):
    key: str
    project: str
    domain: str
    units: int
    weight: float
    project_constraint: int | None
    namespace_constraint: int | None


@dataclass(slots=True, eq=False)
class _Lane:
    """Tickets that differ only in age. `heap` may hold tickets that are gone; `live` has the others."""

    live: dict[str, QuotaTicket] = field(default_factory=dict)
    heap: list[tuple[str, str]] = field(default_factory=list)
    turn: Turn | None = None

    def __len__(self) -> int:
        return len(self.live)

    def add(self, ticket: QuotaTicket) -> None:
        self.live[ticket.token] = ticket
        heapq.heappush(self.heap, (ticket.order, ticket.token))

    def oldest(self) -> QuotaTicket:
        """Return the oldest ticket; a lane without tickets is dropped by its queue."""
        return self.live[self.first()[1]]

    def first(self) -> tuple[str, str]:
        """Return the oldest ticket's age and token."""
        while True:
            order, token = self.heap[0]
            ticket = self.live.get(token)
            if ticket is not None and ticket.order == order:
                return order, token
            heapq.heappop(self.heap)

    def in_order(self) -> list[QuotaTicket]:
        """Return the tickets, oldest first."""
        return sorted(self.live.values(), key=lambda ticket: (ticket.order, ticket.token))


class _Candidate(NamedTuple):
    ticket: QuotaTicket
    used: int
    weight: float
    demand: int  # what the key holds and waits for


class _Recent(NamedTuple):
    """The shares as they were `at` a time."""

    version: int
    limit: QuotaLimit | None
    at: float
    shares: _Shares | None


class Queue:
    """One resource: its limit, the state of its rates, the holders and the waiters, indexed as they come and go."""

    def __init__(self, resource: str) -> None:
        self.resource = resource
        self.limit: QuotaLimit | None = None
        self.head = NO_HEAD
        self.version = 0  # of holders and waiters
        self.unreadable = ""  # the key of a record that hides what is held: nothing is granted
        self.grants: dict[str, QuotaGrant] = {}
        self.tickets: dict[str, QuotaTicket] = {}
        self.used = 0
        self.of_key: Counter[str] = Counter()
        self.of_project: Counter[str] = Counter()
        self.of_namespace: Counter[tuple[str, str]] = Counter()
        self._lanes: dict[int, dict[_LaneKey, _Lane]] = {}
        self._weights: dict[str, Counter[float]] = {}
        self._units: Counter[int] = Counter()  # tickets by what they want
        self._turns: Turns[_Lane] = Turns(self.weight, lambda key: self.of_key[key], self._weights.__contains__)
        self._turns_limit: QuotaLimit | None = None
        self._recent: dict[int, _Recent] = {}
        self._collected: tuple[tuple[int, int], dict[tuple[Scope, object], _Rank]] = (0, 0), {}

    @property
    def free(self) -> int:
        """The units that are free; negative after the limit was lowered."""
        return (self.limit or NO_LIMIT).units - self.used

    def grant(self, grant: QuotaGrant) -> None:
        """Add a holder. A token that holds units already is replaced."""
        self.revoke(grant.token)
        self.grants[grant.token] = grant
        self._count(grant, grant.units)
        self._weigh(grant, 1)

    def revoke(self, token: str) -> QuotaGrant | None:
        """Remove a holder and return it; None if the token holds nothing."""
        grant = self.grants.pop(token, None)
        if grant is not None:
            self._count(grant, -grant.units)
            self._weigh(grant, -1)
        return grant

    def enqueue(self, ticket: QuotaTicket) -> None:
        """Add a waiter. A token that waits already is replaced."""
        self.dequeue(ticket.token)
        self.tickets[ticket.token] = ticket
        lanes = self._lanes.setdefault(ticket.priority, {})
        lane = lanes.get(_lane_of(ticket))
        if lane is None:
            lane = lanes[_lane_of(ticket)] = _Lane()
            self._turns.add(ticket.key, ticket.priority, lane)
        lane.add(ticket)
        self._units[ticket.units] += 1
        self._weigh(ticket, 1)

    def dequeue(self, token: str) -> QuotaTicket | None:
        """Remove a waiter and return it; None if the token does not wait."""
        ticket = self.tickets.pop(token, None)
        if ticket is not None:
            lanes = self._lanes[ticket.priority]
            lane = lanes[_lane_of(ticket)]
            del lane.live[token]
            if not lane.live:
                del lanes[_lane_of(ticket)]
                self._turns.drop(ticket.key, ticket.priority, lane)
            if not lanes:
                del self._lanes[ticket.priority]
            self._units[ticket.units] -= 1
            if not self._units[ticket.units]:
                del self._units[ticket.units]
            self._weigh(ticket, -1)
        return ticket

    def weight(self, key: str) -> float:
        """Return the key's weight: the operators', else the largest of its requests."""
        given = (self.limit or NO_LIMIT).weights.get(key)
        return given if given is not None else max(self._weights.get(key, {}), default=1.0)

    def infeasible(self, request: QuotaTicket) -> Wait | None:
        """Return why the request can't ever be granted under the present limit, or None. A cap of 0 pauses requests
        and does not fail them."""
        for scope, cap, used in self._caps(request, own=False):
            if 0 < cap < request.units:
                message = f"{request.units} units of {self.resource} are requested; the {scope}'s limit is {cap}"
                return Wait("Infeasible", message, scope, used, cap)
        return None

    def held_back(self, ticket: QuotaTicket, now: float) -> Wait | None:
        """Return the cap or the rate that the ticket must wait for whatever is free, or None."""
        for scope, cap, used in self._caps(ticket, own=True):
            if scope != "resource" and used + ticket.units > cap:
                name = _name_in(scope, ticket)
                message = f"{scope} {name} holds {used} of its {cap} units of {self.resource}"
                return Wait(_CODES.get(scope, "LimitReached"), message, scope, used, cap)
        if wait := self.infeasible(ticket):
            return wait
        if self.unreadable:
            return Wait("LimitReached", f"{self.unreadable} can't be read, so nothing is granted; correct or delete it")
        if self.limit is None:
            return Wait("LimitReached", f"resource {self.resource} has no quota; set one with `rcfarm quota set`")
        if (behind := self._behind(ticket)) is not None:
            message = f"units of {self.resource} collect for an earlier request of {behind} {_name_in(behind, ticket)}"
            return Wait(_CODES.get(behind, "LimitReached"), message, behind)
        until = self.due(ticket.key, now)
        if until > now:
            return Wait("RateLimited", f"the rate limit of {self.resource} permits no grant yet", until=until)
        return None

    def _behind(self, ticket: QuotaTicket) -> Scope | None:
        """Return the capped scope in which units collect for an earlier ticket, which has too little room there, or
        None: tickets behind it get nothing in the scope, so that small requests don't starve a large one. The caps that
        a ticket brings itself are no matter of others. Where all tickets want the same, none is smaller."""
        limit = self.limit or NO_LIMIT
        if len(self._units) < 2 or (not limit.keys and limit.project_units is None and limit.namespace_units is None):
            return None
        seen = self.version, id(self.limit)
        if self._collected[0] != seen:
            first: dict[tuple[Scope, object], _Rank] = {}
            for earlier in [lane.oldest() for lanes in self._lanes.values() for lane in lanes.values()]:
                for scope, cap, used in self._caps(earlier, own=False):
                    if scope != "resource" and cap - used < earlier.units <= cap:
                        place = scope, _name_in(scope, earlier)
                        first[place] = min(first.get(place, _LAST), _rank(earlier))
            self._collected = seen, first
        if collecting := self._collected[1]:
            rank = _rank(ticket)
            for scope in _SCOPES:
                if collecting.get((scope, _name_in(scope, ticket)), _LAST) < rank:
                    return scope
        return None

    def passes(self, ticket: QuotaTicket, now: float) -> bool:
        """Return whether neither a cap nor a rate holds the ticket back: `held_back`, without the reason."""
        limit, units = self.limit, ticket.units
        if limit is None or self.unreadable or units > limit.units:
            return False
        cap = limit.keys.get(ticket.key)
        if cap is not None and self.of_key.get(ticket.key, 0) + units > cap:
            return False
        cap = _least(limit.project_units, ticket.project_constraint)
        if cap is not None and self.of_project.get(ticket.project, 0) + units > cap:
            return False
        cap = _least(limit.namespace_units, ticket.namespace_constraint)
        if cap is not None and self.of_namespace.get((ticket.project, ticket.domain), 0) + units > cap:
            return False
        if self._behind(ticket) is not None:
            return False
        return (limit.rate is None and not limit.key_rates) or self.due(ticket.key, now) <= now

    def due(self, key: str, now: float) -> float:
        """Return the earliest time at which the rate limits permit a grant to the key."""
        limit, at = self.limit or NO_LIMIT, 0.0
        if limit.rate is not None:
            at = rate.due(limit.rate, self.head.tat, now)
        if (own := limit.key_rates.get(key)) is not None:
            at = max(at, rate.due(own, self.head.keys.get(key, 0.0), now))
        return at

    def head_after(self, key: str, now: float) -> QuotaHead:
        """Return the head after a grant to the key. Times that lie in the past are dropped: they permit everything."""
        limit, tat = self.limit or NO_LIMIT, self.head.tat
        if limit.rate is not None:
            tat = rate.taken(limit.rate, tat, now)
        keys = {name: at for name, at in self.head.keys.items() if at > now}
        if (own := limit.key_rates.get(key)) is not None:
            keys[key] = rate.taken(own, self.head.keys.get(key, 0.0), now)
        return QuotaHead(self.head.version + 1, tat, keys)

    def next_in(self, priority: int, now: float, takes: Takes) -> QuotaTicket | None:
        """Return the ticket of a priority that the next units belong to, fit or not; None if all are held back.

        `takes(ticket)`: whether its other resources have room for it as well.
        """
        if takes is takes_all:
            if self._turns_limit is not self.limit:
                self._turns.mark_all()
                self._turns_limit = self.limit
            with closing(self._turns.in_order(priority)) as lanes:
                turn = next((ticket for lane in lanes if self.passes(ticket := lane.oldest(), now)), None)
            if turn is None or self._turns.is_below(turn.key, self.of_key[turn.key], self.used + 1):
                return turn
        candidates = self._candidates(priority, now, takes)
        if len(candidates) < 2:
            return next((found.ticket for found in candidates.values()), None)
        shares = _Shares(self, candidates)
        # First is the key whose share covers one more unit at the lowest water level, whatever its next ticket wants:
        # large requests are not at a disadvantage.
        return min(shares.eligible(), key=lambda one: ((one.used + 1) / one.weight, one.ticket.order)).ticket

    def first(self, now: float, takes: Takes) -> QuotaTicket | None:
        """Return the ticket that the next units belong to, of whatever priority."""
        return next((found for each in self.priorities() if (found := self.next_in(each, now, takes))), None)

    def is_outranked(self, priority: int, now: float) -> bool:
        """Return whether a ticket of a higher priority waits for nothing but units."""
        return any(
            self.passes(lane.oldest(), now)
            for higher in self._lanes
            if higher > priority
            for lane in self._lanes[higher].values()
        )

    def priorities(self) -> list[int]:
        """Return the priorities that tickets have, highest first."""
        return sorted(self._lanes, reverse=True)

    def wake(self, now: float) -> float | None:
        """Return when the next rate limit permits a grant to a waiter, in seconds since the epoch; None: none is due
        later than `now`."""
        limit = self.limit or NO_LIMIT
        if limit.rate is None and not limit.key_rates:
            return None
        keys = {lane.key for lanes in self._lanes.values() for lane in lanes}
        return min((at for key in keys if (at := self.due(key, now)) > now), default=None)

    def wait(self, ticket: QuotaTicket, now: float) -> Wait:
        """Return why one ticket waits, without its position."""
        if held := self.held_back(ticket, now):
            return held
        if self.is_outranked(ticket.priority, now):
            return self._contention(ticket, True, None)
        # The shares of many keys may be those of up to a second ago, before few of them changed.
        recent, lanes = self._recent.get(ticket.priority), len(self._lanes.get(ticket.priority, ()))
        kept = SHARES_KEPT if lanes >= FEW else 0.0
        if (
            recent is None
            or recent.limit is not self.limit
            or self.version - recent.version > lanes // FEW
            or abs(now - recent.at) > kept
        ):
            candidates = self._candidates(ticket.priority, now, takes_all)
            shares = _Shares(self, candidates) if candidates else None
            recent = self._recent[ticket.priority] = _Recent(self.version, self.limit, now, shares)
        return self._contention(ticket, False, recent.shares)

    def waits(self, now: float, *, ranked: bool = True) -> dict[str, Wait]:
        """Return why each ticket waits, and, if `ranked`, its position: its rank if nothing else changed. Costs time in
        proportion to the tickets: for people and for changed reasons, not for decisions."""
        found: dict[str, Wait] = {}
        contended = False
        for priority in self.priorities():
            lanes = self._lanes[priority].values()
            held = {id(lane): self.held_back(lane.oldest(), now) for lane in lanes}
            candidates = self._candidates(priority, now, takes_all)
            shares = _Shares(self, candidates) if candidates else None
            for lane in lanes:
                wait = held[id(lane)]
                if wait is None:
                    wait = self._contention(lane.oldest(), contended, shares)
                found.update(dict.fromkeys(lane.live, wait))
            contended = contended or bool(candidates)
        if not ranked:
            return found
        # The order of grants, as near as it can be known without releases: by priority, the level that the key reaches
        # with each ticket, and age.
        order: list[tuple[int, float, str, str]] = []
        level: Counter[str] = Counter(self.of_key)
        for ticket in sorted(self.tickets.values(), key=lambda one: (-one.priority, one.order, one.token)):
            level[ticket.key] += ticket.units
            reached = level[ticket.key] / self.weight(ticket.key)
            order.append((-ticket.priority, reached, ticket.order, ticket.token))
        places = {token: place for place, (*_, token) in enumerate(sorted(order), 1)}
        return {token: wait._replace(position=places[token]) for token, wait in found.items()}

    def _contention(self, ticket: QuotaTicket, contended: bool, shares: _Shares | None) -> Wait:
        units = (self.limit or NO_LIMIT).units
        state = f"{self.used} of {units} units of {self.resource} are held"
        if contended:
            return Wait(
                "BehindHigherPriority", f"{state}, and requests of a higher priority wait", "resource", self.used, units
            )
        share = shares.full_share(ticket.key) if shares is not None and len(shares) > 1 else None
        if share is not None and self.of_key[ticket.key] + ticket.units > share:
            message = f"{state}; key {ticket.key} holds {self.of_key[ticket.key]}, its fair share is {share:.4g}"
            return Wait("FairShare", message, "key", self.of_key[ticket.key], int(share))
        return Wait("LimitReached", state, "resource", self.used, units)

    def _candidates(self, priority: int, now: float, takes: Takes) -> dict[str, _Candidate]:
        """Return the oldest ticket per fair key that nothing holds back, with what its key holds and waits for."""
        first: dict[str, QuotaTicket] = {}
        waiting: Counter[str] = Counter()
        for lane in self._lanes.get(priority, {}).values():
            ticket = lane.oldest()
            if not self.passes(ticket, now):
                continue
            if not takes(ticket):
                later = next((one for one in lane.in_order() if takes(one) and self.passes(one, now)), None)
                if later is None:
                    continue
                ticket = later
            key = ticket.key
            waiting[key] += len(lane.live) * ticket.units
            if key not in first or ticket.order < first[key].order:
                first[key] = ticket
        caps = (self.limit or NO_LIMIT).keys
        return {
            key: _Candidate(ticket, held, self.weight(key), min(held + waiting[key], caps.get(key, 2**62)))
            for key, ticket in first.items()
            for held in (self.of_key[key],)
        }

    def _caps(self, ticket: QuotaTicket, *, own: bool) -> Iterator[tuple[Scope, int, int]]:
        """Yield each cap on the ticket, and what is held under it. `own`: with those that the ticket brings."""
        limit = self.limit or NO_LIMIT
        yield "resource", limit.units, self.used
        if ticket.key in limit.keys:
            yield "key", limit.keys[ticket.key], self.of_key[ticket.key]
        project = _least(limit.project_units, ticket.project_constraint if own else None)
        if project is not None:
            yield "project", project, self.of_project[ticket.project]
        namespace = _least(limit.namespace_units, ticket.namespace_constraint if own else None)
        if namespace is not None:
            yield "namespace", namespace, self.of_namespace[ticket.project, ticket.domain]

    def _count(self, grant: QuotaGrant, units: int) -> None:
        self.used += units
        for counter, name in (
            (self.of_key, grant.key),
            (self.of_project, grant.project),
            (self.of_namespace, (grant.project, grant.domain)),
        ):
            counter[name] += units  # type: ignore[index]
            if not counter[name]:  # type: ignore[index]
                del counter[name]

    def _weigh(self, request: QuotaTicket, times: int) -> None:
        self.version += 1
        self._turns.mark(request.key)
        weights = self._weights.setdefault(request.key, Counter())
        weights[request.weight] += times
        if not weights[request.weight]:
            del weights[request.weight]
        if not weights:
            del self._weights[request.key]


class _Shares:
    """Weighted max-min shares of the keys that hold or wait, when one unit more is in use than now."""

    def __init__(self, queue: Queue, candidates: Mapping[str, _Candidate]) -> None:
        self._queue, self._candidates = queue, candidates
        demands = [(found.demand, found.weight) for found in candidates.values()]
        demands += [(held, queue.weight(key)) for key, held in queue.of_key.items() if key not in candidates]
        demands.sort(key=lambda each: each[0] / each[1])
        self._demands = demands
        self._weights = list(accumulate((weight for _, weight in reversed(demands)), initial=0.0))[:0:-1]
        self._levels: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._demands)

    def eligible(self) -> list[_Candidate]:
        """Return the candidates that hold less than their share."""
        level = self._level(self._queue.used + 1)
        below = [found for found in self._candidates.values() if found.used < level * found.weight]
        return below or list(self._candidates.values())  # where rounding hides the only one

    def full_share(self, key: str) -> float:
        """Return the key's share when all units are held."""
        return self._level(max(self._queue.used, (self._queue.limit or NO_LIMIT).units)) * self._queue.weight(key)

    def _level(self, units: int) -> float:
        """Return the water level that fills `units`: a key takes its weight times the level, or all that it wants."""
        if units not in self._levels:
            left, level = float(units), float("inf")
            for (demand, weight), weights in zip(self._demands, self._weights, strict=True):
                if left * weight <= demand * weights:
                    level = left / weights
                    break
                left -= demand
            self._levels[units] = level
        return self._levels[units]


def _least(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)


def _rank(ticket: QuotaTicket) -> _Rank:
    return -ticket.priority, ticket.order, ticket.token


def _name_in(scope: Scope, ticket: QuotaTicket) -> str:
    names = {"key": ticket.key, "project": ticket.project, "namespace": f"{ticket.project}/{ticket.domain}"}
    return names.get(scope, "")


def takes_all(ticket: QuotaTicket) -> bool:
    """Return True: no ticket waits for several resources."""
    return True


def _lane_of(ticket: QuotaTicket) -> _LaneKey:
    return _LaneKey(
        ticket.key,
        ticket.project,
        ticket.domain,
        ticket.units,
        ticket.weight,
        ticket.project_constraint,
        ticket.namespace_constraint,
    )


class Book:
    """The queues of all resources. Every change of a queue's waiters goes through the book, which knows the tokens with
    tickets of several resources."""

    def __init__(self) -> None:
        self.queues: dict[str, Queue] = {}
        self._waiting: dict[str, set[str]] = {}  # the resources that a token has tickets of
        self._several: dict[str, tuple[int, str, str]] = {}  # tokens with more than one, and their ranks
        self._champion_seen = (0, 0.0), ""
        self._first: dict[str, tuple[tuple[int, float], QuotaTicket | None]] = {}  # single tickets, as last seen

    def queue(self, resource: str) -> Queue:
        """Return the resource's queue."""
        if resource not in self.queues:
            self.queues[resource] = Queue(resource)
        return self.queues[resource]

    def enqueue(self, resource: str, ticket: QuotaTicket) -> None:
        self.queue(resource).enqueue(ticket)
        resources = self._waiting.setdefault(ticket.token, set())
        resources.add(resource)
        if len(resources) > 1:
            self._several[ticket.token] = _rank(ticket)

    def dequeue(self, resource: str, token: str) -> QuotaTicket | None:
        ticket = self.queue(resource).dequeue(token)
        if ticket is not None:
            resources = self._waiting[token]
            resources.discard(resource)
            if len(resources) < 2:
                self._several.pop(token, None)
            if not resources:
                del self._waiting[token]
        return ticket

    def related(self, resources: Iterable[str]) -> set[str]:
        """Return the resources, and those whose units may have become available with theirs."""
        found = set(resources)
        return found.union(*(self._waiting[token] for token in self._several)) if self._several else found

    def next_group(self, resource: str, now: float) -> dict[str, QuotaTicket]:
        """Return the tickets to grant next, by resource: those of one token, among them one of `resource`. Empty: none
        can be granted now, because units are missing or every waiter is held back."""
        queue = self.queue(resource)
        if queue.free <= 0 or not queue.tickets:
            return {}
        champion = self._champion(now) if self._several else ""
        takes = partial(self._takes, resource, champion, now) if self._several else takes_all
        for priority in queue.priorities():
            ticket = queue.next_in(priority, now, takes)
            first = queue.tickets.get(champion)
            if first is not None and first.priority == priority and (ticket is None or _rank(first) < _rank(ticket)):
                ticket = first
            if ticket is not None:
                group = {name: self.queue(name).tickets[ticket.token] for name in self._waiting[ticket.token]}
                return group if all(one.units <= self.queue(name).free for name, one in group.items()) else {}
        return {}

    def _champion(self, now: float) -> str:
        """Return the first token by priority and age that waits for several resources, and that neither caps and rates
        nor higher priorities hold back in any of them; "" without one. While nothing has changed, it is the last one.
        """
        seen = sum(queue.version for queue in self.queues.values()), now
        if self._champion_seen[0] != seen:
            champion = ""
            for *_, token in sorted(self._several.values()):
                queues = [self.queue(resource) for resource in self._waiting[token]]
                places = [(queue, queue.tickets[token]) for queue in queues]
                if all(
                    one.passes(ticket, now) and not one.is_outranked(ticket.priority, now) for one, ticket in places
                ):
                    champion = token
                    break
            self._champion_seen = seen, champion
        return self._champion_seen[1]

    def _takes(self, resource: str, champion: str, now: float, ticket: QuotaTicket) -> bool:
        """Return whether the ticket's other resources have room for it beside what they collect units for. The champion
        is no such ticket: it is first by its age."""
        if ticket.token == champion:
            return False
        for other in self._waiting[ticket.token]:
            if other == resource:
                continue
            queue = self.queue(other)
            sibling = queue.tickets[ticket.token]
            if sibling.units > queue.free or not queue.passes(sibling, now):
                return False
            if sibling.units + self._collected(queue, champion, now) > queue.free:
                return False
        return True

    def _collected(self, queue: Queue, champion: str, now: float) -> int:
        """Return the units that the resource's next ticket needs, the champion's or one of a single resource."""
        seen = queue.version, now
        if queue.resource not in self._first or self._first[queue.resource][0] != seen:
            self._first[queue.resource] = seen, queue.first(now, lambda one: len(self._waiting[one.token]) == 1)
        single, ticket = self._first[queue.resource][1], queue.tickets.get(champion)
        return max(single.units if single else 0, ticket.units if ticket else 0)
