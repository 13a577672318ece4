"""The command line for operators.

`main.py` holds the tree of commands and imports almost nothing, so that `rcfarm --help` and completion are quick; each
group (`rc.py`, `node.py`, `brake.py`) is imported when one of its commands is run. `command.py` turns an async
function into a command: it adds the common options, opens the store and maps errors to one clear line and an exit
code. `views.py` declares the JSON output; its fields are a contract.

Exit codes: 0 done, 1 error, 2 not fully placed or not healthy, 3 changed since planned.
"""
