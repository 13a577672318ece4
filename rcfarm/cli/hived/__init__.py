"""The commands on HiveD's configuration and state; `commands.py` lists them."""
