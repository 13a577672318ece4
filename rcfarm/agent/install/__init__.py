"""Manifest and artifacts on this disk."""
