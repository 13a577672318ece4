"""`rcfarm barrier`, also installed as `frameworkbarrier`: the init container that waits for the whole gang."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from rcfarm.cli.kit.help import HelpfulCommand

STOPPED = 128 + signal.SIGTERM  # as shells report a program ended by SIGTERM

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command("barrier", cls=HelpfulCommand)
def barrier(
    output_dir: Annotated[
        Path, typer.Option("--output-dir", metavar="DIR", help="Where the files go; it must exist.")
    ] = Path(),
    redact: Annotated[
        bool, typer.Option("--redact", help="Leave pod templates and annotations out of framework.json.")
    ] = False,
) -> None:
    """Wait until every task of this pod's Framework has an address, then write framework.json and injector.sh.

    Configured by environment variables: FC_FRAMEWORK_NAMESPACE and FC_FRAMEWORK_NAME,
    BARRIER_CHECK_INTERVAL_SEC (10), BARRIER_CHECK_TIMEOUT_SEC (600), KUBE_APISERVER_ADDRESS, KUBECONFIG.
    Exits with 0 when the gang is whole, 201 on timeout, 210 when it can never be whole, 1 for other errors.
    """
    # The kernel delivers to process 1 of a container only signals that it handles, and the imports below take a while.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(STOPPED))
    from controllers.framework.barrier.barrier import COMPONENT_NAME, BadConfig, Config, Exit, FrameworkBarrier, Outcome

    async def until_stopped(config: Config) -> int:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            return await FrameworkBarrier(config, output_dir=output_dir, redact=redact).run()
        except asyncio.CancelledError:
            return STOPPED

    failure = None
    try:
        code = asyncio.run(until_stopped(Config.from_environ(os.environ)))
    except BadConfig as error:
        failure = Outcome(Exit.PERMANENT, str(error))
    except Exception as error:
        traceback.print_exc()
        failure = Outcome(Exit.CRASHED, type(error).__name__)
    if failure is not None:
        print(f"{COMPONENT_NAME}: {failure}", file=sys.stderr)
        code = failure.exit
    raise typer.Exit(code)
