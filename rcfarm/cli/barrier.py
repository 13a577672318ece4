"""`rcfarm barrier`, also as the program `frameworkbarrier`: the init container that holds a gang until it is whole."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from controllers.barrier import FrameworkBarrier

STOPPED = 128 + signal.SIGTERM  # as a shell says it of a program that SIGTERM ended

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command("barrier")
def barrier(
    output_dir: Annotated[
        Path, typer.Option("--output-dir", metavar="DIR", help="Where the files go; it must exist.")
    ] = Path(),
    redact: Annotated[
        bool, typer.Option("--redact", help="Leave pod templates and annotations out of framework.json.")
    ] = False,
) -> None:
    """Wait until every task of this pod's Framework has an address, then write framework.json and injector.sh.

    The environment says which Framework and how long: FC_FRAMEWORK_NAMESPACE and FC_FRAMEWORK_NAME,
    BARRIER_CHECK_INTERVAL_SEC (10), BARRIER_CHECK_TIMEOUT_SEC (600), KUBE_APISERVER_ADDRESS, KUBECONFIG.
    Exits with 0 when the gang is whole, 201 when it is not in time, 210 when it never will be, 1 for other errors.
    """
    raise typer.Exit(_run(output_dir, redact))


def _run(output_dir: Path, redact: bool) -> int:
    # Process 1 of a container gets no signal that it did not ask for, and what is imported next takes a while.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(STOPPED))
    from controllers.barrier_config import COMPONENT_NAME, BadConfig, Config
    from controllers.barrier_exit import Exit, Outcome

    try:
        config = Config.from_environ(os.environ)
        from controllers.barrier import FrameworkBarrier

        return asyncio.run(_until_stopped(FrameworkBarrier(config, output_dir=output_dir, redact=redact)))
    except BadConfig as error:
        outcome = Outcome(Exit.PERMANENT, str(error))
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(Exit.CRASHED, type(error).__name__)
    print(f"{COMPONENT_NAME}: {outcome}", file=sys.stderr)
    return outcome.exit


async def _until_stopped(barrier: FrameworkBarrier) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await barrier.run()
    except asyncio.CancelledError:
        return STOPPED
