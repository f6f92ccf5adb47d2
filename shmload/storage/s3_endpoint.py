"""The endpoint of an S3-compatible store: address, region, credentials and retry policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from shmload.storage.credentials import Credentials
from shmload.storage.retry import RetryPolicy

__all__ = ["S3Endpoint"]


@dataclass(frozen=True)
class S3Endpoint:
    """The address, credentials and policies of an S3-compatible store. It has no connection, so it can be pickled and forked.

    Attributes:
        endpoint: scheme, host and port.
        region: the region for which requests are signed.
        credentials: the credentials that sign requests.
        retry_policy: how often and for how long an operation is retried.
        parallel: number of ranges of one large object that are read, or of parts that are written, at once.
        path_style: whether the bucket is named in the path instead of the host.
        ca_file: file of certificates to trust in place of the system's; None is the system's.
    """

    endpoint: str
    region: str
    credentials: Credentials = field(repr=False)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    parallel: int = 4
    path_style: bool = True
    ca_file: str | None = None
