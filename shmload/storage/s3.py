"""A bucket of an S3-compatible store, or a folder in it.

What is read is signed by botocore and comes over connections of our own (transport.py) straight into the caller's memory, for which
boto3 takes 1.6 to 2 times the CPU. All else is botocore's: writing (s3.py), listing, deleting.

What an S3-compatible server's refusals mean, and what to do about them.

Listing a bucket: pages, gathered and put in order.

All pages are read before the first object is given (about 200 bytes an object): the order is then right also where a server's is
not, and nobody works on the beginning of a listing whose end cannot be had.

Writing a bucket: one request for small objects, parts for large ones, whole or not at all.

Who asks: botocore's credentials, found and renewed by it (environment, profiles, single sign-on, roles of machines).

What is ours: they can be pickled, compared and printed without showing anything, and their errors say what to do.

botocore's clients of this process: they write, list and delete.

They are made when first needed, and again in a child: connections of two processes would be one. Nothing is tried again there, as
transport.py does that. Checksums that came to S3 in 2025 are not sent, as many servers reject them: a body is covered by the
SHA-256 in its signature.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from typing_extensions import Buffer

from shmload.errors import ObjectMissing, StoreError
from shmload.storage.http import WebReader, all_of, unquoted
from shmload.storage.local import StoredObject, checked_key, checked_prefix, is_key
from shmload.storage.transport import Answer, TransientError, Transport

if TYPE_CHECKING:
    from shmload.storage.client import Client

__all__ = ["Credentials", "S3Store", "failure_of_call", "find_credentials", "library"]


def library(name: str) -> Any:
    """A module of the extra, imported when it is needed.

    Raises:
        StoreError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise StoreError("buckets (s3://) need boto3, which is not installed: pip install 'shmload[s3]'") from None


_LONG_SECRET = 16  # characters from which a secret is masked wherever it occurs: it is no part of a name by chance


class Credentials:
    """Keys that stay as they are, or an object of botocore's that renews them; neither signs nothing.

    What renews stays in this process: a pickle has the keys of that moment, a forked child goes on renewing.

    Args:
        access_key: of whom asks.
        secret_key: that signs.
        session_token: of temporary keys.
        renewed: botocore's credentials instead.
    """

    def __init__(
        self, access_key: str | None = None, secret_key: str | None = None, session_token: str | None = None, *, renewed: Any = None
    ) -> None:
        self._keys = None if access_key is None else (access_key, secret_key, session_token)
        self._renewed = renewed
        self.anonymous = access_key is None and renewed is None

    def of_botocore(self) -> Any:
        """The object that botocore signs with; None signs nothing."""
        if self._renewed is None and self._keys is not None:
            return library("botocore.credentials").Credentials(*self._keys)
        return self._renewed

    def frozen(self) -> Any:
        """The keys of this moment, all three of one renewal. Their repr is botocore's and shows them: keep them in no variable.

        Raises:
            StoreError: they could not be renewed.
        """
        try:
            return self.of_botocore().get_frozen_credentials()
        except Exception as error:  # whatever a provider of keys raises
            said = str(error)
        raise StoreError(f"the credentials could not be renewed: {said}. Sign in again")

    def redacted(self, text: str) -> str:
        """Return the text without any of them. A short one is masked as a word only: "test" stays in "latest"."""
        for secret in filter(None, self._values()):
            pattern = re.escape(secret)
            if len(secret) < _LONG_SECRET:
                pattern = rf"(?<![A-Za-z0-9_]){pattern}(?![A-Za-z0-9_])"
            text = re.sub(pattern, "***", text)
        return text

    def _values(self) -> tuple[str | None, ...]:
        return () if self.anonymous else self._keys or tuple(self.frozen())[:3]

    def __reduce__(self) -> tuple[Any, ...]:
        return Credentials, self._values()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Credentials) and self._values() == other._values()

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


_CONNECTIONS = 32  # kept by one client: as many threads as may share a store


def _made(client: Client, wait_s: float) -> Any:
    """botocore's client of this process, whose answers may take so long: it writes, lists and deletes."""
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
    session._credentials = client.credentials.of_botocore()  # create_client takes keys, but none that are renewed
    made = session.create_client(
        "s3", region_name=client.region, endpoint_url=client.endpoint, verify=client.ca_file, config=config
    )
    # many servers never answer "Expect: 100-continue", which makes each writing request wait a second
    made.meta.events.unregister("before-call.s3", library("botocore.handlers").add_expect_header)
    made.meta.events.register("before-call.s3", _not_redirected)
    return made


@functools.cache
def _loader() -> Any:
    """The descriptions of S3, half of what a client costs: read once (0.06 s, then 0.03 s a client)."""
    return library("botocore.loaders").create_loader()


def _not_redirected(params: dict[str, Any], **_: object) -> None:
    """A bucket of another region is an error that names it, as in reading: botocore would look for it and ask there by itself."""
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


def _keep_quiet() -> None:
    """botocore's debug log has session tokens in it: it is not switched on along with everyone else's, but by its own name."""
    log = logging.getLogger("botocore")
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


_PASSING = {
    "BandwidthLimitExceeded",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentSHA256Mismatch",  # the body was damaged on its way
}
_REMEDIES = {
    "AccessDenied": "the credentials are known but may not do this: let the bucket's owner allow it",
    "AuthorizationHeaderMalformed": "requests are signed for another region than the server's: give its name as region",
    "ExpiredToken": "the temporary credentials have run out: make a client with new ones",
    "InvalidAccessKeyId": "the server does not know the access key: look at access_key and at the endpoint",
    "InvalidObjectState": "the object is archived (GLACIER, DEEP_ARCHIVE): restore it first, then read it",
    "InvalidToken": "the session token is none of this server's: look at session_token",
    "NoSuchBucket": "look at the bucket's name and at the endpoint, or create the bucket",
    "PermanentRedirect": "the bucket is in another region: give its name as region",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "SignatureDoesNotMatch": "the secret key is not the access key's: look at secret_key",
}


def failure_of_call(error: Exception, url: str, doing: str, client: Client) -> StoreError | TransientError:
    """The error to raise for one of botocore's."""
    exceptions, text = library("botocore.exceptions"), client.credentials.redacted(str(error))
    if isinstance(error, exceptions.ClientError):
        found = _failure_of(error.response, url, doing, client)
    elif isinstance(error, exceptions.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        found = StoreError(f"{client.endpoint} is not trusted: {text}. Give its certificates as ca_file")
    elif isinstance(error, exceptions.HTTPClientError | exceptions.ConnectionError):
        is_silent = isinstance(error, exceptions.ReadTimeoutError | exceptions.ConnectTimeoutError)
        found = TransientError(f"no answer from {client.endpoint} ({text})", of_store=True, is_silent=is_silent)
    elif isinstance(error, exceptions.BotoCoreError):
        found = StoreError(f"cannot {doing}: {text}. Look at the bucket's name, the region and the credentials")
    else:
        found = TransientError(f"the server sent no readable answer ({text})")
    return found


def _failure_of(response: Mapping[str, Any], url: str, doing: str, client: Client) -> StoreError | TransientError:
    """Of an error as botocore parses it. What the server says may hold credentials; the object's own name is never masked."""
    status, headers = response["ResponseMetadata"]["HTTPStatusCode"], response["ResponseMetadata"]["HTTPHeaders"]
    redacted = client.credentials.redacted
    code, message = (redacted(str(response["Error"].get(name) or "").strip()) for name in ("Code", "Message"))
    code, message = "" if code == str(status) else code[:80], message[:200]
    said = f"{status} {code}".strip() + (f" ({message})" if message else "")
    if status in (301, 302, 307, 308) or code == "AuthorizationHeaderMalformed":
        region = headers.get("x-amz-bucket-region")
        region = region or (match[1] if (match := re.search(r"expecting '([\w-]+)'", message)) else None)
        where = f"region={region!r}" if region else f"another endpoint than {client.endpoint}, or another region"
        return StoreError(f"cannot {doing}: the server says {said} to region {client.region!r}; the client needs {where}")
    if code in _PASSING or (status >= 500 and status != 501) or status in (408, 429):
        return TransientError(f"the server says {said}", pause_s=_seconds(headers.get("retry-after")), of_store=True)
    if code == "NoSuchKey" or (status == 404 and not code):
        return ObjectMissing(f"no such object: {url} at {client.endpoint}")
    remedy = _REMEDIES.get(code) or (
        "the server refuses these credentials: look at access_key, secret_key and the bucket's permissions"
        if status in (401, 403)
        else "look at the endpoint, the bucket's name and what the server can do"
    )
    return StoreError(f"cannot {doing} at {client.endpoint}: the server says {said}; {remedy}")


def _seconds(text: str | None) -> float:
    """Of a Retry-After header: seconds, or a date, which is not worth its reading."""
    return min(60.0, float(text)) if text is not None and text.isascii() and text.isdigit() else 0.0


_PAGE = 1000  # objects in one answer: as many as servers give
_PART_NBYTES = 16 << 20
_MOST_PARTS = 10_000  # S3's own limit


class S3Store(WebReader):
    """Objects of a bucket. Made by `Client.store` or `open_store`.

    Args:
        client: how to reach it.
        bucket: its name.
        folder: that keys are relative to.
    """

    def __init__(self, client: Client, bucket: str, folder: str = "") -> None:
        if not bucket or "/" in bucket or not bucket.isprintable():
            raise StoreError(f"{bucket!r} is no bucket's name: give the bucket alone, and what is behind it as the folder")
        library("botocore")  # whoever lacks it learns so here
        self.client = client
        self.bucket = bucket
        self.retry_policy = client.retry_policy
        self.parallel = client.parallel
        scheme, host = client.endpoint.split("://")
        in_path = client.path_style or "." in bucket  # a certificate for *.host is for one part only
        self._base = f"/{quote(bucket, safe='-_.~')}" if in_path else ""
        base_url = client.endpoint if in_path else f"{scheme}://{bucket}.{host}"
        self._transport = Transport(base_url, stall_s=client.retry_policy.stall_s, ca_file=client.ca_file)
        self._botos: dict[tuple[int, float], Any] = {}  # botocore's clients, by the process that made them and how long they wait
        self.prefix = checked_prefix(folder.strip("/"), f"s3://{bucket}")
        self.url = f"s3://{bucket}/{self.prefix}".rstrip("/")

    def list_objects(self, prefix: str = "") -> Iterator[StoredObject]:
        return iter(sorted(self.as_listed(prefix), key=lambda each: each.key))

    def as_listed(self, prefix: str = "") -> Iterator[StoredObject]:
        """The same in the server's order, which is that of keys at most; a page is asked for when the one before has been taken."""
        prefix = self.prefix + checked_prefix(prefix, self.url)
        doing = f"list s3://{self.bucket}/{prefix}"
        token: str | None = None
        while True:
            page, following = self.repeatedly(doing, partial(self._page, doing, prefix, token))
            yield from page
            if following is None:
                return
            if following == token:
                raise StoreError(f"cannot {doing}: {self.client.endpoint} gives the same page again and again")
            token = following

    def _page(self, doing: str, prefix: str, token: str | None) -> tuple[list[StoredObject], str | None]:
        """Objects behind `token` and the next token; names that are no keys of ours are left out (markers of folders)."""
        after: dict[str, Any] = {} if token is None else {"ContinuationToken": token}
        stall_s = self.client.retry_policy.stall_s
        page = self.call("list_objects_v2", doing, wait_s=stall_s, Prefix=prefix, MaxKeys=_PAGE, **after)
        try:
            following = page["NextContinuationToken"] if page["IsTruncated"] else None  # botocore takes any XML for a listing
            listed = [(each["Key"], each["Size"], unquoted(each["ETag"])) for each in page.get("Contents", ())]
        except KeyError as error:
            raise TransientError(f"the server sent no listing (there is no {error.args[0]} in it)") from None
        if not all(name.startswith(self.prefix) for name, _, _ in listed):
            raise TransientError(f"the server sent another listing (not all in it is below {self.prefix!r})")
        keys = [name.removeprefix(self.prefix) for name, _, _ in listed]
        return [StoredObject(key, *each[1:]) for key, each in zip(keys, listed, strict=True) if is_key(key)], following

    def delete(self, keys: Iterable[str]) -> None:
        given_up = threading.Event()

        def delete_one(key: str) -> None:
            self._call_again("delete_object", f"delete {self.url_of(key)}", key, is_over=given_up.is_set, but=(404,))

        all_of(delete_one, [checked_key(key, self.url) for key in keys], self.parallel, given_up)

    def put(self, key: str, data: Buffer) -> StoredObject:
        doing = f"write {self.url_of(key)}"
        etag = self._call_again("put_object", doing, key, "ETag", Body=bytes(data))
        return StoredObject(key, len(memoryview(data).cast("B")), unquoted(etag))

    def put_file(self, key: str, path: Path) -> StoredObject:
        with open(path, "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes <= _PART_NBYTES:
                return self.put(key, file.read())
            return self._put_parts(key, file.fileno(), nbytes)

    def _put_parts(self, key: str, fd: int, nbytes: int) -> StoredObject:
        """Writes an object in parts, several at once. A part is read from the file when its turn comes."""
        url = self.url_of(key)
        doing = f"write {url}"
        part_nbytes = max(_PART_NBYTES, -(-nbytes // _MOST_PARTS))

        upload = self._call_again("create_multipart_upload", doing, key, "UploadId")

        given_up = threading.Event()

        def send(offset: int) -> dict[str, Any]:
            part = os.pread(fd, min(part_nbytes, nbytes - offset), offset)
            if len(part) < min(part_nbytes, nbytes - offset):
                raise StoreError(f"cannot {doing}: the file became shorter while it was sent. Write files before sending them")
            number = offset // part_nbytes + 1
            named = {"UploadId": upload, "PartNumber": number}
            etag = self._call_again("upload_part", doing, key, "ETag", is_over=given_up.is_set, Body=part, **named)
            return {"PartNumber": number, "ETag": etag}

        try:
            parts = all_of(send, range(0, nbytes, part_nbytes), self.parallel, given_up)
            num_tries = count()

            def complete() -> None:
                # 404 behind a try whose answer was lost: that try did it, or nobody, which the object's length shows
                but = (404,) if next(num_tries) else ()
                self.call("complete_multipart_upload", doing, key=key, but=but, UploadId=upload, MultipartUpload={"Parts": parts})

            self.repeatedly(doing, complete)
        except BaseException:
            with suppress(StoreError):  # the bucket's own rule for unfinished uploads removes what cannot be reached now
                self._call_again("abort_multipart_upload", doing, key, UploadId=upload, but=(404,))
            raise
        found = self.head(key)
        if found.nbytes != nbytes:
            raise StoreError(
                f"{url} has {found.nbytes:,} bytes, not the {nbytes:,} that were sent: another program writes there too, or the "
                "server lost the parts. Write each object from one place"
            )
        return found

    def _call_again(
        self, operation: str, doing: str, key: str, gives: str | None = None, is_over: Callable[[], bool] = bool, **arguments: Any
    ) -> Any:
        """What the server's answer has under that name, which no answer is good without; tried again as the policy says."""

        def try_once() -> Any:
            answer = self.call(operation, doing, key=key, **arguments)
            if gives is not None and gives not in answer:
                raise TransientError(f"the server's answer has no {gives}")
            return answer[gives] if gives is not None else None

        return self.repeatedly(doing, try_once, is_over)

    def url_of(self, key: str) -> str:
        return f"{self.url}/{checked_key(key, self.url)}"

    def ask(self, method: str, key: str, headers: Mapping[str, str]) -> Answer:
        target = f"{self._base}/{quote(self.prefix + checked_key(key, self.url), safe='/-_.~')}"
        full = {"Host": self._transport.netloc, "Accept-Encoding": "identity", "User-Agent": "shmload", **headers}
        request = library("botocore.awsrequest").AWSRequest(method, self._transport.base_url + target, full)
        if not self.client.credentials.anonymous:
            signer = library("botocore.auth").S3SigV4Auth
            signer(self.client.credentials.frozen(), "s3", self.client.region).add_auth(request)
        return self._transport.request(method, target, request.headers)  # whose repr shows none: a token is among them

    def call(
        self, operation: str, doing: str, *, key: str | None = None, but: Collection[int] = (), wait_s: float = 0, **arguments: Any
    ) -> dict[str, Any]:
        """What botocore answers to one request.

        Args:
            operation: botocore's method.
            doing: the same in words, for the error.
            key: of an object; None asks about the bucket.
            but: statuses that are no failure here; their answers are empty.
            wait_s: how long the answer may take; 0: as one to what is written may.
        """
        if key is not None:
            arguments["Key"] = self.prefix + key
        exceptions = library("botocore.exceptions")
        passing = (exceptions.BotoCoreError, exceptions.ClientError, library("botocore.parsers").ResponseParserError)
        try:
            answer: dict[str, Any] = getattr(self._botos_client(wait_s), operation)(Bucket=self.bucket, **arguments)
            if answer["ResponseMetadata"]["HTTPHeaders"]:
                return answer
            failure: StoreError | TransientError = TransientError("the server hung up behind its first line")
        except passing as error:
            if (getattr(error, "response", None) or {}).get("ResponseMetadata", {}).get("HTTPStatusCode") in but:
                return {}
            failure = failure_of_call(error, self.url if key is None else self.url_of(key), doing, self.client)
        raise failure

    def _botos_client(self, wait_s: float) -> Any:
        kind = os.getpid(), wait_s or self.client.retry_policy.timeout_s  # connections of two processes would be one
        if kind not in self._botos:
            self._botos[kind] = _made(self.client, kind[1])
        return self._botos[kind]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_botos": {}}

    def failure(self, answer: Answer, url: str, doing: str) -> StoreError | TransientError:
        try:
            body = answer.text()
        except TransientError:
            body = b""
        parser = library("botocore.parsers").create_parser("rest-xml")
        status = max(answer.status, 301)  # what is below would be no failure to it
        response = parser.parse({"status_code": status, "headers": dict(answer.headers), "body": body}, None)
        response["ResponseMetadata"]["HTTPStatusCode"] = answer.status
        return _failure_of(response, url, doing, self.client)

    def close(self) -> None:
        """Closes idle connections; the store opens others when it is used again."""
        self._transport.close()
        for kind in [kind for kind in self._botos if kind[0] == os.getpid()]:
            self._botos.pop(kind).close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, S3Store) and (self.client, self.url) == (other.client, other.url)

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"S3Store({self.url!r}, endpoint={self.client.endpoint!r})"
