"""Addresses of data that is not on this machine: what each may be. Pure: nothing is asked.

s3://bucket/path                                  gs://bucket/path, gcs://bucket/path
hdfs://host:port/path, hdfs:///path               abfs[s]://container@account.dfs.core.windows.net/path
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

SCHEMES = {"s3": "s3", "gs": "gs", "gcs": "gs", "hdfs": "hdfs", "abfs": "abfs", "abfss": "abfs"}
"""Schemes that data is read from, and what each is another name of."""
EXAMPLES = (
    "s3://bucket/path, gs://bucket/path, hdfs://host:8020/path, abfs://container@account.dfs.core.windows.net/path"
)
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/*(.*)", re.DOTALL)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_CONTAINER = re.compile(r"[a-z0-9$](?:[a-z0-9-]{1,61})[a-z0-9]")
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}(?:\.(?:dfs|blob)(?:\.[a-z0-9-]+)+)?")
_HOST = re.compile(r"(?:[A-Za-z0-9._-]+(?::\d{1,5})?)?")
_SECRETS_OF = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "hdfs": "HADOOP_USER_NAME, or the ticket of kinit",
    "abfs": "AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or what `az login` leaves",
}


class AddressError(ValueError):
    """The address names no place; the text says why, `hint` what to write."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class RemoteAddress:
    """A file, or what the paths of several begin with.

    scheme: without its other names. host: of hdfs, with its port; of abfs, the account and its domain; else "".
    bucket: or container; "" for hdfs. path: below it, without `/` at either end. written: as the user wrote it.
    """

    scheme: str
    host: str
    bucket: str
    path: str
    written: str

    def __str__(self) -> str:
        return self.written

    @property
    def inner(self) -> str:
        """The path as the file system of the scheme is asked for it."""
        return f"/{self.path}" if self.scheme == "hdfs" else f"{self.bucket}/{self.path}".rstrip("/")

    def of(self, relative: str) -> RemoteAddress:
        """The address of a file below this one."""
        below = relative if not self.path else f"{self.path}/{relative}"
        return replace(self, path=below, written=f"{self.written}/{relative}")


def is_remote(name: str) -> bool:
    """Whether a dataset's name is an address of one of these schemes, be it whole or not."""
    scheme, separator, _ = name.partition("://")
    return bool(separator) and scheme.lower() in SCHEMES


def parse_address(name: str) -> RemoteAddress:
    """Read an address. Raises `AddressError`, whose text repeats no credentials."""
    match = _ADDRESS.fullmatch(name)
    if match is None or match[1].lower() not in SCHEMES:
        raise AddressError("it is not an address that data is read from", f"write one such as {EXAMPLES}")
    written_scheme, host, path = match[1].lower(), match[2], match[3].rstrip("/")
    scheme = SCHEMES[written_scheme]
    before, at, host = host.rpartition("@")
    if at and (scheme != "abfs" or ":" in before):
        hint = f"remove the part before the `@`: credentials come from {_SECRETS_OF[scheme]}"
        raise AddressError("the address of data holds no credentials", hint)
    if any(mark in path for mark in "?#*"):
        hint = "name one file, or the directory of several; endpoint and credentials come from the environment"
        raise AddressError(f"{name} has a pattern or a query", hint)
    if any(part in ("", ".", "..") for part in path.split("/")) and path:
        raise AddressError(f"{name} has an empty part, `.` or `..` in its path", "write the path out")
    start = f"{written_scheme}://"
    if scheme == "hdfs":
        if not _HOST.fullmatch(host) or not path:
            fault = "has no path" if not path else f"names no host: {host!r}"
            raise AddressError(f"{name} {fault}", "write hdfs://host:8020/path, or hdfs:///path for fs.defaultFS")
        return RemoteAddress(scheme, host, "", path, f"{start}{host}/{path}")
    if scheme == "abfs":
        return _azure(name, start, before or host, host if at else "", path)
    if not _BUCKET.fullmatch(host):
        fault = f"{host!r} is not a bucket name" if host else f"{name} names no bucket"
        raise AddressError(fault, f"write {start}bucket/path; the endpoint comes from the environment")
    return RemoteAddress(scheme, "", host, path, f"{start}{host}" + (f"/{path}" if path else ""))


def _azure(name: str, start: str, container: str, account: str, path: str) -> RemoteAddress:
    hint = f"write {start}container@account.dfs.core.windows.net/path, or {start}container/path with "
    hint += "AZURE_STORAGE_ACCOUNT in the environment"
    if not _CONTAINER.fullmatch(container) or (account and not _ACCOUNT.fullmatch(account)):
        raise AddressError(f"{name} names no container of an account", hint)
    place = f"{container}@{account}" if account else container
    return RemoteAddress("abfs", account, container, path, f"{start}{place}" + (f"/{path}" if path else ""))
