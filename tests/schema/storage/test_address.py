"""Addresses of data: the parts of each, and the error of a wrong one."""

from __future__ import annotations

import pytest

from schema.config.secrets import cut, masked
from schema.storage.address import AddressError, is_remote, parse_address


@pytest.mark.parametrize(
    ("written", "inner"),
    [
        ("s3://bucket/a/b.parquet", "bucket/a/b.parquet"),
        ("S3://bucket/", "bucket"),
        ("gcs://my.bucket_1//a b/é.csv/", "my.bucket_1/a b/é.csv"),
        ("hdfs://node:8020/user/me/rows", "/user/me/rows"),
        ("hdfs:///rows", "/rows"),
        ("abfss://rows@account.dfs.core.windows.net/a.csv", "rows/a.csv"),
        ("abfs://rows/a.csv", "rows/a.csv"),
    ],
)
def test_what_an_address_names(written: str, inner: str) -> None:
    address = parse_address(written)
    assert address.inner == inner
    assert address.of("x/y.csv").inner == f"{inner}/x/y.csv"
    assert parse_address(str(address)) == address
    assert cut(written) == masked(written) == written, "a container is not a user with a password"


@pytest.mark.parametrize(
    ("written", "fault", "hint"),
    [
        ("s3://", "names no bucket", "s3://bucket/path"),
        ("s3:///rows", "names no bucket", "s3://bucket/path"),
        ("gs://Bucket/rows", "'Bucket' is not a bucket name", "gs://bucket/path"),
        ("s3://bucket/../x", "an empty part", "write the path out"),
        ("s3://bucket/a//b", "an empty part", "write the path out"),
        ("s3://bucket/*.parquet", "a pattern or a query", "the directory of several"),
        ("s3://bucket/a?endpoint_override=x", "a pattern or a query", "come from the environment"),
        ("s3://key:hidden@bucket/a", "holds no credentials", "AWS_ACCESS_KEY_ID"),
        ("abfs://rows:hidden@account.dfs.core.windows.net/a", "holds no credentials", "AZURE_STORAGE_KEY"),
        ("hdfs://me@node:8020/a", "holds no credentials", "HADOOP_USER_NAME"),
        ("hdfs://node:8020", "has no path", "hdfs:///path"),
        ("abfs://rows@Account/a", "names no container of an account", "AZURE_STORAGE_ACCOUNT"),
        ("oss://bucket/a", "not an address that data is read from", "s3://bucket/path"),
    ],
)
def test_what_is_none(written: str, fault: str, hint: str) -> None:
    with pytest.raises(AddressError) as error:
        parse_address(written)
    assert fault in str(error.value)
    assert hint in error.value.hint
    assert "hidden" not in str(error.value) + error.value.hint
    assert is_remote(written) == (not written.startswith("oss"))
