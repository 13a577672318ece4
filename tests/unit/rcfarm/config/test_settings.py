"""Settings: their sources, and the errors of wrong ones."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rcfarm.config.settings import (
    BadSettings,
    FarmSettings,
    Settings,
    WebSettings,
    default_farm_name,
)
from rcfarm.config.sources import line_of, load, variables
from rcfarm.roles.farm import scheduler_for
from scheduler.nodes import NodeTable
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys, is_dns_label

FILE = """\
# A farm of our own.
[store]
url = "consul://127.0.0.1:8500"

[farm]
name = "from-file"
node_lost_after = 90

[agent]
labels = { pool = "web", rack = "r1" }
port_range = [
  20000,
  21000,
]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rcfarm.toml"
    path.write_text(text)
    return path


def test_nothing_needs_to_be_set() -> None:
    """The defaults make sense together."""
    assert load() == Settings().checked()


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    """Each source overrides single values of the one before; settings without a value keep their defaults."""
    environ = {"RCFARM_FARM_NAME": "from-env", "RCFARM_STORE": "memory:", "RCFARM_FARM_QUARANTINE_AFTER": "7"}

    settings = load(write(tmp_path, FILE), environ=environ, overrides={"farm.name": "from-flag", "farm.selector": None})

    assert settings.farm.name == "from-flag"
    assert settings.store.url == "memory:"
    assert settings.farm.quarantine_after == 7
    assert settings.farm.node_lost_after == 90.0
    assert settings.agent.labels == {"pool": "web", "rack": "r1"}
    assert settings.agent.port_range == (20000, 21000)
    assert settings.farm.claim_grace == 10.0


def test_the_environment_can_set_every_kind_of_value() -> None:
    """Numbers, booleans, nothing, paths, maps and pairs are all written as plain text."""
    settings = load(
        environ={
            "RCFARM_SESSION_CHECK_TTL": "null",
            "RCFARM_AGENT_STOP_PODS_ON_EXIT": "true",
            "RCFARM_AGENT_STATE_DIR": "/srv/agent",
            "RCFARM_AGENT_LABELS": "pool=web, rack=r1",
            "RCFARM_AGENT_DEVICES": "gpu=8",
            "RCFARM_AGENT_PORT_RANGE": "20000,21000",
        }
    )

    assert settings.session.check_ttl is None
    assert settings.agent.stop_pods_on_exit is True
    assert settings.agent.state_dir == Path("/srv/agent")
    assert settings.agent.labels == {"pool": "web", "rack": "r1"}
    assert settings.agent.devices == {"gpu": 8}
    assert settings.agent.port_range == (20000, 21000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[farm]\nname = 'a'\nselectr = 'x'\n",
            r"rcfarm\.toml:3: farm\.selectr is not a setting; did you mean selector",
        ),
        ("\n[fram]\nname = 'a'\n", r"rcfarm\.toml:2: \[fram\] is not a section; did you mean farm"),
        ("farm = 3\n", r"rcfarm\.toml:1: farm is a section: write \[farm\]"),
        ("[farm]\n\n# no\nquarantine_after = 'five'\n", r"toml:4: farm\.quarantine_after: Expected `int`, got `str`"),
        ("[farm]\npool_strategy = 'packed'\n", r"toml:2: farm\.pool_strategy: Invalid enum value 'packed'"),
        ("[farm\n", r"rcfarm\.toml: not valid TOML: .*line 1"),
        (
            "[agent]\nport_range = [\n 1,\n 2]\nnodes = 'x'\n",
            r"toml:5: agent\.nodes is not a setting; did you mean node",
        ),
        ("[agent]\nlabels = [\n 1,\n]\n", r"toml:2: agent\.labels: Expected `object`, got `array`"),
    ],
)
def test_an_error_in_the_file_names_the_line_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    """Unknown keys, wrong types and broken syntax are refused, saying where and what would be right."""
    with pytest.raises(BadSettings, match=message):
        load(write(tmp_path, text))


def test_a_scheduler_is_ours_or_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point of `rcfarm.schedulers` gets the store, the keys and the nodes; a name that is not installed is
    refused at the start, with a list of those that are."""
    with pytest.raises(BadSettings, match=r"'ours' is neither label nor pool, nor an installed entry point .*none"):
        load(overrides={"farm.scheduler": "ours"})

    installed = tmp_path / "ours-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[rcfarm.schedulers]\nours = our_scheduler:make\n")
    (tmp_path / "our_scheduler.py").write_text("def make(store, keys, directory):\n    return store, keys, directory\n")
    monkeypatch.syspath_prepend(tmp_path)

    farm = load(overrides={"farm.scheduler": "ours"}).farm
    store, keys, nodes = EmbeddedStore(), Keys(), NodeTable(Keys())
    assert scheduler_for(farm, store, keys)(nodes) == (store, keys, nodes)  # type: ignore[comparison-overlap]
    with pytest.raises(BadSettings, match=r"'other' is neither .* \(ours\)"):
        load(overrides={"farm.scheduler": "other"})


def test_the_commands_and_places_of_analyses(tmp_path: Path) -> None:
    """Commands are lists of arguments, so that they are only given in a file."""
    text = """
[farm]
analysis_hosts = ["*.example.com", "prometheus:9090", "[::1]"]
[farm.analysis_commands]
smoke = ["/usr/local/bin/smoke-test", "--quick"]
"""
    farm = load(write(tmp_path, text)).farm
    assert farm.analysis_commands == {"smoke": ("/usr/local/bin/smoke-test", "--quick")}
    assert farm.analysis_hosts == ("*.example.com", "prometheus:9090", "[::1]")
    for wrong, message in (
        ('analysis_hosts = ["http://p/"]', r"farm\.analysis_hosts: 'http://p/' is not HOST or HOST:PORT"),
        ('analysis_hosts = ["p:0"]', r"farm\.analysis_hosts: 'p:0' is not HOST or HOST:PORT"),
        ("analysis_commands = {smoke = []}", r"farm\.analysis_commands: smoke must begin with the absolute path"),
        (
            'analysis_commands = {smoke = ["smoke"]}',
            r"farm\.analysis_commands: smoke must begin with the absolute path",
        ),
        ('analysis_commands = {"a b" = ["/a"]}', r"farm\.analysis_commands: 'a b' is not a DNS label"),
        ('analysis_commands = {smoke = "/a"}', r"toml:2: farm\.analysis_commands: Expected `array`, got `str`"),
    ):
        with pytest.raises(BadSettings, match=message):
            load(write(tmp_path, f"[farm]\n{wrong}\n"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that was asked for must be there."""
    with pytest.raises(BadSettings, match=r"nowhere\.toml: can't be read"):
        load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RCFARM_FARM_NAM": "x"}, "RCFARM_FARM_NAM is not a setting; did you mean RCFARM_FARM_NAME"),
        ({"RCFARM_FARM_FROBNICATE": "x"}, "RCFARM_FARM_FROBNICATE is not a setting"),
        ({"RCFARM_FRAM_NAME": "x"}, "RCFARM_FRAM_NAME is not a setting; did you mean RCFARM_FARM_NAME"),
        ({"RCFARM_FARM_QUARANTINE_AFTER": "many"}, "RCFARM_FARM_QUARANTINE_AFTER: farm.quarantine_after: Expected"),
    ],
)
def test_an_error_in_the_environment_names_the_variable(environ: dict[str, str], message: str) -> None:
    """A misspelt variable is not ignored."""
    with pytest.raises(BadSettings, match=message):
        load(environ=environ)


def test_variables_of_others_are_left_alone() -> None:
    """Variables that the agent sets for its pods, or that tests use, share the prefix and are no mistake."""
    load(environ={"RCFARM_SERVERS": "/s", "RCFARM_ADDRESS": "10.0.0.1", "RCFARM_POD": "web", "PATH": "/bin"})


def test_a_flag_with_a_wrong_value_is_named() -> None:
    """The message says which flag, whether its value or its name is wrong."""
    for name, message in (
        ("farm.nam", "farm.nam is not a setting; did you mean name"),
        ("fram.name", "did you mean farm"),
    ):
        with pytest.raises(BadSettings, match=f"flag for {name}: .*{message}"):
            load(overrides={name: "x"})
    with pytest.raises(BadSettings, match=r"flag for farm\.claim_grace: farm\.claim_grace: Expected `float`"):
        load(overrides={"farm.claim_grace": "soon"})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"session.ttl": 5}, r"session\.ttl: 5 s must be between 10 and 86400 s, as Consul requires"),
        ({"session.check_ttl": 10}, r"session\.check_ttl: 10.0 s must be .* below session\.ttl \(10 s\)"),
        ({"session.lock_delay": 61}, r"session\.lock_delay"),
        ({"farm.claim_grace": 2}, r"farm\.claim_grace: 2 s must not be below the session's lease \(3 s\)"),
        ({"session.check_ttl": "null", "session.ttl": 20}, r"claim_grace: 10 s must not be below the session's lease"),
        ({"farm.node_lost_after": 10}, r"farm\.node_lost_after: 10 s must be above agent\.session_ttl"),
        ({"farm.concurrent_commits": 25}, r"need 65 connections, above store\.max_connections \(64\)"),
        ({"store.max_connections": 200}, r"store\.max_connections: 200 must be between 1 and 199"),
        ({"store.root": "/rcfarm"}, r"store\.root: '/rcfarm' is not a key prefix"),
        ({"farm.name": "Farm 1"}, r"farm\.name: 'Farm 1' is not a DNS label"),
        ({"farm.selector": "a=b,,"}, r"farm\.selector: "),
        ({"farm.brake_share": 0}, r"farm\.brake_share"),
        ({"farm.resync_interval": "nan"}, r"farm\.resync_interval"),
        ({"farm.decision_log": "log"}, r"farm\.decision_log: 'log' must be the absolute path of a folder"),
        ({"farm.decision_log_max_size": 1000}, r"farm\.decision_log_max_size: 1000 must be at least 1048576 bytes"),
        ({"farm.decision_log_max_age": 0}, r"farm\.decision_log_max_age: 0 must be above zero"),
        ({"agent.port_range": "9,8"}, r"agent\.port_range"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: dict[str, object], message: str) -> None:
    """Relations between timings, and limits of the store, are checked before anything starts."""
    with pytest.raises(BadSettings, match=message):
        load(overrides=overrides)


def test_the_line_of_a_key_is_where_its_statement_starts() -> None:
    """Values over several lines, tables of tables and comments don't mislead."""
    text = '[a]\nx = """\ny = 1\n"""\n# y = 2\ny = 3\n\n[b.c]\nz = 4\n'

    assert line_of(text, "a", "x") == 2
    assert line_of(text, "a", "y") == 6
    assert line_of(text, "b") == 8
    assert line_of(text, "b", "c", "z") == 9


def test_the_default_farm_name_is_a_dns_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the host is called, the farm can start."""
    for host in ("Web_01.example.org", "-", "", "a" * 80):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        assert is_dns_label(default_farm_name())


def test_the_web_token_never_shows() -> None:
    """Settings may be logged as a whole."""
    assert "hunter2" not in repr(Settings(web=WebSettings(token="hunter2")))


def test_every_setting_has_a_variable_and_they_don_t_collide() -> None:
    """Two settings never share a variable."""
    names = variables()
    assert names["RCFARM_FARM_CLAIM_GRACE"] == ("farm", "claim_grace")
    assert len(set(names.values())) == len(names) - 1  # RCFARM_STORE is a second name


def test_settings_are_frozen() -> None:
    """A setting does not change under its reader."""
    with pytest.raises(AttributeError):
        FarmSettings().name = "x"  # type: ignore[misc]
    assert msgspec.structs.replace(FarmSettings(), name="x").name == "x"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"notify_url": "http://hooks.example.com/"}, "farm.notify_url: .* must begin with https://"),
        ({"notify_url": "https://key@hooks.example.com/"}, "leave out user, password"),
        ({"notify_url": "https://[::1"}, "is no URL"),
        ({"notify_url": "https://events.pagerduty.com/v2/enqueue"}, "farm.notify_key_file: is missing"),
        ({"notify_key_file": "key"}, "farm.notify_key_file: 'key' must be the absolute path"),
        ({"notify_after": "-1"}, "farm.notify_after: -1 must not be negative"),
    ],
)
def test_the_notifiers_settings_are_checked(settings: dict[str, str], message: str) -> None:
    """A key never travels readably, and what PagerDuty needs is asked for at the start."""
    with pytest.raises(BadSettings, match=message):
        load(overrides={f"farm.{field}": value for field, value in settings.items()})
