"""The commands on executions of tasks; `commands.py` lists them."""
