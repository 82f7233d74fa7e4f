"""The seam to depots, and the form that objects have in one.

An object is in a depot as git keeps a single one: deflated, under a head that says kind and size. One of a
megabyte or more is cut into pieces, which are objects of their own, and consists of their names. Either way
its name is git's name for its content, and what is read is compared with it.
"""

from __future__ import annotations

import hashlib
import importlib
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable
from uuid import UUID

from treenail.errors import DepotError, UsageError
from treenail.workspace.packs import ObjectKind, hash_object

PIECE_BYTES = 1024 * 1024
"""Objects of this size and more are cut into pieces of this size."""

_PIECES = b"pieces\0"
_HEAD = struct.Struct(">8sQ")
_ID_BYTES = 20
_PIECES_AT_ONCE = 16
_KINDS: tuple[ObjectKind, ...] = ("blob", "tree", "commit", "tag")


@runtime_checkable
class Depot(Protocol):
    """Keeps objects by name for those that hold them: a run, or an origin that several runs share.

    Every method may be called from any thread and repeated. `treenail.testing.depot.DepotConformance`
    checks an implementation against these promises.
    """

    @property
    def name(self) -> str:
        """Where it is, as the log records it, without secrets; empty for the log's own database."""
        ...

    def claim(self, holder: UUID, ids: Collection[bytes]) -> set[bytes]:
        """Hold objects, and return the names of those that are not there yet: they are to be put.

        What is there, and held, stays there.
        """
        ...

    def put(self, holder: UUID, objects: Mapping[bytes, bytes]) -> None:
        """Keep objects for a holder. One that is there already is not replaced."""
        ...

    def get(self, ids: Collection[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield objects with their names, in any order. Raises `DepotError` if one is not there."""
        ...

    def share(self, holder: UUID, shared: UUID) -> None:
        """Let a holder need everything that another one holds, now and later."""
        ...

    def release(self, holder: UUID, *, keep: UUID | None = None) -> None:
        """Forget what a holder holds and shares, and delete what nobody else does; `keep` it still shares."""
        ...

    def sweep(self) -> None:
        """Delete what deletions that were cut off have left."""
        ...


def depot_of(log: object, name: str = "") -> Depot:
    """Return the depot that a log names: its own database's, unless it has a name.

    Raises `UsageError` if there is none.
    """
    own = getattr(log, "objects", None)
    if not isinstance(own, Depot):
        raise UsageError(
            "files travel only with a log on Postgres: store='postgresql://...'; see docs/scale.md"
        )
    if not name:
        return own
    try:
        bucket = importlib.import_module("treenail.workspace.travel.bucket")
    except ImportError as error:
        raise UsageError(
            f"the extra 'bucket' is not installed (there is no {error.name or error}); in a checkout of "
            f"Treenail, install it with `pip install '.[bucket]'`"
        ) from error
    made: Depot = bucket.Bucket(name, cast(Any, own).in_bucket(name))
    return made


def packed(kind: ObjectKind, data: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Return an object's name and what a depot keeps of it, by name: the object itself, and its pieces."""
    oid = hash_object(kind, data)
    if len(data) < PIECE_BYTES:
        return oid, {oid: _deflated(kind, data)}
    pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
    kept = {hash_object("blob", each): _deflated("blob", each) for each in pieces}
    kept[oid] = _index(kind, len(data), [hash_object("blob", each) for each in pieces])
    return oid, kept


def packed_stream(chunks: Iterable[bytes], size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield what a depot keeps of a large blob, by name, without holding it whole; the blob comes last."""
    sha = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    names: list[bytes] = []
    held = b""
    for chunk in chunks:
        sha.update(chunk)
        held += chunk
        while len(held) >= PIECE_BYTES:
            piece, held = held[:PIECE_BYTES], held[PIECE_BYTES:]
            names.append(hash_object("blob", piece))
            yield names[-1], _deflated("blob", piece)
    if held:
        names.append(hash_object("blob", held))
        yield names[-1], _deflated("blob", held)
    yield sha.digest(), _index("blob", size, names)


def unpacked(depot: object, oid: bytes, payload: bytes) -> tuple[ObjectKind, bytes]:
    """Return an object's kind and content. Raises `DepotError` unless its name says so."""
    # A piece is the largest that there is, and its head is short.
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(payload, PIECE_BYTES + 64)
    except zlib.error as error:
        raise damaged(depot, oid) from error
    head, _, data = raw.partition(b"\0")
    kind = next((each for each in _KINDS if head.startswith(each.encode() + b" ")), None)
    if kind is None or not unpacker.eof or unpacker.unused_data or hash_object(kind, data) != oid:
        raise damaged(depot, oid)
    return kind, data


def read_object(depot: Depot, oid: bytes) -> tuple[ObjectKind, bytes]:
    """Return an object's kind and content, whole. Raises `DepotError` unless its name says so."""
    ((_, payload),) = depot.get([oid])
    cut = pieces_of(depot, oid, payload)
    if cut is None:
        return unpacked(depot, oid, payload)
    data = b"".join(read_pieces(depot, cut[2]))
    if hash_object(cut[0], data) != oid:
        raise damaged(depot, oid)
    return cut[0], data


def read_pieces(depot: Depot, names: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the pieces of an object, in order."""
    for start in range(0, len(names), _PIECES_AT_ONCE):
        some = names[start : start + _PIECES_AT_ONCE]
        found = dict(depot.get(set(some)))
        for name in some:
            yield unpacked(depot, name, found[name])[1]


def pieces_of(depot: object, oid: bytes, payload: bytes) -> tuple[ObjectKind, int, list[bytes]] | None:
    """Return kind, size and pieces of an object that was cut; None for one that was not."""
    if not payload.startswith(_PIECES):
        return None
    names = payload[len(_PIECES) + _HEAD.size :]
    if len(names) % _ID_BYTES or len(payload) < len(_PIECES) + _HEAD.size:
        raise damaged(depot, oid)
    word, size = _HEAD.unpack_from(payload, len(_PIECES))
    kind = next((each for each in _KINDS if each.encode() == word.rstrip(b"\0")), None)
    if kind is None:
        raise damaged(depot, oid)
    return kind, size, [names[start : start + _ID_BYTES] for start in range(0, len(names), _ID_BYTES)]


def damaged(depot: object, oid: bytes) -> DepotError:
    """Return the error for an object whose content does not match its name."""
    return DepotError(
        f"the object {oid.hex()} in {depot} is damaged: its content does not match its name; nothing was "
        f"changed: restore it from a backup, or begin the run again"
    )


def _deflated(kind: ObjectKind, data: bytes) -> bytes:
    return zlib.compress(b"%b %d\0%b" % (kind.encode(), len(data), data), 1)


def _index(kind: ObjectKind, size: int, names: list[bytes]) -> bytes:
    return b"".join((_PIECES, _HEAD.pack(kind.encode(), size), *names))
