"""botocore's clients, used for writing, listing and deleting.

`S3Store` creates them on first use, one for each process and time limit, because two processes cannot share a connection. They do
not retry, because retry.py does. The checksums that S3 introduced in 2025 are not sent, because many servers reject them; the
SHA-256 in the request's signature covers the body.
"""

from __future__ import annotations

import functools
import logging
import ssl
from typing import TYPE_CHECKING, Any

from shmload.storage.botocore_modules import library

if TYPE_CHECKING:
    from shmload.storage.s3_endpoint import S3Endpoint

__all__ = ["create_botocore_client"]

_CONNECTIONS = 32  # idle connections of one client: as many as threads that may share a store


def create_botocore_client(client: S3Endpoint, wait_s: float) -> Any:
    """Return a new client of botocore for writing, listing and deleting.

    Args:
        client: the store's endpoint, credentials and policies.
        wait_s: seconds to wait for an answer.
    """
    _keep_quiet()
    config = library("botocore.config").Config(
        signature_version=library("botocore").UNSIGNED if client.credentials.anonymous else "s3v4",
        connect_timeout=client.retry_policy.stall_s,
        read_timeout=wait_s,
        retries={"total_max_attempts": 1, "mode": "standard"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        max_pool_connections=max(_CONNECTIONS, client.parallel),
        s3={"addressing_style": "path" if client.path_style else "virtual", "payload_signing_enabled": True},
    )
    session = library("botocore.session").Session()
    session.register_component("data_loader", _loader())
    # set here, because create_client takes keys but no credentials that renew themselves
    session._credentials = client.credentials.of_botocore()
    trusted = client.ca_file or ssl.get_default_verify_paths().cafile  # like transport.py; botocore would use a list of its own
    made = session.create_client("s3", region_name=client.region, endpoint_url=client.endpoint, verify=trusted, config=config)
    # many servers never answer "Expect: 100-continue", which makes each writing request wait a second
    made.meta.events.unregister("before-call.s3", library("botocore.handlers").add_expect_header)
    made.meta.events.register("before-call.s3", _not_redirected)
    return made


@functools.cache
def _loader() -> Any:
    """Return the loader of botocore's description of S3. It is cached: loading takes 0.06 s, and a client 0.03 s after that."""
    return library("botocore.loaders").create_loader()


def _not_redirected(params: dict[str, Any], **_: object) -> None:
    """Report a bucket in another region as an error, as reads do; by default botocore would look the region up and retry there."""
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


def _keep_quiet() -> None:
    """Exclude botocore from debug logs, which contain session tokens, unless its own logger is set to DEBUG."""
    log = logging.getLogger("botocore")
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
