"""The command line for operators.

`main.py` holds the tree of commands and imports almost nothing, so that `rcfarm --help` and completion are quick: a
group (`rc/`, `framework/`, `hived/`, `node.py`) or command is imported when it is run. `kit/` turns an async function
into a command: it adds the common options, opens the store or the cluster, and maps errors to one clear line and an
exit code. `kit/json_views.py` declares the JSON output; its fields are a contract.
"""

ERROR = 1
NOT_FULLY_PLACED = 2  # or not healthy
NOT_FINISHED = 2  # a task, within the time that was given
CHANGED_SINCE_PLANNED = 3
