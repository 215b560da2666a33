"""Names under which a server answers: a guard against pages that rebind their own name.

A web page's owner can let its name point to 127.0.0.1; for the browser its scripts then share the
origin of a server on this machine. What such a request cannot hide is the name in ``Host``. Where
keys are asked for, a page has none; an address or a name without an owner cannot be rebound.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from tellin.entrypoints.openai.server_config import ServerConfig

OWNERLESS_SUFFIXES = (".localhost", ".internal")
"""Reserved: nobody can register a name below them (``host.docker.internal``)."""


def host_check(config: ServerConfig) -> Callable[[str], bool]:
    """Whether a request with this ``Host`` is answered.

    With ``allowed_hosts`` only those and names that cannot be rebound; without, the same for a
    server on loopback that asks for no keys, and any name elsewhere.
    """
    allowed = frozenset(_name_of(host) for host in config.allowed_hosts)
    is_guarded = bool(allowed) or (_is_loopback(config.host) and not config.api_keys)
    if not is_guarded or "*" in allowed:
        return lambda host: True
    return lambda host: (name := _name_of(host)) in allowed or _cannot_be_rebound(name)


def _name_of(host: str) -> str:
    """The name in lower case, without port, brackets and a final dot."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _cannot_be_rebound(name: str) -> bool:
    """Addresses, names of one label (also none, of old clients), and reserved ones."""
    return "." not in name.strip(".") or name.endswith(OWNERLESS_SUFFIXES) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
