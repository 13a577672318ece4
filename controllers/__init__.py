"""Control loops and what they share: the rate-limited work queue."""
