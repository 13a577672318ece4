"""Verdicts on a pod."""
