"""Checks and their findings."""
