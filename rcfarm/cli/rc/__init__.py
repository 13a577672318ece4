"""The commands on replication controllers; `commands.py` lists them."""
