"""The file: read, check, resolve, diff, lint."""
