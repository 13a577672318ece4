"""The protocol in process, durable in SQLite."""
