"""Clients: where they find credentials, how they use them, and that they never reveal them."""

from __future__ import annotations

import io
import logging
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.traceback import Traceback

import shmload
from shmload.errors import StoreError
from shmload.remote import make_client
from shmload.storage.botocore_client import create_botocore_client
from shmload.storage.client import Client, client_of
from shmload.storage.credentials import Credentials
from shmload.storage.filesystem_store import FilesystemStore
from shmload.storage.open_store import open_store
from shmload.storage.s3_errors import failure_of_response
from tests.storage import store_kit
from tests.storage.fault_proxy import FaultProxy, Garbage, Status

VARIABLES = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_CA_BUNDLE",
]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Removes all credentials; returns the path of the (missing) shared credentials file."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return path


def keys_of(client: Client) -> tuple[str, str, str | None]:
    keys = client.credentials.frozen()
    return keys.access_key, keys.secret_key, keys.token


def test_arguments_override_the_environment_which_overrides_the_file(
    bare_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare_environment.write_text(
        "[default]\naws_access_key_id = f\naws_secret_access_key = fs\n"
        "[other]\naws_access_key_id=o\naws_secret_access_key=o%s\naws_session_token=ot\n"
    )
    assert keys_of(make_client("http://h")) == ("f", "fs", None)
    assert keys_of(make_client("http://h", profile="other")) == ("o", "o%s", "ot")
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert keys_of(make_client("http://h")) == ("o", "o%s", "ot")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "e")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "es")
    assert keys_of(make_client("http://h")) == ("e", "es", None)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "et")
    assert keys_of(make_client("http://h")) == ("e", "es", "et")
    assert keys_of(make_client("http://h", profile="other")) == ("o", "o%s", "ot")
    assert keys_of(make_client("http://h", "a", "as")) == ("a", "as", None)
    assert keys_of(make_client("http://h", "a", "as", session_token="at")) == ("a", "as", "at")
    assert make_client("http://h", anonymous=True).credentials.anonymous


def test_error_without_credentials_says_where_to_put_them(bare_environment: Path) -> None:
    said = "no credentials: give access_key and secret_key, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name"
    with pytest.raises(StoreError, match=said + r" a profile .*; anonymous=True reads public buckets$"):
        make_client("http://h")
    with pytest.raises(StoreError, match="belong together: give both, or neither"):
        make_client("http://h", "only")
    bare_environment.write_text("no section\n")
    with pytest.raises(StoreError, match=said + r".* botocore says: Unable to parse config file: .*credentials"):
        make_client("http://h")


def test_error_of_buckets_without_boto3_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "botocore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botocore", None)
    said = r"buckets \(s3://\) need boto3, which is not installed: pip install 'shmload\[s3\]'"
    with pytest.raises(StoreError, match=said):
        make_client("http://h")
    with pytest.raises(StoreError, match=said):
        make_client("http://h", "a", "s").store("bucket")
    with pytest.raises(StoreError, match=said):
        open_store("s3://bucket", make_client("http://h", anonymous=True))
    assert open_store("http://h", make_client("http://h", anonymous=True)).url == "http://h"


def test_boto3_is_imported_only_for_buckets(tmp_path: Path) -> None:
    program = (
        "import sys, shmload.remote as remote\n"
        "remote.open_store(sys.argv[1]), remote.open_store('http://h'), remote.make_client('http://h', 'a', 's')\n"
        "sys.exit(any(name.partition('.')[0] in ('boto3', 'botocore', 'urllib3') for name in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)]).returncode == 0


def test_botocore_finds_credentials_that_shmload_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    session = pytest.importorskip("botocore.session")
    with pytest.raises(StoreError, match="no credentials: give access_key"):
        make_client("http://h")
    with pytest.raises(StoreError, match=r"botocore says: The config profile \(nobody\) could not be found"):
        make_client("http://h", profile="nobody")

    class Renewing:
        number = 0

        def get_frozen_credentials(self) -> Any:
            self.number += 1
            if self.number > 4:
                raise RuntimeError("signed out")
            return session.botocore.credentials.ReadOnlyCredentials("a", f"s{self.number}", "t")

    monkeypatch.setattr(session.Session, "get_credentials", lambda self: Renewing())
    client = make_client("http://h")
    assert [keys_of(client)[1] for _ in range(2)] == ["s1", "s2"]
    again = pickle.loads(pickle.dumps(client))
    assert [keys_of(again)[1] for _ in range(2)] == ["s3", "s3"]
    assert keys_of(client)[1] == "s4"
    with pytest.raises(StoreError, match=r"cannot renew the credentials: signed out\. Sign in again"):
        keys_of(client)


@pytest.mark.parametrize("region", ["US", "default", "", None, "us-east-1"])
def test_any_region_is_accepted(server: store_kit.Server, region: str | None) -> None:
    if server.name != "ceph" and region not in (None, "us-east-1"):
        pytest.skip("needs radosgw: moto knows Amazon's regions only")
    client = server.client(region=region)
    assert (region or "us-east-1") == client.region
    client.store("tests", "region").put("x", b"x")
    assert bytes(client.store("tests", "region").get("x")) == b"x"


def test_endpoint_and_region_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ((made := make_client(anonymous=True)).endpoint, made.path_style) == ("https://s3.us-east-1.amazonaws.com", False)
    made = make_client("https://s3.eu-west-3.amazonaws.com/", anonymous=True)
    assert (made.endpoint, made.region, made.path_style) == ("https://s3.eu-west-3.amazonaws.com", "eu-west-3", False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "one")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://general:1")
    made = make_client(anonymous=True)
    assert (made.endpoint, made.region, made.path_style) == ("http://general:1", "one", True)
    monkeypatch.setenv("AWS_REGION", "two")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://for.s3:2")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/some/file")
    made = make_client(anonymous=True)
    assert (made.endpoint, made.region, made.ca_file) == ("http://for.s3:2", "two", "/some/file")
    made = make_client("https://given", anonymous=True, region="three", path_style=False)
    assert (made.endpoint, made.region, made.path_style) == ("https://given", "three", False)


def test_botocore_trusts_ca_file_or_else_the_systems_certificates_like_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "system.pem").touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "system.pem"))
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)

    def trusted(**options: Any) -> Any:
        client = make_client("https://host:7", anonymous=True, **options)
        return create_botocore_client(client, 1)._endpoint.http_session._verify

    assert trusted(ca_file="/some/file") == "/some/file"
    assert trusted() == str(tmp_path / "system.pem")


def test_bucket_is_in_the_host_or_in_the_path() -> None:
    def place(bucket: str, **options: Any) -> tuple[str, str]:
        store = make_client("https://host:7", anonymous=True, **options).store(bucket)
        return store._transport.base_url, store._base

    assert place("bkt") == ("https://host:7", "/bkt")
    assert place("bkt", path_style=False) == ("https://bkt.host:7", "")
    assert place("b.c", path_style=False) == ("https://host:7", "/b.c")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("host:9000", "is not an endpoint: it needs http:// or https://, a host and optionally a port"),
        ("ftp://host", "is not an endpoint"),
        ("http://host/bucket", "give bucket and folder separately"),
        ("http://", "is not an endpoint"),
        ("http://me:SECRETwJalr@host", "contains a user or password: give access_key and secret_key instead"),
    ],
)
def test_invalid_endpoint_is_refused(url: str, said: str) -> None:
    with pytest.raises(StoreError, match=said) as caught:
        make_client(url, anonymous=True)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("options", [{"retries": -1}, {"timeout_s": 0}, {"stall_s": -1.0}, {"parallel": 0}])
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="retries must be at least 0, parallel at least 1, and times positive"):
        make_client("http://h", "a", "s", **options)


@pytest.mark.parametrize("bucket", ["", "a/b", "a\n"])
def test_invalid_bucket_name_is_refused(bucket: str) -> None:
    with pytest.raises(StoreError, match="is not a bucket's name: give the bucket alone, and the rest of the path as folder"):
        make_client("http://h", anonymous=True).store(bucket)


def test_unpickled_client_equals_the_original() -> None:
    made = make_client("http://h:1", "a", "s", session_token="t", region="r", retries=2, timeout_s=3, stall_s=9, parallel=7)
    again = pickle.loads(pickle.dumps(made))
    assert made == again
    assert hash(made) == hash(again)
    assert keys_of(again) == ("a", "s", "t")
    assert (made.retry_policy.retries, made.retry_policy.timeout_s, made.retry_policy.stall_s) == (2, 3, 3)
    assert made != make_client("http://h:1", "a", "other", session_token="t", region="r")


def test_boto3_client_is_accepted(server: store_kit.Server) -> None:
    boto3 = pytest.importorskip("boto3")
    theirs = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name=server.region,
    )
    ours = client_of(theirs)
    assert (server.endpoint, server.region, True) == (ours.endpoint, ours.region, ours.path_style)
    store = pickle.loads(pickle.dumps(ours.store("tests", "boto3")))
    store.put("x", b"ours")
    assert theirs.get_object(Bucket="tests", Key="boto3/x")["Body"].read() == b"ours"
    theirs.put_object(Bucket="tests", Key="boto3/x", Body=b"theirs")
    assert bytes(store.get("x")) == b"theirs"
    assert client_of(ours) is ours
    store.close()
    theirs.close()


def test_error_of_botocore_is_passed_on_with_a_remedy() -> None:
    store = make_client("http://127.0.0.1:1", ACCESS, SECRET, region="planet earth").store("bucket")
    with pytest.raises(StoreError, match=r"cannot write s3://bucket/x: .*'planet earth'.* Check the bucket's name, the region"):
        store.put("x", b"")


def test_writing_to_a_missing_server_is_an_error(pauses: list[float]) -> None:
    store = make_client("http://127.0.0.1:1", ACCESS, SECRET, retries=2).store("bucket")
    with pytest.raises(StoreError, match=r"cannot write s3://bucket/x: no answer from http://127.0.0.1:1 .*; failed 3 times"):
        store.put("x", b"")
    assert len(pauses) == 2


def test_unsigned_boto3_client_is_anonymous() -> None:
    boto3 = pytest.importorskip("boto3")
    import botocore
    from botocore.config import Config

    theirs = boto3.client("s3", region_name="eu-west-1", config=Config(signature_version=botocore.UNSIGNED))
    ours = client_of(theirs)
    assert (ours.endpoint, ours.region, ours.path_style) == ("https://s3.eu-west-1.amazonaws.com", "eu-west-1", False)
    assert ours.credentials.anonymous


def test_object_that_is_not_a_client_is_refused() -> None:
    with pytest.raises(TypeError, match=r"client must come from shmload.remote.make_client or be boto3's S3 client, got str"):
        client_of("http://h")


SECRET, TOKEN, ACCESS = "SECRETsecretSECRETsecret", "TOKENtokenTOKENtoken", "ACCESSaccessACCESS"


def printed_error(error: BaseException, *, richly: bool) -> str:
    """Returns everything that is printed of an error, including the locals of shmload's frames but not those of the test's."""
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(shmload.__path__[0]):
        trace = trace.tb_next
    assert trace is not None
    shown = traceback.TracebackException(type(error), error, trace, capture_locals=True)
    found = "".join(shown.format()) + repr(error) + repr(vars(error)) + str(pickle.dumps(error))
    if richly:  # rich also prints the content of containers
        file = io.StringIO()
        Console(file=file, width=250).print(Traceback.from_exception(type(error), error, trace, show_locals=True))
        found += file.getvalue()
    return found


def test_secrets_are_never_printed(
    server: store_kit.Server,
    proxy: FaultProxy,
    pauses: list[float],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.DEBUG)
    url = proxy.url
    client = make_client(url, ACCESS, SECRET, session_token=TOKEN, retries=1, stall_s=0.2)
    store = client.store("tests", "secret")
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    echo = f"<Error><Code>SignatureDoesNotMatch</Code><Message>{ACCESS} {TOKEN} {SECRET}</Message><StringToSign>{SECRET}</StringToSign></Error>"
    faults = [
        Status(403, echo.encode()),
        Status(503, echo.encode()),
        Garbage(echo.encode()),
        Status(200, echo.encode()),
        *([None] if server.name == "ceph" else []),  # Ceph has no such key; moto accepts any
    ]
    uses: list[Callable[[], object]] = [
        lambda: store.get("x"),
        lambda: store.head("x"),
        lambda: store_kit.read_range(store, "x", 1 << 30, 5),
        lambda: store.read_into("x", bytearray(9)),
        lambda: list(store.list_objects()),
        lambda: store.put("x", b"x"),
        lambda: store.put_file("x", path),
        lambda: store.delete(["x"]),
        lambda: store.get("../x"),
        lambda: make_client("no url", ACCESS, SECRET, session_token=TOKEN),
        lambda: make_client(url, ACCESS, SECRET, session_token=TOKEN, retries=-1),
        lambda: make_client(url, "", SECRET, session_token=TOKEN),
        lambda: make_client("http://127.0.0.1:1", ACCESS, SECRET, session_token=TOKEN).store("bkt").get("x"),
    ]
    said = []
    for fault in faults:
        for use in uses:
            proxy.script(*[fault] * 4)
            with pytest.raises((StoreError, ValueError)) as caught:
                use()
            said.append(printed_error(caught.value, richly=fault is None or fault is faults[0]))
    values = (client, store, client.credentials, [client], client.retry_policy, store._transport)
    said += [repr(value) + str(value) + f"{value}" for value in values]
    said += [caplog.text, *capfd.readouterr()]
    assert len(said) > 60
    for text in said:
        assert SECRET not in text
        assert TOKEN not in text
        assert ACCESS not in text


def test_repr_of_credentials_shows_only_whether_they_are_set() -> None:
    assert repr(Credentials()) == "Credentials(none)"
    assert repr(Credentials("a", "b", "c")) == "Credentials(***)"


def test_empty_credentials_sign_nothing() -> None:
    assert Credentials().anonymous
    assert Credentials().of_botocore() is None


def test_short_credentials_are_masked_only_as_whole_words() -> None:
    credentials = Credentials("test", "secret/key+is-quite-long")
    assert credentials.redacted("latest/tests: 'test' <secret/key+is-quite-long>x") == "latest/tests: '***' <***>x"


@pytest.mark.parametrize(
    ("keys", "shown"), [(("test", "tests"), "s3://test/tests/latest.tar"), (("a", "s3"), "s3://test/tests/latest.tar")]
)
def test_object_names_are_never_masked(keys: tuple[str, str], shown: str) -> None:
    client = make_client("http://127.0.0.1:9", *keys)
    answer = {"ResponseMetadata": {"HTTPStatusCode": 404, "HTTPHeaders": {}}, "Error": {"Code": "NoSuchKey", "Message": "no test"}}
    assert (
        str(failure_of_response(answer, "s3://test/tests/latest.tar", "read", client))
        == f"no such object: {shown} at http://127.0.0.1:9"
    )


def test_error_says_that_an_object_is_archived() -> None:
    client = make_client("http://127.0.0.1:9", "test", "test")
    error = {"Code": "InvalidObjectState", "Message": "The operation is not valid for the object's storage class"}
    answer = {"ResponseMetadata": {"HTTPStatusCode": 403, "HTTPHeaders": {}}, "Error": error}
    said = str(failure_of_response(answer, "s3://b/x", "read s3://b/x", client))
    assert said.endswith("; the object is archived (GLACIER, DEEP_ARCHIVE): restore it first, then read it"), said


def test_error_says_that_an_azure_blob_is_archived() -> None:
    class HttpResponseError(Exception):
        status_code, error_code = 409, "BlobArchived"

    said = str(FilesystemStore("memory://x")._failure(HttpResponseError("This operation is not permitted"), "x", "read"))
    assert said.endswith("; the object is archived: restore (rehydrate) it first, then read it"), said
