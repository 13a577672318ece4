"""Scheduling by reserved capacity."""
