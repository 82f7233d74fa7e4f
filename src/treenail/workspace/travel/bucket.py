"""A depot in an S3-compatible bucket. The log's database has the books: what is there, and who needs it.

An object is written before the books say that it is there, and after they say who needs it; so what they say
can be relied on, and nothing is deleted that somebody is about to need (`treenail.log.postgres.objects`).
Credentials come from the environment, as for other programs (`AWS_ACCESS_KEY_ID` and so on).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit
from uuid import UUID

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from treenail.errors import DepotError, UsageError

_AT_ONCE = 16
"""How many requests are under way at once."""
_RETRY_S = 30


class Books(Protocol):
    """Who needs which object of a bucket; see `treenail.log.postgres.objects.ObjectTable`."""

    name: str

    def claim(self, holder: UUID, ids: Collection[bytes]) -> set[bytes]:
        """Hold objects, and return the names of those that are not there yet."""
        ...

    def put(self, holder: UUID, objects: Mapping[bytes, bytes | None]) -> None:
        """Write down that objects are there."""
        ...

    def share(self, holder: UUID, shared: UUID) -> None:
        """Let a holder need everything that another one holds."""
        ...

    def release(self, holder: UUID, *, keep: UUID | None = None) -> None:
        """Forget a holder, and write down what is to be deleted."""
        ...

    def clear_leftovers(self, delete: Any) -> int:
        """Have deleted what was written down; return how many there were."""
        ...


class Bucket:
    """Objects in a bucket, `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`, with books in a database."""

    def __init__(self, url: str, books: Books) -> None:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query))
        unknown = set(options) - {"endpoint", "region"}
        if parts.scheme != "s3" or not parts.netloc or "@" in parts.netloc or unknown:
            raise UsageError(
                "a bucket is named s3://BUCKET/PREFIX?endpoint=URL&region=NAME; credentials come from the "
                "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
            )
        self.name = url
        """Where it is, as the log records it."""
        self._books = books
        self._pid = os.getpid()
        endpoint = options.get("endpoint")
        config: dict[str, Any] = {
            "region": options.get("region") or os.environ.get("AWS_REGION", "us-east-1")
        }
        if endpoint is not None:
            config["endpoint"] = endpoint
        self._store = S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            client_options={
                "allow_http": bool(endpoint and endpoint.startswith("http://")),
                "timeout": "30s",
            },
            retry_config={"max_retries": 5, "retry_timeout": timedelta(seconds=_RETRY_S)},
            **config,
        )

    def __str__(self) -> str:
        return self.name

    def claim(self, holder: UUID, ids: Collection[bytes]) -> set[bytes]:
        """Hold objects, and return the names of those that are not there yet: they are to be put."""
        return self._books.claim(holder, ids)

    def put(self, holder: UUID, objects: Mapping[bytes, bytes]) -> None:
        """Keep objects for a holder. One that is there already is not replaced."""
        missing = self._books.claim(holder, objects)
        self._each(lambda oid: self._put(oid, objects[oid]), missing)
        self._books.put(holder, dict.fromkeys(objects))

    def get(self, ids: Collection[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield objects with their names, in any order. Raises `DepotError` if one is not there."""
        wanted = list(ids)
        for start in range(0, len(wanted), 4 * _AT_ONCE):
            yield from self._each(lambda oid: (oid, self._get(oid)), wanted[start : start + 4 * _AT_ONCE])

    def share(self, holder: UUID, shared: UUID) -> None:
        """Let a holder need everything that another one holds, now and later."""
        self._books.share(holder, shared)

    def release(self, holder: UUID, *, keep: UUID | None = None) -> None:
        """Forget what a holder holds and shares, and delete what nobody else does; `keep` it still shares."""
        self._books.release(holder, keep=keep)
        self.sweep()

    def sweep(self) -> None:
        """Delete what deletions that were cut off have left."""
        while self._books.clear_leftovers(self._delete):
            pass

    def _each(self, work: Any, ids: Collection[bytes]) -> list[Any]:
        if os.getpid() != self._pid:
            raise UsageError("a bucket cannot be used in a forked process; open it there")
        if len(ids) < 2:
            return [work(each) for each in ids]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(work, ids))

    def _put(self, oid: bytes, payload: bytes) -> None:
        try:
            obstore.put(self._store, _key(oid), payload, mode="create", use_multipart=False)
        except AlreadyExistsError:
            pass
        except (BaseError, OSError) as error:
            raise self._trouble("write", oid, error) from error

    def _get(self, oid: bytes) -> bytes:
        try:
            return bytes(obstore.get(self._store, _key(oid)).bytes())
        except FileNotFoundError as error:
            raise DepotError(
                f"the object {oid.hex()} is missing from {self}; what needs it cannot be read: restore the "
                f"bucket from a backup, or begin the run again"
            ) from error
        except (BaseError, OSError) as error:
            raise self._trouble("read", oid, error) from error

    def _delete(self, ids: Collection[bytes]) -> None:
        try:
            obstore.delete(self._store, [_key(each) for each in ids])
        except (BaseError, OSError) as error:
            raise DepotError(f"objects could not be deleted from {self}: {_said(error)}") from error

    def _trouble(self, doing: str, oid: bytes, error: Exception) -> DepotError:
        return DepotError(
            f"could not {doing} the object {oid.hex()} in {self}: {_said(error)}; check that the bucket is "
            f"there, and the credentials"
        )


def _key(oid: bytes) -> str:
    text = oid.hex()
    return f"objects/{text[:2]}/{text[2:]}"


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
