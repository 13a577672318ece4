"""A draft: what changes of one transaction ask of the quotas, what is decided, and the operations that write it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from scheduler.quota.decide import Book, Wait
from store.kv import ops
from store.kv.protocol import Op
from store.kv.view import Record
from store.schema.audit import new_ulid
from store.schema.keys import Keys
from store.schema.quota import QuotaGrant, QuotaTicket
from store.schema.records import StoredRecord, encode

DECIDED_OPS = 48  # operations after which a draft grants no further tickets; the rest of a transaction is the caller's
OPS_PER_GRANT = 5  # at most: head and limit, the ticket's check and removal, the grant
MAX_RESOURCES = 8  # of one token
TOKENS_PER_RELEASE = 20

Place = tuple[str, str]  # resource and token
K = TypeVar("K")
V = TypeVar("V")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request for units of one resource. `order`: a ULID, the age; "" for now. `key`: the fair key."""

    resource: str
    token: str
    execution: str
    units: int = 1
    project: str = "default"
    domain: str = "default"
    key: str = "default"
    weight: float = 1.0
    priority: int = 0
    project_constraint: int | None = None
    namespace_constraint: int | None = None
    order: str = ""

    def ticket(self, order: str, since: float) -> QuotaTicket:
        """Return the waiter that the request is."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "resource"}
        return QuotaTicket(**(fields | {"order": order, "since": since}))


class Admission(msgspec.Struct, frozen=True):
    """The answer to requests of one token. `waits`: the reason per resource that lacks room; `infeasible`: the reason
    why they can't ever be granted, of which no ticket is kept."""

    granted: bool
    waits: Mapping[str, Wait] = {}
    infeasible: Wait | None = None


class Draft:
    """The tree as changes of one transaction see it, and what they decide. It edits the book in place, and `undo` takes
    all of that back: what was committed comes back through the view.

    A draft that does not decide only adds and removes tickets and removes grants, which can't conflict over a head."""

    def __init__(
        self,
        book: Book,
        executions: Mapping[str, Collection[Place]],
        stale: Collection[Place],
        now: float,
        *,
        decides: bool = True,
    ) -> None:
        self.now, self.decides = now, decides
        self.answered: set[Place] = set()  # granted to a caller that waits for the answer
        self._book, self._executions, self._stale = book, executions, stale
        self._undo: list[Callable[[], object]] = []
        self._relied: dict[Place, None] = {}
        self._granted: dict[Place, QuotaGrant] = {}
        self._added: dict[Place, QuotaTicket] = {}
        self._withdrawn: dict[Place, None] = {}  # tickets in the store
        self._revoked: dict[Place, None] = {}  # grants in the store
        self._heads: dict[str, None] = {}

    def admit(self, requests: Sequence[Request]) -> Admission:
        """Ask for units, all or none, of requests that share a token; what is not granted waits as tickets.

        A token that holds its units keeps them, whatever the limit is now. Raises `ValueError` for more than
        `MAX_RESOURCES` requests.
        """
        if len(requests) > MAX_RESOURCES:
            raise ValueError(f"{len(requests)} resources are requested at once; at most {MAX_RESOURCES} are possible")
        for request in requests:
            queue = self._book.queue(request.resource)
            if request.token in queue.grants:
                continue
            wait = queue.infeasible(request.ticket("", self.now))
            if queue.limit is None and not queue.unreadable:  # it has no units
                wait = Wait("Infeasible", f"resource {queue.resource} has no quota; set one with `rcfarm quota set`")
            if wait is not None:
                for each in requests:
                    self._withdraw(each.resource, each.token)
                return Admission(False, infeasible=wait)
        for request in requests:
            place = request.resource, request.token
            if request.token not in self._book.queue(request.resource).grants:
                self._enqueue(request)
            elif place not in self._granted:
                self._set(self._relied, place, None)
        self._decide({request.resource for request in requests})
        waiting = [each for each in requests if each.token not in self._book.queue(each.resource).grants]
        if not waiting:
            self.answered.update((each.resource, each.token) for each in requests)
            return Admission(True)
        lacking: dict[str, Wait] = {}
        fitting: dict[str, Wait] = {}
        for request in waiting:
            queue = self._book.queue(request.resource)
            ticket = queue.tickets[request.token]
            wait = queue.wait(ticket, self.now)
            lacks = ticket.units > queue.free or queue.held_back(ticket, self.now) is not None
            (lacking if lacks else fitting)[request.resource] = wait
        return Admission(False, lacking or fitting)

    def release(self, execution: str = "", places: Iterable[Place] = ()) -> int:
        """Return the units and withdraw the tickets of an execution, or of (resource, token) pairs, and grant the next
        tickets. Return how many pairs remain because the transaction is full: release these with another change.

        A token that holds nothing is not an error.
        """
        wanted = [*(self._executions.get(execution, ()) if execution else ()), *places]
        batch = wanted[:TOKENS_PER_RELEASE]
        for resource, token in batch:
            self._withdraw(resource, token)
            self._revoke(resource, token)
            if (resource, token) in self._stale:
                self._set(self._withdrawn, (resource, token), None)
        self._decide({resource for resource, _ in batch})
        return len(wanted) - len(batch)

    def heal(self, resources: Iterable[str], mine: Callable[[str], bool]) -> None:
        """Grant what fits, if a ticket of an execution that `mine` accepts is among it."""
        mark, before = self.mark(), set(self._granted)
        self._decide(resources)
        if not any(mine(grant.execution) for place, grant in self._granted.items() if place not in before):
            self.undo(mark)

    def ops(self, keys: Keys, view: Mapping[str, Record[StoredRecord]]) -> list[Op]:
        """Return the operations that make the decisions durable, if nothing that they rely on has changed."""

        def index(key: str) -> int:
            record = view.get(key)
            return record.modify_index if record else 0

        found: list[Op] = []
        for resource in self._heads:
            limit, head = keys.quota_limit(resource), keys.quota_head(resource)
            found.append(ops.check_index(limit, index(limit)))
            found.append(ops.cas(head, encode(self._book.queue(resource).head), index(head)))
        relied = [keys.quota_grant(*place) for place in self._relied]
        found += [ops.check_index(key, index(key)) for key in relied]
        found += [ops.delete(keys.quota_grant(*place)) for place in self._revoked]
        for place in self._withdrawn:
            key = keys.quota_ticket(*place)
            found.append(ops.check_index(key, index(key)))
            if place not in self._added:
                found.append(ops.delete(key))
        for place, ticket in self._added.items():
            if place not in self._revoked:
                found.append(ops.check_not_exists(keys.quota_grant(*place)))
            found.append(ops.put(keys.quota_ticket(*place), encode(ticket)))
        for place, grant in self._granted.items():
            key = keys.quota_grant(*place)
            found.append(ops.put(key, encode(grant)) if place in self._revoked else ops.create(key, encode(grant)))
        return found

    def mark(self) -> int:
        """Return the point that `undo` can go back to."""
        return len(self._undo)

    def undo(self, mark: int = 0) -> None:
        """Take back what was done since the mark."""
        while len(self._undo) > mark:
            self._undo.pop()()

    def _decide(self, resources: Iterable[str]) -> None:
        """Grant the next tickets of the resources, as many as fit and as a transaction may carry."""
        pending = deque(sorted(self._book.related(resources)))
        while self.decides and pending:
            group = self._book.next_group(pending[0], self.now)
            if not group:
                pending.popleft()
                continue
            if self.size() + OPS_PER_GRANT * len(group) > DECIDED_OPS:
                return
            for resource, ticket in group.items():
                self._grant(resource, ticket)
            if len(group) > 1:
                pending.extend(sorted(self._book.related(group).difference(pending)))

    def size(self) -> int:
        """Return the most operations that `ops` returns."""
        listed = len(self._granted) + len(self._revoked) + len(self._relied)
        return listed + 2 * (len(self._heads) + len(self._withdrawn) + len(self._added))

    def _grant(self, resource: str, ticket: QuotaTicket) -> None:
        queue, place = self._book.queue(resource), (resource, ticket.token)
        self._withdraw(resource, ticket.token)
        fields = msgspec.structs.asdict(ticket) | {"since": self.now}
        former, grant = queue.head, QuotaGrant(**fields)

        def restore() -> None:
            queue.revoke(ticket.token)
            queue.head = former

        queue.grant(grant)
        queue.head = queue.head_after(ticket.key, self.now)
        self._undo.append(restore)
        self._set(self._granted, place, grant)
        self._set(self._heads, resource, None)

    def _enqueue(self, request: Request) -> None:
        queue, place = self._book.queue(request.resource), (request.resource, request.token)
        waiting = queue.tickets.get(request.token)
        order = waiting.order if waiting else request.order or new_ulid(datetime.fromtimestamp(self.now, UTC))
        ticket = request.ticket(order, waiting.since if waiting else self.now)
        if ticket != waiting:
            self._withdraw(*place)
            self._book.enqueue(request.resource, ticket)
            self._undo.append(lambda: self._book.dequeue(*place))
            self._set(self._added, place, ticket)

    def _withdraw(self, resource: str, token: str) -> None:
        place, ticket = (resource, token), self._book.dequeue(resource, token)
        if ticket is None:
            return
        self._undo.append(lambda: self._book.enqueue(resource, ticket))
        if place in self._added:
            self._unset(self._added, place)
        else:
            self._set(self._withdrawn, place, None)

    def _revoke(self, resource: str, token: str) -> None:
        place, queue = (resource, token), self._book.queue(resource)
        grant = queue.revoke(token)
        if grant is None:
            return
        self._undo.append(lambda: queue.grant(grant))
        if place in self._granted:
            self._unset(self._granted, place)
        else:
            self._set(self._revoked, place, None)

    def _set(self, table: dict[K, V], key: K, value: V) -> None:
        if key not in table:
            table[key] = value
            self._undo.append(lambda: table.pop(key))

    def _unset(self, table: dict[K, V], key: K) -> None:
        value = table.pop(key)
        self._undo.append(lambda: table.__setitem__(key, value))
