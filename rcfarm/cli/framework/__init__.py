"""The commands on Frameworks; `commands.py` lists them."""
