"""One pod: decide, run, publish."""
