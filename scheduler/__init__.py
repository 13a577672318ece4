"""Deciding where things run: the Scheduler protocol and its implementations."""
