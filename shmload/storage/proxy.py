"""Proxies as the environment names them: http_proxy, https_proxy, no_proxy, as urllib reads them.

A request to an https:// server goes through a tunnel (CONNECT), one to an http:// server is handed over whole, its target a URL. A
name and a password in the proxy's URL go to the proxy with each of the two, never to the server, and stand in no error.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from shmload.errors import StoreError

__all__ = ["Proxy"]


@dataclass(frozen=True)
class Proxy:
    """One proxy.

    Attributes:
        secure: it is spoken to over TLS; only where requests are handed over whole.
        headers: that say who asks.
    """

    host: str
    port: int
    secure: bool = False
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of_environment(cls, scheme: str, netloc: str) -> Self | None:
        """The proxy between here and a server; None: there is none.

        Raises:
            StoreError: it is of a kind that is not known here.
        """
        told = None if proxy_bypass(netloc) else getproxies().get(scheme)
        if not told:
            return None
        parts = urlsplit(told if "://" in told else f"//{told}", scheme="http")
        place = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StoreError(
                f"{scheme}_proxy names a proxy of kind {parts.scheme!r} ({place}): http:// proxies are known here; unset it, name "
                "the server in no_proxy, or give one of those"
            )
        headers = {}
        if parts.username is not None:
            who = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            headers["Proxy-Authorization"] = f"Basic {base64.b64encode(who).decode()}"
        secure = parts.scheme == "https" and scheme == "http"
        return cls(parts.hostname, parts.port or (443 if secure else 80), secure, headers)

    def __str__(self) -> str:
        return f"the proxy {self.host}:{self.port}"

    def refusal(self, status: int, base_url: str) -> StoreError:
        """The error for a proxy that does not let a request through."""
        if status == 407:
            return StoreError(
                f"{self} wants a name and a password for {base_url} (407): give them in the environment, as in "
                f"http_proxy=http://name:password@{self.host}:{self.port} and https_proxy, special characters as %40"
            )
        return StoreError(
            f"{self} does not let through to {base_url} ({status}): look at the URL, ask who runs it, or name the server in "
            "no_proxy"
        )
