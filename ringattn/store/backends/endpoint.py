"""Server behind a URL, asked for a connection before the client that talks to it is imported.

That import takes 0.4 s for S3, and a client repeats what fails for minutes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ringattn.errors import StoreError
from ringattn.store.bounded import ANSWER_S
from ringattn.store.names import shown_url

_PORTS = {"http": 80, "https": 443}
_S3 = ("s3", "s3a")
_S3_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # in botocore's order


def endpoint_of(place: str, environ: Mapping[str, str], configured: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the host and port that a client connects to for a URL; None where they are not known for sure.

    They are for http, and for S3 where a variable or fsspec's own configuration, ``configured``, names an endpoint. Not
    where a proxy is between.
    """
    scheme = place.split("://")[0]
    url = place if scheme in _PORTS else ""
    if scheme in _S3:
        if configured.keys() - {"endpoint_url"}:  # it could lead elsewhere
            return None
        url = configured.get("endpoint_url") or next((environ[name] for name in _S3_VARIABLES if environ.get(name)), "")
    try:
        parts = urlsplit(str(url))
        host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:  # no number for a port: the client says so
        return None
    if not host or port is None:
        return None
    proxies = getproxies()
    if (parts.scheme in proxies or "all" in proxies) and not proxy_bypass(host):
        return None
    return host, port


def check_reachable(place: str, limit_s: float = ANSWER_S) -> None:
    """Raise StoreError where the server behind a URL takes no connection within ``limit_s``; nothing is sent."""
    scheme = place.split("://")[0]
    if scheme not in (*_PORTS, *_S3):
        return
    try:
        from fsspec.config import conf
    except ImportError:  # opening the store says so
        return
    endpoint = endpoint_of(place, os.environ, conf.get(scheme, {}))
    if endpoint is None:
        return
    host, port = endpoint
    try:
        socket.create_connection(endpoint, timeout=limit_s).close()
    except TimeoutError:
        raise StoreError(shown_url(place), f"did not answer within {limit_s:g} s") from None
    except OSError as error:
        raise StoreError(shown_url(place), f"{host} port {port} cannot be reached: {error.strerror or error}") from None
