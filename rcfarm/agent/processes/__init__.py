"""One process: start, adopt, supervise, its logs."""
