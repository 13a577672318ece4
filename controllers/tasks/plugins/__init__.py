"""The built-in plugins of the task engine."""
