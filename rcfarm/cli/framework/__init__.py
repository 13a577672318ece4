"""`rcfarm framework …`."""
