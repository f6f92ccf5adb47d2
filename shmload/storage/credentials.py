"""Who asks: botocore's credentials, found and renewed by it (environment, profiles, single sign-on, roles of machines).

What is ours: they can be pickled, compared and printed without showing anything, and their errors say what to do.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from shmload.errors import StoreError

__all__ = ["Credentials", "find_credentials", "library", "region_of_environment"]


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
