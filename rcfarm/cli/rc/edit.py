"""Edit an RC in the operator's editor: `rcfarm rc edit`.

The editor gets the file that `rcfarm rc get -o yaml` prints. What is saved is checked, compared and applied as a file
is, on exactly the version that was opened. A file that is refused is opened again, with the error as a comment; when it
is given up, or the change can't be made, the text stays in a file that the error names.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.options import (
    DEFAULT_TIMEOUT,
    DEFAULT_WAIT_HEALTHY,
    Detach,
    RCId,
    Timeout,
    UsageProblem,
    WaitHealthy,
    Yes,
    confirm,
)
from rcfarm.cli.rc.change import ended, follow, show_differences
from rcfarm.operations import rc_apply
from rcfarm.operations.errors import BadInput, ChangedSincePlanned, RCRefused
from rcfarm.operations.rcs import Stored
from store.schema import audit

_MARK = "#:"  # begins the lines that are the command's own


class _Draft:
    """The file that the editor gets: the text below lines of the command's own."""

    def __init__(self, rc: str, text: str) -> None:
        handle, self.name = tempfile.mkstemp(prefix=f"rcfarm-{rc}-", suffix=".yaml")
        os.close(handle)
        self._path, self._rc = Path(self.name), rc
        self.text = text

    def open(self, problem: str) -> None:
        """Run the editor on the file, and wait for it. Raises `UsageProblem` when it can't be started, or fails."""
        head = [f"rc {self._rc}: save to apply, leave unchanged to cancel. A field that is left out keeps its value."]
        head += [f"error: {line}" for line in problem.splitlines()]
        self._path.write_text("".join(f"{_MARK} {line}\n" for line in head) + self.text)
        editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
        try:
            code = subprocess.run([*shlex.split(editor), self.name], check=False).returncode
            saved = self._path.read_text()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageProblem(f"the editor {editor!r} can't be used: {why}; set EDITOR to another") from error
        self.text = "".join(line for line in saved.splitlines(keepends=True) if not line.startswith(_MARK))
        self._path.write_text(self.text)  # so that an error names the operator's own lines
        if code:
            raise UsageProblem(f"the editor {editor!r} has failed with code {code}")

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


async def edit(
    cli: Cli,
    rc: RCId,
    yes: Yes = False,
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
    wait_healthy: WaitHealthy = DEFAULT_WAIT_HEALTHY,
) -> int:
    """Edit an RC's file in $VISUAL or $EDITOR, and apply it."""
    opened = await cli.rcs.read(rc)
    if opened.spec.deleting:
        raise RCRefused(f"rc {rc} is being deleted and accepts no changes")
    await audit.unlocked(cli.store, cli.keys, rc)  # refused before the work, not after it
    text = rc_apply.as_yaml(opened.spec, await cli.rcs.manifest(opened.spec.manifest))
    draft = _Draft(rc, text)
    try:
        planned = await _edited(cli, draft, opened)
        if planned is None:
            spec = opened.spec
        else:
            show_differences(cli.out, [planned])
            confirm("Apply 1 change?", yes=yes)
            spec = await rc_apply.carry_out(cli.rcs, planned)
    except BaseException:
        if draft.text == text:
            draft.remove()
        else:
            cli.out.note(f"rc {rc} was not changed; your text is in {draft.name}")
        raise
    draft.remove()
    if planned is None:
        cli.out.note(f"rc {rc}: nothing to change")
        return 0
    return ended(cli, [await follow(cli, spec, "changed", detach=detach, timeout=timeout, wait_healthy=wait_healthy)])


async def _edited(cli: Cli, draft: _Draft, opened: Stored) -> rc_apply.Planned | None:
    """Let the operator edit until the file is accepted. Return its effect on the version that was opened, None if it
    has none. Raises `BadInput`, `RCRefused`, `ChangedSincePlanned`."""
    rc, original, problem = opened.spec.id, draft.text, ""
    while True:
        before = draft.text
        await asyncio.to_thread(draft.open, problem)
        if draft.text == original or not draft.text.strip():
            return None
        try:
            documents = rc_apply.load(draft.name, draft.text.encode())
            if [document.rc_id for document in documents] != [rc]:
                advice = f"`rcfarm rc apply -f {draft.name}` creates others"
                raise BadInput(f"{draft.name}:1: id: another RC than rc {rc}; {advice}")
            planned = await rc_apply.plan(cli.rcs, documents[0])
        except (BadInput, RCRefused) as error:
            if draft.text == before or not sys.stdin.isatty():
                raise
            problem = re.sub(rf"^{re.escape(draft.name)}:\d+: ", "", str(error))  # this comment moves the lines
            continue
        if planned.old is None or planned.old.modify_index != opened.modify_index:
            raise ChangedSincePlanned(
                f"rc {rc} was changed in the meantime; `rcfarm rc edit {rc}` opens what it is now"
            )
        return None if planned.action == "none" else planned
