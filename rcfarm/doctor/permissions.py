"""Which trees of the store the token of this command may write, without writing."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from rcfarm.doctor.findings import Finding, error, ok, warning
from store.kv import ops
from store.kv.protocol import Denied, Store, StoreError
from store.schema.keys import Keys

_NEVER = 2**62  # an index that no entry has
_SINGLE_KEYS = ("brake", "meta", "history", "retention")


async def permissions(
    store: Store, keys: Keys, *, operators: Sequence[str], daemons: Sequence[str], what: str, who: str
) -> list[Finding]:
    """Probe trees, given by their first part. A tree of `operators` that is denied is an error, since their commands
    write it; one of `daemons` (`who`: their names) is a warning. `what` names all of them in the finding that all is
    well.

    A tree is probed by deleting a key that does not exist, and a single key by replacing a version that it never has:
    both need the right to write, and write nothing.
    """
    probe = f"doctor-{secrets.token_hex(8)}"
    found = []
    for tree in (*operators, *daemons):
        is_key = tree in _SINGLE_KEYS
        name = f"{keys.root}/{tree}" if is_key else f"{keys.root}/{tree}/{probe}"
        text = f"may not write {keys.root}/{tree}"
        try:
            await store.txn([ops.cas(name, b"", _NEVER) if is_key else ops.delete(name)])
        except Denied as problem:
            if tree in operators:
                found.append(error("permissions", f"{text}: {problem}", "operators need that; give key_prefix write"))
            else:
                found.append(warning("permissions", text, f"fine for operators; {who} need it"))
        except StoreError:
            pass  # refused by its condition, so it is permitted
    return found or [ok("permissions", f"this token may write {what}")]
