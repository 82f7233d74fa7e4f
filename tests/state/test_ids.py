"""Ids are random UUIDs, however they are made."""

from __future__ import annotations

import copy
import pickle
from uuid import RFC_4122, UUID, SafeUUID

from treenail.clock import new_id, new_ids


def test_an_id_is_a_random_uuid() -> None:
    """It is in every way what `uuid.uuid4` makes: version, variant, text, copies."""
    for _ in range(200):
        made = new_id()
        assert (made.version, made.variant, made.is_safe) == (4, RFC_4122, SafeUUID.unknown)
        assert UUID(str(made)) == UUID(bytes=made.bytes) == made
        assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made


def test_no_two_ids_are_alike() -> None:
    """Every bit that is not the version or the variant is random."""
    made = [new_id().int for _ in range(1_000)]
    assert len(set(made)) == len(made)
    ever, always = 0, -1
    for each in made:
        ever, always = ever | each, always & each
    assert (ever ^ always).bit_count() == 122


def test_ids_that_count_on_are_as_good_as_random_ones() -> None:
    """They are valid ids, they count from a random one, and two rows of them have none in common."""
    one, other = new_ids(), new_ids()
    made = [next(one) for _ in range(100)]
    for each in made:
        assert (each.version, each.variant, each.is_safe) == (4, RFC_4122, SafeUUID.unknown)
        assert UUID(str(each)) == each
    assert [each.int - made[0].int for each in made] == list(range(100))
    assert not {next(other) for _ in range(100)} & set(made)
