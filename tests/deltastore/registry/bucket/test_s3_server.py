"""The S3 server of the tests: what the tests of buckets rely on."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import obstore
from obstore.exceptions import AlreadyExistsError

from tests.helpers.s3_server import Bucket

NUM_THREADS = 16
# Without the lock of tests/helpers/s3_program.py, two threads create one object in about one round of twenty.
NUM_ROUNDS = 60


def test_one_of_sixteen_threads_creates_an_object_that_must_not_exist(bucket: Bucket) -> None:
    store, start = bucket.store(), Barrier(NUM_THREADS)

    def creates(name: str, content: bytes) -> bool:
        start.wait()
        try:
            obstore.put(store, name, content, mode="create")
        except AlreadyExistsError:
            return False
        return True

    contents = [str(number).encode() for number in range(NUM_THREADS)]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for round_number in range(NUM_ROUNDS):
            name = f"object-{round_number}"
            created = list(threads.map(creates, [name] * NUM_THREADS, contents))
            assert created.count(True) == 1
            assert bytes(obstore.get(store, name).bytes()) == contents[created.index(True)]


def test_a_range_of_a_large_object_has_its_bytes(bucket: Bucket) -> None:
    store, content = bucket.store("below/a/prefix"), os.urandom(12 << 20)
    obstore.put(store, "large", content)
    assert (
        bytes(obstore.get_range(store, "large", start=7 << 20, length=1 << 20)) == content[7 << 20 : 8 << 20]
    )
    assert bytes(obstore.get_range(store, "large", start=11 << 20, end=12 << 20)) == content[11 << 20 :]


def test_buckets_share_nothing(bucket: Bucket, other_bucket: Bucket) -> None:
    obstore.put(bucket.store(), "name", b"content")
    assert obstore.list(other_bucket.store()).collect() == []
