"""botocore's clients of this process: they write, list and delete.

They are made when first needed, and again in a child: connections of two processes would be one. Nothing is tried again there, as
retry.py does that. Checksums that came to S3 in 2025 are not sent, as many servers reject them: a body is covered by the SHA-256 in
its signature.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
import os
from typing import TYPE_CHECKING, Any

from shmload.storage.credentials import library

if TYPE_CHECKING:
    from shmload.storage.client import Client

__all__ = ["Boto"]

_CONNECTIONS = 32  # kept by one client: as many threads as may share a store


class Boto:
    """Clients for one `Client`, picklable by leaving them out.

    Args:
        given: boto3's client, used as it is in the process that gave it.
    """

    def __init__(self, given: Any = None) -> None:
        self._given = given
        self._made: dict[float, Any] = {}
        self._pid = os.getpid()

    def client(self, client: Client, wait_s: float) -> Any:
        """botocore's client.

        Args:
            client: whose endpoint, region and credentials it has.
            wait_s: how long a server may take to answer.
        """
        if self._pid != os.getpid():
            self.__init__()  # type: ignore[misc]  # a child begins anew
        if self._given is not None:
            return self._given
        if wait_s not in self._made:
            self._made[wait_s] = _made(client, wait_s)
        return self._made[wait_s]

    def close(self) -> None:
        """Closes idle connections of what was made here."""
        if self._pid == os.getpid():
            for made in self._made.values():
                made.close()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # as if it were made here


def _made(client: Client, wait_s: float) -> Any:
    _keep_quiet()
    anonymous = client.credentials.anonymous
    config = library("botocore.config").Config(
        signature_version=library("botocore").UNSIGNED if anonymous else "s3v4",
        connect_timeout=client.patience.stall_s,
        read_timeout=wait_s,
        retries={"total_max_attempts": 1, "mode": "standard"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        max_pool_connections=max(_CONNECTIONS, client.parallel),
        s3={"addressing_style": "path" if client.path_style else "virtual", "payload_signing_enabled": True},
    )
    session = library("botocore.session").Session()
    session.register_component("data_loader", _loader())
    session._credentials = client.credentials.of_botocore()  # create_client takes keys, but none that are renewed
    made = session.create_client(
        "s3",
        region_name=client.region,
        endpoint_url=client.endpoint,
        verify=client.ca_file,
        config=config,
    )
    # many servers never answer "Expect: 100-continue", which makes each writing request wait a second
    made.meta.events.unregister("before-call.s3", library("botocore.handlers").add_expect_header)
    made.meta.events.register("before-call.s3.DeleteObjects", _with_md5)
    made.meta.events.register("before-call.s3", _not_redirected)
    return made


@functools.cache
def _loader() -> Any:
    """The descriptions of S3, half of what a client costs: read once (0.06 s, then 0.03 s a client)."""
    return library("botocore.loaders").create_loader()


def _with_md5(params: dict[str, Any], **_: object) -> None:
    """Lists to delete need a checksum; the old one is known to all servers, botocore's CRC-32 is not (boto3's issue 4400)."""
    md5 = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(md5).decode()
    params["context"].pop("checksum", None)


def _not_redirected(params: dict[str, Any], **_: object) -> None:
    """A bucket of another region is an error that names it, as in reading: botocore would look for it and ask there by itself."""
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


def _keep_quiet() -> None:
    """botocore's debug log has session tokens in it: it is not switched on along with everyone else's, but by its own name."""
    log = logging.getLogger("botocore")
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
