"""The role `rcfarm tasks`: its settings, its readiness, its metrics and its start without a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from controllers.tasks.engine.outbox import LogSink, WebhookSink
from rcfarm.config.kube import KubeSettings
from rcfarm.config.settings import BadSettings, Settings, TasksSettings
from rcfarm.roles.base import secret_store_of
from rcfarm.roles.tasks import (
    TasksRole,
    cluster_of,
    engine_settings,
    http_settings,
    run_tasks,
    sinks_of,
)
from store.consul.client import ConsulSettings
from store.consul.store import ConsulStore
from store.embedded.store import EmbeddedStore
from store.kube.api.errors import NoConfig, Unreachable
from store.kube.api.objects import PODS
from store.kv import ops
from store.schema.keys import Keys
from store.schema.quota import QuotaLimit
from store.schema.records import encode
from store.schema.tasks import TaskSpec
from tests.support.programs.cli import run
from tests.support.waiting import background, until


def _settings(**fields: Any) -> Settings:
    return msgspec.structs.replace(Settings(), tasks=TasksSettings(name="engine-1", data="memory:", **fields))


async def test_readiness_and_metrics_follow_the_engine() -> None:
    """It is not ready before it has joined; a scrape shows executions, calls and quotas without a series twice."""
    store, keys, registry = EmbeddedStore(), Keys(), CollectorRegistry()
    await store.txn([ops.create(keys.quota_limit("gpu"), encode(QuotaLimit(units=3)))])
    await store.txn([ops.create(keys.task_spec("stuck"), encode(TaskSpec(id="stuck", type="process")))])
    role = TasksRole(_settings(), store, registry)
    assert [condition.holds for condition in role.conditions()] == [False]

    async with background(role.run()):
        await until(lambda: len(role.conditions()) == 3 and all(each.holds for each in role.conditions()), within=10)
        assert role.stalled() == ""
        text = await until(lambda: _scraped(registry, 'rcfarm_quota_units{resource="gpu"} 3.0'), within=10)
        await until(lambda: _scraped(registry, "rcfarm_owned_executions "), within=10)

    lines = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
    await store.close()


async def test_a_sink_that_is_down_is_named_by_the_probe(unused_tcp_port: int) -> None:
    """With since when and the last error; the engine stays ready, and a scrape shows for how long."""
    store, keys, registry = EmbeddedStore(), Keys(), CollectorRegistry()
    for number in range(10):
        await store.txn(
            [ops.create(keys.task_spec(f"t{number}"), encode(TaskSpec(id=f"t{number}", type="always-fail")))]
        )
    webhook = f"http://127.0.0.1:{unused_tcp_port}/secret-path"
    role = TasksRole(_settings(webhooks=(webhook,)), store, registry)
    async with background(role.run()):
        await until(lambda: any(each.name == "sink webhook" for each in role.conditions()), within=10)
        [condition] = [each for each in role.conditions() if each.name == "sink webhook"]
        assert condition.holds
        assert "takes no events since" in condition.reason
        assert f"http://127.0.0.1:{unused_tcp_port}: " in condition.reason
        assert "secret-path" not in condition.reason
        assert not _scraped(registry, 'rcfarm_task_sink_down_seconds{sink="webhook"} 0.0\n')
        assert _scraped(registry, 'rcfarm_task_plugin_paused_seconds{plugin="process"} 0.0')
    await store.close()


def _scraped(registry: CollectorRegistry, wanted: str) -> str:
    text = generate_latest(registry).decode()
    return text if wanted in text else ""


def test_settings_reach_the_engine() -> None:
    """Plugins, limits and retention."""
    found = engine_settings(_settings(enabled=("process",), retention_count=5, call_timeout=7.0).tasks)
    assert (found.name, found.plugins.enabled, found.retention_count, found.call_timeout) == (
        "engine-1", ("process",), 5, 7.0,
    )  # fmt: skip


def test_events_go_where_the_settings_say(tmp_path: Path) -> None:
    """The log, and each webhook, with a token from a file; one that can't be read is an error that names it."""
    token = tmp_path / "token"
    token.write_text("secret\n")
    sinks = sinks_of(
        _settings(webhooks=("https://a.example", "https://b.example"), webhook_token_file=str(token)).tasks
    )
    assert [type(sink) for sink in sinks] == [LogSink, WebhookSink, WebhookSink]
    assert len({sink.name for sink in sinks}) == 3
    with pytest.raises(BadSettings, match=r"tasks\.webhook_token_file"):
        sinks_of(_settings(webhook_token_file=str(tmp_path / "none")).tasks)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("tasks.name=A", "tasks.name: 'A' is not a DNS label"),
        ("tasks.call_timeout=0", "tasks.call_timeout: 0 must be above zero"),
        ("tasks.claim_grace=1", "tasks.claim_grace: 1 s must not be below the session's lease"),
        ("tasks.webhooks=ftp://x", "tasks.webhooks: 'ftp://x' is not an http(s) URL"),
        ("tasks.push_listen=127.0.0.1:0", "tasks.push_listen, tasks.push_url and tasks.push_secret belong together"),
        ("tasks.secrets_prefix=", "tasks.secrets_prefix: must not be empty"),
        ("tasks.retention_age=-1", "tasks.retention_age: -1 must not be negative"),
    ],
)
def test_bad_settings_are_one_line(option: str, message: str) -> None:
    """The command ends with an error that names the setting."""
    ran = run("tasks", "--store", "memory:", "--set", option)
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert message in ran.err


def test_a_bad_remote_is_an_error_of_the_settings() -> None:
    """It ends the command, not the daemon."""
    with pytest.raises(BadSettings, match=r"tasks\.http_remotes"):
        http_settings(_settings(http_remotes={"jobs": {"nonsense": 1}}).tasks)


async def test_secrets_are_read_from_the_store_with_their_own_token(tmp_path: Path) -> None:
    """The engine's token stays what it was; without a token file there is no place in the store."""
    file = tmp_path / "token"
    file.write_text("of-secrets\n")
    setting = ("tasks.secrets_token_file", str(file))
    store = ConsulStore(ConsulSettings(token="of-the-engine"))
    found = secret_store_of(store, *setting)
    assert isinstance(found, ConsulStore)
    assert (found.settings.token, found.settings.token_file) == ("of-secrets", file)
    assert (store.settings.token, found.settings.url) == ("of-the-engine", store.settings.url)
    assert secret_store_of(store, "tasks.secrets_token_file", "") is None
    with pytest.raises(BadSettings, match="needs a store in Consul"):
        secret_store_of(EmbeddedStore(), *setting)
    file.write_text("")
    with pytest.raises(BadSettings, match=r"tasks\.secrets_token_file: .* holds no token"):
        secret_store_of(store, *setting)
    await found.close()
    await store.close()


async def test_the_cluster_is_that_of_the_section_kube() -> None:
    """Its server, with its limits; requests are counted."""
    registry = CollectorRegistry()
    kube = KubeSettings(server="http://127.0.0.1:9", call_timeout=3.0)
    async with cluster_of(kube, registry) as cluster:
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9"):
            await cluster.get_client().list(PODS, "default")
    assert b'rest_client_requests_total{code="<error>",host="127.0.0.1:9"' in generate_latest(registry)


def test_a_missing_cluster_ends_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before a daemon is started."""
    for variable in ("KUBECONFIG", "KUBE_APISERVER_ADDRESS", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(NoConfig, match="no Kubernetes API server is configured"):
        run_tasks(_settings(kubernetes=True))
