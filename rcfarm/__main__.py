"""`rcfarm`, and `python -m rcfarm`."""

from __future__ import annotations

import gc
import os
import sys


def main() -> None:
    """Run the command line; in a container of a Framework's pod that is given no command, the barrier."""
    if sys.argv[1:] == ["ready"]:  # the health check of every container, every few seconds
        from rcfarm.daemon.readiness import BadListener, check

        try:
            sys.exit(check())
        except BadListener as error:
            sys.exit(f"error: {error}")

    gc.disable()  # until the command is imported: looking for garbage in what stays takes an eighth of the start
    from rcfarm.cli.daemons.drop_in import arguments
    from rcfarm.cli.main import run

    sys.argv[1:] = arguments(sys.argv[1:], os.environ)
    run()


if __name__ == "__main__":
    main()
