"""`rcfarm`, and `python -m rcfarm`."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from rcfarm.cli.main import run

    run()


if __name__ == "__main__":
    main()
