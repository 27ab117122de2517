"""Storages whose packages are not installed: the line names the package, and what brings it."""

from __future__ import annotations

import sys

import pytest

from autotune.exit_codes import ProbeFailure
from autotune.journal.storage.storages import check_storage

EXTRA = "install the extra: pip install '.[cluster]'"


@pytest.mark.parametrize(
    ("place", "package", "told"),
    [
        ("grpc://host:13000", "grpc", f"such storages need grpcio and protobuf; {EXTRA}"),
        ("postgresql+psycopg://me@host/studies", "psycopg", f"such storages need psycopg; {EXTRA}"),
        ("mysql+pymysql://me@host/studies", "pymysql", "its driver, pymysql, is not installed; install it"),
    ],
)
def test_the_package_is_named(place: str, package: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ProbeFailure) as caught:
        check_storage(place)
    assert str(caught.value).startswith(f"--storage {place}: {told}")
