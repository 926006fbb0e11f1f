"""What every test needs before jax starts: the platform, two devices, hypothesis without chance."""

import os

# Set before jax is first imported, and only where nobody chose: JAX_PLATFORMS=cuda runs the tests
# on a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    # Two host devices let the sharding tests run on any machine.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=2".strip()

from collections.abc import Iterator  # noqa: E402

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from perex import _ways  # noqa: E402

# The same examples in each run, no deadline (a first call compiles), and no complaint about a slow
# machine. The `x64` fixture holds for all examples of a test alike, so the check against fixtures
# that hypothesis does not reset is off.
_COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
}
hypothesis.settings.register_profile("ci", derandomize=True, max_examples=20, **_COMMON)
# `pytest --hypothesis-profile=thorough` draws other and more examples, for a search by hand.
hypothesis.settings.register_profile("thorough", max_examples=500, **_COMMON)
hypothesis.settings.load_profile("ci")


@pytest.fixture
def x64() -> Iterator[None]:
    """Enable 64-bit types for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def forced_way(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Take one way to norms and sums wherever it exists, else the stream, else the array.

    Used through an indirect parameter, `WAYS` in `ways`.
    """
    way = request.param

    def choice(uses, batch_size, leaf_size, dense=False):
        ways = _ways.open_ways(uses, dense)
        chosen = next(name for name in (way, "stream", "keep") if name in ways)
        return _ways.Choice(chosen, "forced", None)

    monkeypatch.setattr(_ways, "choice", choice)
    return way
