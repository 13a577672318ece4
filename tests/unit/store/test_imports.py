"""Libraries are imported without the slow modules that only their unused parts need, and stay whole for others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from store.imports import absent


def test_a_module_is_absent_only_within_the_context() -> None:
    """Its import fails there, and works afterwards; one that was imported before stays."""
    with absent("wave"), pytest.raises(ImportError):
        __import__("wave")
    assert __import__("wave").__name__ == "wave"
    with absent("json"):
        assert __import__("json") is sys.modules["json"]
    assert sys.modules["json"] is not None


@pytest.mark.parametrize("first", ["from store.consul.sessions import ConsulApi", "import consul"])
def test_the_endpoints_of_python_consul2_come_without_requests(first: str) -> None:
    """A program that uses the package's own client finds it whole, whichever of the two comes first."""
    code = (
        f"import sys\n{first}\nfrom store.consul.sessions import ConsulApi\n"
        "ConsulApi(None)\n"
        "if 'consul' not in sys.modules:\n    assert 'requests' not in sys.modules\n"
        "import consul, consul.base\nassert consul.Consul().agent and consul.base.NotFound is consul.NotFound\n"
        "assert type(ConsulApi(None).agent).__name__ == 'Agent'\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
