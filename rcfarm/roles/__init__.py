"""Composition root: a daemon is wired here and nowhere else."""
