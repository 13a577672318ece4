"""HiveD's file: its fields, reading it, checking and resolving it."""
