"""One command per daemon: flags to settings; the Go programs' names and flags; `rcfarm ready`."""
