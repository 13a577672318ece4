"""Frameworkcontroller.yaml and podFailureSpec."""
