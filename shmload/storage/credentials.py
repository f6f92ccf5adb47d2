"""Credentials for S3, found and renewed by botocore: environment, profiles, single sign-on, instance roles.

`Credentials` adds that they can be pickled, compared and printed without revealing a secret, and that errors name a remedy.
"""

from __future__ import annotations

import re
from typing import Any

from shmload.errors import StoreError
from shmload.storage.botocore_modules import library

__all__ = ["Credentials", "find_credentials"]

_LONG_SECRET = 16  # a secret of at least this many characters is masked wherever it occurs


class Credentials:
    """Fixed keys, or botocore's credentials, which renew themselves. Without either, requests are not signed.

    Renewal does not survive pickling: a pickle contains the current keys. A forked child can renew.

    Args:
        access_key: ID of the access key.
        secret_key: the secret that signs.
        session_token: token of temporary keys.
        renewed: botocore's credentials, instead of keys.
    Attributes:
        anonymous: whether requests are not signed.
    """

    def __init__(
        self, access_key: str | None = None, secret_key: str | None = None, session_token: str | None = None, *, renewed: Any = None
    ) -> None:
        self._keys = None if access_key is None else (access_key, secret_key, session_token)
        self._renewed = renewed
        self.anonymous = access_key is None and renewed is None

    def of_botocore(self) -> Any:
        """Return the object that botocore signs with; None if requests are not signed."""
        if self._renewed is None and self._keys is not None:
            return library("botocore.credentials").Credentials(*self._keys)
        return self._renewed

    def frozen(self) -> Any:
        """Return the current keys, all from the same renewal. Keep them in no variable, because botocore's repr shows the secret.

        Raises:
            StoreError: renewal failed.
        """
        try:
            return self.of_botocore().get_frozen_credentials()
        except Exception as error:  # providers of credentials may raise anything
            said = str(error)
        raise StoreError(f"cannot renew the credentials: {said}. Sign in again")

    def redacted(self, text: str) -> str:
        """Return the text with all secrets masked. A short secret is masked only as a whole word: "test" stays in "latest"."""
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
        return hash(self.anonymous)  # renewal changes the keys but must not change the hash

    def __repr__(self) -> str:
        return "Credentials(none)" if self.anonymous else "Credentials(***)"


def find_credentials(profile: str | None = None) -> Credentials:
    """Return the credentials that botocore finds in the places where all AWS tools look.

    Args:
        profile: profile of the shared credentials file; None is the default one.
    Raises:
        StoreError: botocore finds none.
    """
    session = library("botocore.session").Session(profile=profile)
    said = ""
    try:
        found = session.get_credentials()
    except Exception as error:  # errors in configuration files, profiles and providers
        found, said = None, f". botocore says: {error}"
    if found is None:
        raise StoreError(
            "no credentials: give access_key and secret_key, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a "
            f"profile of ~/.aws/credentials in AWS_PROFILE; anonymous=True reads public buckets{said}"
        )
    return Credentials(renewed=found)
