"""The commands that run daemons; the Go programs' names and flags; `rcfarm ready`."""
