"""`rcfarm rc …`."""
