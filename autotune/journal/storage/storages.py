"""Optuna storages by the URL or the path that a user gives: opening one, and what its errors mean.

Three kinds: a database by its SQLAlchemy URL, Optuna's gRPC proxy in front of one (``grpc://HOST:PORT``), and a journal
in a folder that nodes share, by its path.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, OptunaError, StorageInternalError
from optuna.storages import BaseStorage, JournalStorage

from autotune.exit_codes import ExitCode, ProbeFailure, UsageFailure
from autotune.journal.attributes import NO_JOURNAL
from ringattn.wording import needs_package

from .shared_file import SharedJournalFile, is_journal

GRPC = "grpc://"
SUFFIX = ".journal"
CONNECT_S = 10.0
_ATTEMPTS = 5  # at making tables, which several workers begin with at once
TAKEN = (
    "give postgresql://USER@HOST/DATABASE, sqlite:///FILE.db, another URL that SQLAlchemy takes, "
    f"grpc://HOST:PORT of Optuna's gRPC proxy, or the path of a journal, FILE{SUFFIX}"
)


def is_url(place: str) -> bool:
    """Return whether a storage is given by a URL, else it is a path."""
    return "://" in place


def shown(place: str) -> str:
    """Return a storage as messages name it."""
    return f"--storage {without_password(place)}"


def without_password(url: str) -> str:
    """Return a URL as messages show it."""
    shown = re.sub(r"(//[^:/@]*):.*@", r"\1:***@", url)  # up to the last @: one of the password may stand as it is
    return re.sub(r"([?&;]\w*(?:password|passwd|pwd|key)=)[^&;]*", r"\1***", shown, flags=re.IGNORECASE)


def storage_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a storage that cannot be reached or used any more, which are no mistake of ours.

    A package that is not loaded has raised none; loading SQLAlchemy takes 0.4 s, which a journal in a file needs not.
    """
    errors: tuple[type[Exception], ...] = (StorageInternalError,)
    if "sqlalchemy" in sys.modules:
        errors += (sys.modules["sqlalchemy"].exc.SQLAlchemyError,)
    if "grpc" in sys.modules:
        errors += (sys.modules["grpc"].RpcError, ConnectionError)
    return errors


def reason_of(error: BaseException, place: str) -> str:
    """Return the first line of what an error says, without the password of the URL."""
    details = getattr(error, "details", None)  # of gRPC, whose text is many lines
    text = str(details() if callable(details) else error) or type(error).__name__
    return text.splitlines()[0].replace(place, without_password(place))


def check_storage(place: str) -> None:
    """Raise what ``open_storage`` raises for it, as far as that shows without writing; no file is made."""
    if not is_url(place):
        _check_path(place)
    elif place.startswith(GRPC):
        close_storage(_open_proxy(place))
    else:
        _check_database(place)


def open_storage(place: str) -> BaseStorage:
    """Return the storage of a URL or a path, which can be read and written.

    UsageFailure for what names none, ProbeFailure with the exit code "unavailable" for a server that does not answer.
    """
    if not is_url(place):
        _check_path(place)
        try:
            return JournalStorage(SharedJournalFile(Path(place)))
        except OSError as error:
            raise ProbeFailure(f"{shown(place)}: cannot be opened ({error.strerror}); name another file") from error
        except NO_JOURNAL as error:
            raise ProbeFailure(f"{shown(place)}: is no journal of Optuna; name another file") from error
    if place.startswith(GRPC):
        return _open_proxy(place)
    _check_database(place)
    unusable: tuple[type[Exception], ...] = (OptunaError, RuntimeError, ValueError, *storage_errors())
    for attempt in range(_ATTEMPTS):
        try:
            database = optuna.storages.RDBStorage(place, engine_kwargs={"connect_args": _connect_args(place)})
            return optuna.storages.get_storage(database)
        except unusable as error:
            if attempt == _ATTEMPTS - 1:
                raise not_opened(place, error) from error
            time.sleep(0.1 * 2**attempt)  # another worker makes the tables
    raise AssertionError("the last attempt returns or raises")


def not_opened(place: str, error: Exception) -> ProbeFailure:
    """Return the error for a database in which Optuna cannot begin."""
    return ProbeFailure(
        f"{shown(place)}: cannot be opened ({reason_of(error, place)}); name a database that this user may write, and "
        "whose tables are Optuna's or none"
    )


def close_storage(storage: BaseStorage) -> None:
    """End the connections of a storage."""
    if isinstance(storage, optuna.storages.GrpcStorageProxy):
        storage.close()
    else:
        storage.remove_session()


def refuse_journal_behind_proxy(storage: BaseStorage, place: str) -> None:
    """Raise UsageFailure where the gRPC proxy stands before a journal or memory; some trial was made in it before.

    A journal takes one thread for a trial from its beginning to its end, which a proxy does not keep to: trials are
    lost or told twice (optuna#6084). Databases number from 1, the others from 0.
    """
    if not place.startswith(GRPC):
        return
    with contextlib.suppress(KeyError):
        storage.get_trial(0)
        raise UsageFailure(
            f"{shown(place)}: its server keeps the studies in a journal or in memory, behind which trials get lost; "
            "start it with get_storage(URL) of a database, or name the journal's path"
        )


def _check_path(place: str) -> None:
    path = Path(place)
    if not place.endswith(SUFFIX):
        raise UsageFailure(f"{shown(place)}: names no storage; {TAKEN}")
    if not path.absolute().parent.is_dir():
        raise UsageFailure(
            f"{shown(place)}: the folder {path.absolute().parent} does not exist; make it or name another"
        )
    if path.exists() and not path.is_file():
        raise UsageFailure(f"{shown(place)}: is not a regular file; name another")
    if path.exists() and not is_journal(path):  # of which a worker would cut off what looks half-written
        raise UsageFailure(f"{shown(place)}: is no journal of Optuna; name another file")


def _open_proxy(place: str) -> BaseStorage:
    match = re.fullmatch(r"grpc://([^:/@]+|\[[0-9A-Fa-f:]+\]):(\d{1,5})/?", place)
    if match is None:
        raise UsageFailure(f"{shown(place)}: names no proxy; give grpc://HOST:PORT")
    try:
        import google.protobuf  # noqa: F401
        import grpc  # noqa: F401
    except ImportError as error:
        raise _not_installed(place, "grpcio and protobuf") from error
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        proxy = optuna.storages.GrpcStorageProxy(host=match[1], port=int(match[2]))
    try:
        proxy.wait_server_ready(timeout=CONNECT_S)
    except ConnectionError as error:
        proxy.close()
        raise _unreachable(place, f"no answer in {CONNECT_S:.0f} s") from error
    return proxy


def _connect_args(place: str) -> dict[str, Any]:
    """Return the limit on a connection's beginning: psycopg waits 130 s for a server that accepts and says nothing."""
    import sqlalchemy

    url = sqlalchemy.make_url(place)
    takes_it = url.get_dialect().driver in ("psycopg", "psycopg2", "pymysql", "mysqldb")
    return {"connect_timeout": round(CONNECT_S)} if takes_it and "connect_timeout" not in url.query else {}


def _check_database(place: str) -> None:
    import sqlalchemy
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

    try:
        engine = sqlalchemy.create_engine(place, connect_args=_connect_args(place))
    except ImportError as error:
        raise _not_installed(place, error.name or str(error)) from error
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise UsageFailure(f"{shown(place)}: is no URL of a storage ({reason_of(error, place)}); {TAKEN}") from error
    with contextlib.closing(_Disposed(engine)):
        file = engine.url.database if engine.dialect.name == "sqlite" else None
        if file is not None and file not in ("", ":memory:") and not Path(file).exists():
            if not file.startswith("file:") and not Path(file).absolute().parent.is_dir():
                raise UsageFailure(
                    f"{shown(place)}: the folder of {file} does not exist; make it or name another database"
                )
            return
        try:
            engine.connect().close()
        except SQLAlchemyError as error:
            raise _unreachable(place, reason_of(error, place)) from error


class _Disposed:
    """Closes an engine like a file."""

    def __init__(self, engine: object) -> None:
        self.close = engine.dispose  # type: ignore[attr-defined]


def _not_installed(place: str, package: str) -> ProbeFailure:
    if place.startswith((GRPC, "postgresql")):
        return ProbeFailure(f"{shown(place)}: {needs_package('such storages', package, 'cluster')}")
    return ProbeFailure(f"{shown(place)}: its driver, {package}, is not installed; install it, or name another storage")


def _unreachable(place: str, why: str) -> ProbeFailure:
    return ProbeFailure(
        f"{shown(place)}: cannot be reached ({why}); see that its server runs, and that host, port, user and database "
        "are right",
        ExitCode.UNAVAILABLE,
    )


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Keep Optuna from announcing every study on stderr, which a progress display cannot use."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
