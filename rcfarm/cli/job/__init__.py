"""The commands on training jobs; `commands.py` lists them."""
