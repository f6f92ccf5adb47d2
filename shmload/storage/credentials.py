"""Who asks: botocore's credentials, found and renewed by it (environment, profiles, single sign-on, roles of machines).

What is ours: they can be pickled, compared and printed without showing anything, and their errors say what to do.

botocore's clients of this process: they write, list and delete.

They are made when first needed, and again in a child: connections of two processes would be one. Nothing is tried again there, as
transport.py does that. Checksums that came to S3 in 2025 are not sent, as many servers reject them: a body is covered by the
SHA-256 in its signature.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

from shmload.errors import StoreError

if TYPE_CHECKING:
    from shmload.storage.client import Client

__all__ = [
    "Boto",
    "Credentials",
    "find_credentials",
    "library",
    "region_of_environment",
]


def library(name: str) -> Any:
    """A module of the extra, imported when it is needed.

    Raises:
        StoreError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise StoreError("buckets (s3://) need boto3, which is not installed: pip install 'shmload[s3]'") from None


class Credentials:
    """Keys that stay as they are, or an object of botocore's that renews them.

    What renews stays in this process: a pickle has the keys of that moment, a forked child goes on renewing.

    Args:
        access_key: of whom asks; None signs nothing.
        secret_key: that signs.
        session_token: of temporary keys.
        renewed: botocore's credentials instead.
    """

    def __init__(
        self,
        access_key: str | None = None,
        secret_key: str | None = None,
        session_token: str | None = None,
        *,
        renewed: Any = None,
    ) -> None:
        self._keys = None if access_key is None else (access_key, secret_key, session_token)
        self._renewed = renewed

    @property
    def anonymous(self) -> bool:
        """Whether nothing is signed."""
        return self._keys is None and self._renewed is None

    def of_botocore(self) -> Any:
        """The object that botocore signs with; None signs nothing."""
        if self._renewed is not None or self._keys is None:
            return self._renewed
        return library("botocore.credentials").Credentials(*self._keys)

    def frozen(self) -> Any:
        """The keys of this moment, all three of one renewal. Their repr is botocore's and shows them: keep them in no variable.

        Raises:
            StoreError: they could not be renewed.
        """
        try:
            return self.of_botocore().get_frozen_credentials()
        except StoreError:
            raise
        except Exception as error:  # whatever a provider of keys raises
            said = str(error)
        raise StoreError(f"the credentials could not be renewed: {said}. Sign in again")

    def redacted(self, text: str) -> str:
        """The text without any of them."""
        for secret in () if self.anonymous else self._values():
            text = text.replace(secret, "***") if secret else text
        return text

    def _values(self) -> tuple[str | None, ...]:
        return self._keys if self._renewed is None and self._keys is not None else tuple(self.frozen())[:3]

    def __getstate__(self) -> dict[str, Any]:
        return {"_keys": None if self.anonymous else self._values(), "_renewed": None}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Credentials) and self.__getstate__() == other.__getstate__()

    def __hash__(self) -> int:
        return hash(self.anonymous)  # keys may be renewed, and hashes stay

    def __repr__(self) -> str:
        return "Credentials(none)" if self.anonymous else "Credentials(***)"


def find_credentials(profile: str | None = None) -> Credentials:
    """Those that botocore finds where all of AWS's tools look.

    Raises:
        StoreError: there are none.
    """
    session = library("botocore.session").Session(profile=profile)
    said = ""
    try:
        found = session.get_credentials()
    except Exception as error:  # of configuration files, profiles, providers
        found, said = None, f". botocore says: {error}"
    if found is None:
        raise StoreError(
            "no credentials: give access_key and secret_key, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a "
            f"profile of ~/.aws/credentials in AWS_PROFILE; anonymous=True reads public buckets{said}"
        )
    return Credentials(renewed=found)


def region_of_environment() -> str | None:
    """The region that the environment names."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or None


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
