"""What every test gets: no profile but its own, deterministic examples in CI, and no GPU test where there is none."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_began = time.monotonic()
import torch  # noqa: E402  nearly every test needs it; how long it takes says how patient tests have to be

os.environ["TESTS_START_S"] = f"{time.monotonic() - _began:.2f}"  # before anything reads it

from patience import LIMIT_S, patient  # noqa: E402

from ringattn.profile.locations import home_folder  # noqa: E402
from ringattn.store import lookup  # noqa: E402

if not home_folder().is_dir():  # Triton would keep what it compiles in a folder called ~, here
    os.environ.setdefault("TRITON_HOME", str(Path(tempfile.gettempdir()) / f"triton-of-{os.getuid()}"))

# Too slow here says something about the machine, not about the code.
_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=30, derandomize=True, print_blob=True, **_UNTIMED)
settings.register_profile("dev", max_examples=30, **_UNTIMED)
settings.register_profile("thorough", max_examples=1000, **_UNTIMED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

_count = itertools.count()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: some wait for ranks, or for workers that hang, while others compute."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        own = item.get_closest_marker("timeout")
        item.add_marker(pytest.mark.timeout(patient(own.args[0]) if own else 2 * LIMIT_S), append=False)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    """A function may be compiled eight times in a process, whichever tests ask: 10 us give each its own eight."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _no_profiles_but_the_tests_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this machine's profile folders nor its ``RINGTUNE_*`` variables reach a test or what it starts."""
    nowhere = tmp_path_factory.getbasetemp() / f"config{next(_count)}"  # not made: a test that saves there makes it
    monkeypatch.setenv("XDG_CONFIG_HOME", str(nowhere / "user"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(nowhere / "system"))
    for name in [name for name in os.environ if name.startswith("RINGTUNE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _stores_have_time_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load a folder that was not read within a second was taken for one that is gone."""
    monkeypatch.setattr(lookup, "ANSWER_S", LIMIT_S)
