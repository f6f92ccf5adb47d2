"""HTTP proxies from the environment: http_proxy, https_proxy and no_proxy, parsed as urllib does."""

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
    """An HTTP proxy.

    Attributes:
        host: host name or address.
        port: port number.
        headers: headers that authenticate with the proxy.
    """

    host: str
    port: int
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of_environment(cls, scheme: str, netloc: str) -> Self | None:
        """Return the proxy to use for a server, or None.

        Args:
            scheme: scheme of the request, http or https.
            netloc: host and port of the server.
        Raises:
            StoreError: the environment names a kind of proxy that is not supported.
        """
        url = None if proxy_bypass(netloc) else getproxies().get(scheme)
        if not url:
            return None
        parts = urlsplit(url if "://" in url else f"//{url}", scheme="http")
        if parts.scheme not in ("http", scheme) or not parts.hostname:
            raise StoreError(
                f"{scheme}_proxy names a proxy of kind {parts.scheme!r} ({parts.hostname}); only http:// proxies work: "
                "give one, unset the variable, or name the server in no_proxy"
            )
        headers = {}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            headers["Proxy-Authorization"] = f"Basic {base64.b64encode(login).decode()}"
        return cls(parts.hostname, parts.port or 80, headers)

    def __str__(self) -> str:
        return f"the proxy {self.host}:{self.port}"

    def refusal(self, status: int, base_url: str) -> StoreError:
        """Return the error for a request that the proxy rejected."""
        if status == 407:
            return StoreError(
                f"{self} requires a name and a password for {base_url} (407): give them in the environment, as in "
                f"http_proxy=http://name:password@{self.host}:{self.port} and https_proxy, special characters as %40"
            )
        return StoreError(
            f"{self} rejects requests to {base_url} ({status}): check the URL, ask its administrator, or name the server in "
            "no_proxy"
        )
