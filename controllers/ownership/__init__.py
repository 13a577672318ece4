"""Ownership: processes share items; each item is claimed, fenced, handed over and rescued by its lock in the store."""
