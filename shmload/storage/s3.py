"""A bucket of an S3-compatible store, or a folder in it.

What is read is signed by botocore and comes over connections of our own (transport.py) straight into the caller's memory, for which
boto3 takes 1.6 to 2 times the CPU. All else is botocore's: writing (s3.py), listing, deleting.

What an S3-compatible server's refusals mean, and what to do about them.

Listing a bucket: pages, gathered and put in order.

All pages are read before the first object is given (about 200 bytes an object): the order is then right also where a server's is
not, and nobody works on the beginning of a listing whose end cannot be had.

Writing a bucket: one request for small objects, parts for large ones, whole or not at all.

A request that failed may have been done all the same. Writing the same bytes again is harmless; where an object is to be new, one
that is there after such a failure and holds these very bytes is taken for ours.

Who asks: botocore's credentials, found and renewed by it (environment, profiles, single sign-on, roles of machines).

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
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from typing_extensions import Buffer

from shmload.errors import ObjectExists, ObjectMissing, StoreError
from shmload.storage.http import WebReader, unquoted
from shmload.storage.local import StoredObject, checked_key, checked_prefix, is_key
from shmload.storage.transport import Answer, Retry, TransientError, Transport

if TYPE_CHECKING:
    from shmload.storage.client import Client

__all__ = [
    "Boto",
    "Credentials",
    "S3Store",
    "delete",
    "failure_of_answer",
    "failure_of_call",
    "find_credentials",
    "library",
    "list_objects",
    "put",
    "put_file",
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
        self, access_key: str | None = None, secret_key: str | None = None, session_token: str | None = None, *, renewed: Any = None
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
        "s3", region_name=client.region, endpoint_url=client.endpoint, verify=client.ca_file, config=config
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
    "InvalidToken": "the session token is none of this server's: look at session_token",
    "NoSuchBucket": "look at the bucket's name and at the endpoint, or create the bucket",
    "PermanentRedirect": "the bucket is in another region: give its name as region",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "SignatureDoesNotMatch": "the secret key is not the access key's: look at secret_key",
}


def failure_of_call(error: Exception, url: str, doing: str, client: Client) -> StoreError | TransientError:
    """The error to raise for one of botocore's."""
    exceptions = library("botocore.exceptions")
    if isinstance(error, exceptions.ClientError):
        found = _failure_of(error.response, url, doing, client)
    elif isinstance(error, exceptions.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        found = StoreError(f"{client.endpoint} is not trusted: {error}. Give its certificates as ca_file")
    elif isinstance(error, exceptions.HTTPClientError | exceptions.ConnectionError):
        found = TransientError(f"no answer from {client.endpoint} ({error})")
    elif isinstance(error, exceptions.BotoCoreError):
        found = StoreError(f"cannot {doing}: {error}. Look at the bucket's name, the region and the credentials")
    else:
        found = TransientError(f"the server sent no readable answer ({error})")
    return _redacted(found, client)


def failure_of_answer(answer: Answer, url: str, doing: str, client: Client) -> StoreError | TransientError:
    """The error to raise for an answer that is no success."""
    try:
        body = answer.text()
    except TransientError:
        body = b""
    parser = library("botocore.parsers").create_parser("rest-xml")
    status = max(answer.status, 301)  # what is below would be no failure to it
    response = parser.parse({"status_code": status, "headers": dict(answer.headers), "body": body}, None)
    response["ResponseMetadata"]["HTTPStatusCode"] = answer.status
    return _redacted(_failure_of(response, url, doing, client), client)


def _failure_of(response: Mapping[str, Any], url: str, doing: str, client: Client) -> StoreError | TransientError:
    """Of an error as botocore parses it."""
    status, headers = response["ResponseMetadata"]["HTTPStatusCode"], response["ResponseMetadata"]["HTTPHeaders"]
    code, message = (str(response["Error"].get(name) or "").strip() for name in ("Code", "Message"))
    code, message = "" if code == str(status) else code[:80], message[:200]
    said = f"{status} {code}".strip() + (f" ({message})" if message else "")
    if status in (301, 302, 307, 308) or code == "AuthorizationHeaderMalformed":
        region = headers.get("x-amz-bucket-region")
        region = region or (match[1] if (match := re.search(r"expecting '([\w-]+)'", message)) else None)
        where = f"region={region!r}" if region else f"another endpoint than {client.endpoint}, or another region"
        return StoreError(f"cannot {doing}: the server says {said} to region {client.region!r}; the client needs {where}")
    if code in _PASSING or (status >= 500 and status != 501) or status in (408, 429):
        return TransientError(f"the server says {said}", pause_s=_seconds(headers.get("retry-after")))
    if code == "NoSuchKey" or (status == 404 and not code):
        return ObjectMissing(f"no such object: {url} at {client.endpoint}")
    remedy = _REMEDIES.get(code) or (
        "the server refuses these credentials: look at access_key, secret_key and the bucket's permissions"
        if status in (401, 403)
        else "look at the endpoint, the bucket's name and what the server can do"
    )
    return StoreError(f"cannot {doing} at {client.endpoint}: the server says {said}; {remedy}")


def _redacted(found: StoreError | TransientError, client: Client) -> StoreError | TransientError:
    """The error without what a server may have sent back of the credentials."""
    text = client.credentials.redacted(str(found))
    if text != str(found):
        found.args = (text,)
    return found


def _seconds(text: str | None) -> float:
    """Of a Retry-After header: seconds, or a date, which is not worth its reading."""
    return min(60.0, float(text)) if text is not None and text.isascii() and text.isdigit() else 0.0


_PAGE = 1000  # objects in one answer: as many as servers give


def list_objects(store: S3Store, prefix: str) -> Iterator[StoredObject]:
    """The objects whose keys begin with `prefix`, in order of their keys; names that are no keys of ours are left out."""
    found: list[StoredObject] = []
    token: str | None = None
    doing = f"list {store.url}/{prefix}"
    while True:
        page, following = store.repeatedly(doing, partial(_page, store, prefix, token, doing))
        found += page
        if following is None:
            break
        if following == token:
            raise StoreError(f"cannot {doing}: {store.client.endpoint} gives the same page again and again")
        token = following
    found.sort(key=lambda each: each.key)
    return iter(found)


def _page(store: S3Store, prefix: str, token: str | None, doing: str) -> tuple[list[StoredObject], str | None]:
    after: dict[str, Any] = {} if token is None else {"ContinuationToken": token}
    wait_s = store.retry_policy.stall_s
    page = store.call("list_objects_v2", doing, wait_s=wait_s, Prefix=store.prefix + prefix, MaxKeys=_PAGE, **after)
    try:
        truncated = page["IsTruncated"]  # every listing says it, and botocore takes any XML for one
        listed = [(each["Key"], each["Size"], unquoted(each["ETag"])) for each in page.get("Contents", ())]
        following = page["NextContinuationToken"] if truncated else None
    except KeyError as error:
        raise TransientError(f"the server sent no listing (there is no {error.args[0]} in it)") from None
    found = []
    for name, nbytes, etag in listed:
        if not name.startswith(store.prefix):
            raise TransientError(f"the server listed {name!r}, which is not below {store.prefix!r}")
        key = name[len(store.prefix) :]
        if is_key(key):  # not so the markers "folder/" of other programs
            found.append(StoredObject(key, nbytes, etag))
    return found, following


_PART_NBYTES = 16 << 20
_MOST_PARTS = 10_000  # S3's own limit
_AT_ONCE = 1000  # objects in one request to delete


def put(store: S3Store, key: str, data: bytes, *, only_if_absent: bool) -> StoredObject:
    """Writes one object by one request."""
    url = store.url_of(key)
    doing = f"write {url}"
    unsure = False
    tries = Retry(store.retry_policy, doing)
    if only_if_absent and _is_there(store, key):  # a server that knows no conditions would overwrite
        raise ObjectExists(f"there is an object already, and it was to be new: {url}")
    condition: dict[str, Any] = {"IfNoneMatch": "*"} if only_if_absent else {}
    while True:
        try:
            answer = store.call("put_object", doing, key=key, but=(412,), Body=data, **condition)
            if _status(answer) != 412:
                etag = answer.get("ETag")
                return StoredObject(key, len(data), unquoted(etag)) if etag else store.head(key)
            if (unsure or _was_repeated(answer)) and bytes(store.get(key)) == data:
                return store.head(key)
            raise ObjectExists(f"there is an object already, and it was to be new: {url}")
        except TransientError as failure:
            unsure = True
            tries.failed(failure)


def put_file(store: S3Store, key: str, path: Path) -> StoredObject:
    """Writes a file's bytes; what is larger than one part is sent in parts, as many at once as the client says."""
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes <= _PART_NBYTES:
            return put(store, key, file.read(), only_if_absent=False)
        return _Upload(store, key, file.fileno(), nbytes).run()


def delete(store: S3Store, keys: Sequence[str]) -> None:
    """Removes objects, a thousand in one request."""
    doing = f"delete objects of {store.url}"
    for begin in range(0, len(keys), _AT_ONCE):
        some = keys[begin : begin + _AT_ONCE]
        if not store.repeatedly(doing, partial(_delete_some, store, some, doing)):
            for key in some:
                store.repeatedly(f"delete {store.url_of(key)}", partial(_delete_one, store, key))


def _delete_some(store: S3Store, keys: Sequence[str], doing: str) -> bool:
    """Whether the server could do it; some know no request for many."""
    listed = {"Objects": [{"Key": store.prefix + key} for key in keys], "Quiet": True}
    answer = store.call("delete_objects", doing, but=(405, 501), Delete=listed)
    if _status(answer) in (405, 501):
        return False
    for failed in answer.get("Errors", ()):
        name, code, message = (str(failed.get(each) or "") for each in ("Key", "Code", "Message"))
        if code in ("InternalError", "SlowDown"):
            raise TransientError(f"the server says {code} of {name}")
        if code != "NoSuchKey":
            raise StoreError(
                f"cannot delete s3://{store.bucket}/{name}: the server says {code} "
                f"({store.client.credentials.redacted(message[:200])}); let the bucket's owner allow it"
            )
    return True


def _delete_one(store: S3Store, key: str) -> None:
    store.call("delete_object", f"delete {store.url_of(key)}", key=key, but=(404,))


def _status(answer: Mapping[str, Any]) -> int:
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


def _was_repeated(answer: Mapping[str, Any]) -> bool:
    """Whether a client of the user's has tried more than once by itself."""
    return bool(answer["ResponseMetadata"].get("RetryAttempts"))


def _is_there(store: S3Store, key: str) -> bool:
    try:
        store.head(key)
    except ObjectMissing:
        return False
    return True


class _Upload:
    """One object sent in parts. A part is read from the file when its turn comes and dropped when it is there."""

    def __init__(self, store: S3Store, key: str, fd: int, nbytes: int) -> None:
        self.store = store
        self.key = key
        self.url = store.url_of(key)
        self.doing = f"write {self.url}"
        self.fd = fd
        self.nbytes = nbytes
        self.part_nbytes = max(_PART_NBYTES, -(-nbytes // _MOST_PARTS))
        self.given_up = False

    def run(self) -> StoredObject:
        """Sends it all, or takes away what was sent."""
        upload = self.store.repeatedly(self.doing, self._begin)
        try:
            with ThreadPoolExecutor(self.store.parallel, "shmload-store") as threads:
                try:
                    offsets = range(0, self.nbytes, self.part_nbytes)
                    parts = list(threads.map(lambda i: self._send(upload, i + 1, offsets[i]), range(len(offsets))))
                except BaseException:
                    self.given_up = True
                    threads.shutdown(wait=False, cancel_futures=True)
                    raise
            self._complete(upload, parts)
        except BaseException:
            self._abort(upload)
            raise
        found = self.store.head(self.key)
        if found.nbytes != self.nbytes:
            raise StoreError(
                f"{self.url} has {found.nbytes:,} bytes, not the {self.nbytes:,} that were sent: another program writes there "
                "too, or the server lost the parts. Write each object from one place"
            )
        return found

    def _begin(self) -> str:
        answer = self.store.call("create_multipart_upload", self.doing, key=self.key)
        try:
            return str(answer["UploadId"])
        except KeyError:
            raise TransientError("the server's answer names no upload") from None

    def _send(self, upload: str, number: int, offset: int) -> dict[str, Any]:
        part = bytearray(min(self.part_nbytes, self.nbytes - offset))
        view = memoryview(part)
        done = 0
        while done < len(part):
            got = os.preadv(self.fd, [view[done:]], offset + done)
            if got == 0:
                raise StoreError(f"cannot {self.doing}: the file became shorter while it was sent. Write files before sending them")
            done += got

        def try_once() -> dict[str, Any]:
            if self.given_up:
                raise StoreError(f"cannot {self.doing}: another part failed")
            sent = self._call("upload_part", upload, PartNumber=number, Body=part)
            try:
                return {"PartNumber": number, "ETag": sent["ETag"]}
            except KeyError:
                raise TransientError("the server's answer names no version of a part") from None

        return self.store.repeatedly(self.doing, try_once)

    def _complete(self, upload: str, parts: Sequence[dict[str, Any]]) -> None:
        """Makes the parts an object. An answer of 200 may still hold an error, which botocore sees."""
        unsure = False
        tries = Retry(self.store.retry_policy, self.doing)
        while True:
            try:
                but = (404,) if unsure else ()  # done by a try whose answer was lost, or by nobody: the object tells
                self._call("complete_multipart_upload", upload, but=but, MultipartUpload={"Parts": parts})
                return
            except TransientError as failure:
                unsure = True
                tries.failed(failure)

    def _abort(self, upload: str) -> None:
        """Takes the parts away; what cannot be reached now, the bucket's own rule for unfinished uploads removes."""
        try:
            self.store.repeatedly(self.doing, partial(self._call, "abort_multipart_upload", upload, but=(404,)))
        except StoreError:
            pass

    def _call(self, operation: str, upload: str, **arguments: Any) -> dict[str, Any]:
        return self.store.call(operation, self.doing, key=self.key, UploadId=upload, **arguments)


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
        self.prefix = ""
        self.prefix = checked_prefix(folder.strip("/"), self.url)

    @property
    def url(self) -> str:
        """s3://bucket/folder."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def put(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> StoredObject:
        return put(self, key, bytes(data), only_if_absent=only_if_absent)

    def put_file(self, key: str, path: Path) -> StoredObject:
        return put_file(self, key, path)

    def list_objects(self, prefix: str = "") -> Iterator[StoredObject]:
        return list_objects(self, checked_prefix(prefix, self.url))

    def delete(self, keys: Iterable[str]) -> None:
        delete(self, [checked_key(key, self.url) for key in keys])

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
        self,
        operation: str,
        doing: str,
        *,
        key: str | None = None,
        but: Collection[int] = (),
        wait_s: float | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """What botocore answers to one request.

        Args:
            operation: botocore's method.
            doing: the same in words, for the error.
            key: of an object; None asks about the bucket.
            but: statuses that are no failure here; their answers have ResponseMetadata only.
            wait_s: how long the answer may take; None: as what is written may.
        """
        if key is not None:
            arguments["Key"] = self.prefix + key
        exceptions = library("botocore.exceptions")
        passing = (exceptions.BotoCoreError, exceptions.ClientError, library("botocore.parsers").ResponseParserError)
        try:
            client = self.client.boto.client(self.client, wait_s or self.retry_policy.timeout_s)
            answer: dict[str, Any] = getattr(client, operation)(Bucket=self.bucket, **arguments)
            if answer["ResponseMetadata"]["HTTPHeaders"]:
                return answer
            failure: StoreError | TransientError = TransientError(
                "the server hung up before its answer had begun"
            )  # after a first line
        except passing as error:
            response = getattr(error, "response", None) or {}
            metadata = response.get("ResponseMetadata", {})
            if metadata.get("HTTPStatusCode") in but:
                return {"ResponseMetadata": metadata}
            failure = failure_of_call(error, self.url if key is None else self.url_of(key), doing, self.client)
            del response, metadata  # what prints the locals of this frame would print them
        raise failure

    def failure(self, answer: Answer, url: str, doing: str) -> StoreError | TransientError:
        return failure_of_answer(answer, url, doing, self.client)

    def close(self) -> None:
        """Closes idle connections; the store opens others when it is used again."""
        self._transport.close()
        self.client.boto.close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, S3Store) and (self.client, self.url) == (other.client, other.url)

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"S3Store({self.url!r}, endpoint={self.client.endpoint!r})"
