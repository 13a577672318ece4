"""The Framework operator: gangs of tasks run to completion, wire compatible with frameworkcontroller."""
