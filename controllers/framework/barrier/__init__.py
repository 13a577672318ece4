"""The init container (uses only api/)."""
