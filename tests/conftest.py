"""One strict setting for every test: eight simulated CPU devices, no accelerator, no x64, no autotuning of compilers.

Everything here has to happen before JAX looks for devices.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax  # noqa: E402
import pytest  # noqa: E402

from spmd_auto.mesh.simulate import simulate_devices  # noqa: E402
from spmd_auto.verify.targets import parse_target  # noqa: E402

DEVICES = 8

simulate_devices(DEVICES)
jax.config.update("jax_enable_x64", False)

try:
    import hypothesis
except ImportError:
    pass
else:
    # The same examples each time; deadlines would measure the compiler.
    hypothesis.settings.register_profile("spmd_auto", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("spmd_auto")


@pytest.fixture(autouse=True)
def _no_leaks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    """Tests see neither the user's cache nor each other's, and leave no global JAX settings behind."""
    own = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    monkeypatch.setenv("SPMD_AUTO_CACHE", str(tmp_path_factory.getbasetemp() / "cache" / own))
    x64 = jax.config.read("jax_enable_x64")
    yield
    assert jax.config.read("jax_enable_x64") == x64, "a test left jax_enable_x64 changed"


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """The simulated CPU devices."""
    found = jax.devices("cpu")
    assert len(found) == DEVICES, "something started JAX before conftest could set the number of devices"
    return found


@pytest.fixture(scope="session")
def require_target():
    """Call with a target's text: skips the test where its compiler isn't installed, fails where CI says it must be."""

    def require(text: str):
        target = parse_target(text)
        if not target.is_installed():
            message = f"the compiler for {target} is not installed ({target.requirement})"
            if os.environ.get("SPMD_AUTO_REQUIRE_COMPILERS") == "1":
                pytest.fail(message)
            pytest.skip(message)
        return target

    return require


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-errors", action="store_true", help="write docs/errors.md from the errors met")
    parser.addoption("--every", type=int, default=1, metavar="N", help="of each test with many cases, one in N of them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--every N` the first case of each test and every N-th after it."""
    cases: Counter[str] = Counter()
    kept, dropped = [], []
    for item in items:
        name = item.nodeid.split("[")[0]
        (dropped if cases[name] % config.getoption("--every") else kept).append(item)
        cases[name] += 1
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-errors"):
        from tests import refused

        refused.LIST.write_text(refused.as_markdown())
