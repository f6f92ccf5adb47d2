"""Who asks: the keys that sign requests, where they come from, and how they stay out of sight.

The usual places are read in their usual order: arguments, environment, the shared credentials file. What only AWS's own library can
fetch (roles, single sign-on, a machine's metadata) is left to it, if it is installed. No repr, error or log has a secret in it.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmload.errors import StoreError

__all__ = ["Credentials", "Keys", "find_keys"]

_EXTRA = "pip install 'shmload[s3]'"


@dataclass(frozen=True)
class Keys:
    """An access key with its secret."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)

    def redacted(self, text: str) -> str:
        """The text without any of these."""
        for secret in (self.secret_key, self.session_token, self.access_key):
            text = text.replace(secret, "***") if secret else text
        return text


class Credentials:
    """Keys that stay as they are, or a library's that renews them.

    A renewing library's object stays in this process: a pickle has the keys of that moment, a forked child goes on renewing.

    Args:
        keys: those that stay; None signs nothing.
        renewed: gives the keys of this moment.
    """

    def __init__(self, keys: Keys | None, renewed: Callable[[], Keys] | None = None) -> None:
        self._keys = keys
        self._renewed = renewed

    def now(self) -> Keys | None:
        """The keys to sign with."""
        return self._keys if self._renewed is None else self._renewed()

    def __getstate__(self) -> dict[str, Any]:
        return {"_keys": self.now(), "_renewed": None}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Credentials) and self.now() == other.now()

    def __hash__(self) -> int:
        return hash(self._keys)

    def __repr__(self) -> str:
        return "Credentials(none)" if self._renewed is None and self._keys is None else "Credentials(***)"


def find_keys(profile: str | None = None) -> Credentials:
    """Keys of the environment, else of the shared credentials file, else what botocore finds.

    Raises:
        StoreError: there are none.
    """
    found = None if profile else _of_environment()
    if found is None:
        found = _of_file(profile or os.environ.get("AWS_PROFILE") or "default")
    return Credentials(found) if found is not None else _of_botocore(profile)


def region_of_environment() -> str | None:
    """The region that the environment names."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or None


def _of_environment() -> Keys | None:
    access_key, secret_key = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not access_key or not secret_key:
        return None
    return Keys(access_key, secret_key, os.environ.get("AWS_SESSION_TOKEN") or None)


def _of_file(profile: str) -> Keys | None:
    path = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    file = configparser.RawConfigParser()
    try:
        file.read(path)
    except (configparser.Error, UnicodeDecodeError):
        raise StoreError(f"{path} is no credentials file: it needs lines of [profile] and name = value") from None
    if not file.has_section(profile):
        return None
    values = file[profile]
    access_key, secret_key = values.get("aws_access_key_id"), values.get("aws_secret_access_key")
    return Keys(access_key, secret_key, values.get("aws_session_token")) if access_key and secret_key else None


def _of_botocore(profile: str | None) -> Credentials:
    missing = (
        "no credentials: give access_key and secret_key, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a "
        "profile of ~/.aws/credentials in AWS_PROFILE; anonymous=True reads public buckets"
    )
    try:
        from botocore.session import Session
    except ImportError:
        raise StoreError(f"{missing}. Roles, single sign-on and a machine's own role need {_EXTRA}") from None
    try:
        found = Session(profile=profile).get_credentials()
    except Exception as error:
        raise StoreError(f"{missing}. botocore says: {error}") from None
    if found is None:
        raise StoreError(missing)
    return of_botocore(found)


def of_botocore(credentials: Any) -> Credentials:
    """What a botocore credentials object says, asked each time, as it may renew itself."""

    def renewed() -> Keys:
        try:
            frozen = credentials.get_frozen_credentials()
        except Exception as error:
            raise StoreError(f"the credentials could not be renewed: {error}. Sign in again") from None
        return Keys(frozen.access_key, frozen.secret_key, frozen.token)

    return Credentials(None, renewed)
