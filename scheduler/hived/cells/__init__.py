"""The state: trees, quotas, groups, and the only code that changes them."""
