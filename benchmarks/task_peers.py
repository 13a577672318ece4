"""400 light tasks on DBOS (SQLite) and on Prefect, for `benchmarks.tasks`; run by the Python of an environment that has
them: `python benchmarks/task_peers.py dbos|prefect COUNT` in an empty directory. Prints one JSON line.

DBOS: one queue of concurrency 50 with its default polling. Prefect: one flow that submits the tasks to its default
thread pool, with the temporary server that it starts; `server_seconds` is a flow of one task before it.
"""

import json
import sys
import time


def dbos(count: int) -> dict[str, object]:
    from dbos import DBOS

    DBOS(config={"name": "light", "system_database_url": "sqlite:///dbos.sqlite", "run_admin_server": False})

    @DBOS.workflow()
    def light(number: int) -> int:
        return number

    DBOS.launch()
    DBOS.register_queue("light", global_concurrency=50)
    began = time.perf_counter()
    handles = [DBOS.enqueue_workflow("light", light, number) for number in range(count)]
    assert sum(handle.get_result() for handle in handles) == count * (count - 1) // 2
    seconds = time.perf_counter() - began
    DBOS.destroy()
    return {"seconds": round(seconds, 2)}


def prefect(count: int) -> dict[str, object]:
    from prefect import flow, task

    @task
    def light(number: int) -> int:
        return number

    @flow
    def run(tasks: int) -> int:
        return sum(future.result() for future in light.map(range(tasks)))

    began = time.perf_counter()
    run(1)
    started = time.perf_counter()
    assert run(count) == count * (count - 1) // 2
    seconds = time.perf_counter() - started
    return {"seconds": round(seconds, 2), "server_seconds": round(started - began, 2)}


if __name__ == "__main__":
    print(json.dumps({"dbos": dbos, "prefect": prefect}[sys.argv[1]](int(sys.argv[2]))), flush=True)
