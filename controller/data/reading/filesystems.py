"""Files in buckets and distributed file systems, through pyarrow: what is there, and bytes of it.

    RemoteStore(address).files() -> RemoteFile, …        RemoteStore(address).read(file, offset, n) -> bytes

Endpoint, credentials and proxy come from the environment: of S3 as `schema.storage.aws` resolves them, of the others
as their clients do. A failure is a `RemoteError` that says what to do and whether waiting may mend it. No credential
is in it. pyarrow.fs is imported on first use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from schema.config.secrets import masked
from schema.storage import aws
from schema.storage.address import RemoteAddress

T = TypeVar("T")

CONNECT_S, READ_S = 10.0, 60.0
"""Seconds after which an attempt has failed."""
_NETWORK = re.compile(
    r"curl|NETWORK_CONNECTION|[Tt]ime(d )?(-| )?out|TIMEOUT|[Cc]onnection|[Rr]esolve host|UNAVAILABLE|connect|"
    r"SLOW_DOWN|INTERNAL_FAILURE|THROTTLING|HTTP status (429|5\d\d)|\b50[0234]\b|Connection refused|reset by peer"
)
_LONGEST = 400
"""Characters of an error of a library."""
_REFUSALS = {
    "s3": {
        "NO_SUCH_BUCKET": "no such bucket",
        "INVALID_ACCESS_KEY_ID": aws.UNKNOWN_KEY,
        "SIGNATURE_DOES_NOT_MATCH": aws.WRONG_SECRET,
        "ExpiredToken": aws.EXPIRED,
        "ACCESS_DENIED": aws.DENIED,
        "HTTP status 403": aws.DENIED,
        "PERMANENT_REDIRECT": aws.OTHER_REGION,
        "HTTP status 301": aws.OTHER_REGION,
    },
    "gs": {
        "NOT_FOUND": "no such bucket or file",
        "PERMISSION_DENIED": "access is denied: the account of GOOGLE_APPLICATION_CREDENTIALS needs the role Storage "
        "Object Viewer",
        "UNAUTHENTICATED": "no credentials were found: set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth "
        "application-default login`",
    },
    "hdfs": {
        "Unable to load": "libhdfs was not found: set JAVA_HOME, HADOOP_HOME and CLASSPATH=$(hadoop classpath "
        "--glob), or copy the files here: hdfs dfs -get",
        "HDFS connection failed": "the name node refuses: check its host and port, HADOOP_USER_NAME and kinit",
        "Permission denied": "access is denied: check HADOOP_USER_NAME and kinit",
    },
    "abfs": {
        "Authorization": "access is denied: check AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or the role Storage "
        "Blob Data Reader of the account that is logged in",
        "Credential": "no credentials were found: set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or "
        "AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET, or run `az login`",
        "ContainerNotFound": "no such container",
    },
}


class RemoteError(Exception):
    """A request has failed. passing: whether waiting may mend it."""

    def __init__(self, message: str, *, passing: bool) -> None:
        super().__init__(message)
        self.passing = passing


class ChangedError(RemoteError):
    """The file is not that of the listing any more: what has come of it is of no use."""


@dataclass(frozen=True)
class RemoteFile:
    """A file at or below an address. path: below it, of a single file its name. version: changes with the content."""

    path: str
    size: int
    version: str

    @property
    def modified(self) -> float:
        """When it was written (Unix time), as far as its version says so; else 0."""
        return int(self.version) / 1e9 if self.version.isdigit() else 0.0


class RemoteStore:
    """Reads at one address. A request that fails is not repeated, and the next one connects anew.

    is_file: whether the address is that of a file, once its files are listed.
    """

    def __init__(self, address: RemoteAddress) -> None:
        self.address = address
        self.is_file = False
        self._access: aws.S3Access | None = None
        self._filesystem: Any = None
        self._tags: dict[str, bytes] = {}  # of each file, what its server names its content by

    @property
    def place(self) -> str:
        """The endpoint or account that the bucket belongs to. Raises `RemoteError`."""
        if self.address.scheme == "s3":
            return aws.place_of(self._s3().endpoint)
        if self.address.scheme == "gs":
            return os.environ.get("STORAGE_EMULATOR_HOST", "")
        return self.address.host or (_account() if self.address.scheme == "abfs" else "")

    def files(self) -> list[RemoteFile]:
        """All files at the address. Raises `RemoteError`, also where there is none."""
        from pyarrow.fs import FileSelector, FileType

        def listed() -> list[RemoteFile]:
            filesystem, inner = self._connected(), self.address.inner
            info = filesystem.get_file_info(inner)
            self.is_file = info.type == FileType.File
            if self.is_file:
                return [_file(info, inner.rpartition("/")[2])]
            below = filesystem.get_file_info(FileSelector(inner, recursive=True))
            base = inner.strip("/")
            return [
                _file(each, each.path.strip("/").removeprefix(base).lstrip("/"))
                for each in below
                if each.type == FileType.File
            ]

        files = self._asked(listed)
        if not files:
            raise RemoteError(f"{self.address}: nothing is there", passing=False)
        self._check_paths([file.path for file in files])
        return sorted(files, key=lambda file: file.path)

    def _check_paths(self, paths: Sequence[str]) -> None:
        """Refuse names that no file here can have, or that would lie elsewhere. Raises `RemoteError`."""
        folders = {path[:end] for path in paths for end in range(len(path)) if path[end] == "/"}
        for path in paths:
            if {"", ".", ".."} & set(path.split("/")):
                fault = "has an empty part, or one of dots"
            elif path in folders:
                fault = "is a file and, for others, a folder"
            else:
                continue
            hint = "rename it, or name the files that are wanted in `files`"
            raise RemoteError(f"{self.address}: {path!r} {fault}, which no file here can be: {hint}", passing=False)

    def address_of(self, file: RemoteFile) -> RemoteAddress:
        """The address of one of the files."""
        return self.address if self.is_file else self.address.of(file.path)

    def read(self, file: RemoteFile, offset: int, n_bytes: int) -> bytes:
        """Bytes of a file, all that are asked for. Raises `RemoteError`."""

        def piece() -> bytes:
            with self._connected().open_input_file(self.address_of(file).inner) as stream:
                metadata = stream.metadata() or {}
                tag = bytes(metadata.get("ETag") or metadata.get("generation") or b"")
                if self._tags.setdefault(file.path, tag) != tag:  # times of modification are whole seconds
                    raise self._changed(file)
                content: bytes = stream.read_at(n_bytes, offset)
            if len(content) != n_bytes:
                raise OSError(f"Connection closed: {len(content)} bytes of {n_bytes}")
            return content

        return self._asked(piece)

    def check_current(self, file: RemoteFile) -> None:
        """Raise `RemoteError` where a file is not that of the listing any more."""
        info = self._asked(lambda: self._connected().get_file_info(self.address_of(file).inner))
        if _file(info, file.path) != file:
            raise self._changed(file)

    def _changed(self, file: RemoteFile) -> ChangedError:
        self._tags.pop(file.path, None)
        return ChangedError(f"{self.address_of(file)} has changed while it was fetched", passing=False)

    def _asked(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except RemoteError:
            raise
        except Exception as error:  # pyarrow raises what the libraries below raise
            explained = self._explained(error)
            self._filesystem = self._access = None  # credentials may have ended
            raise explained from None

    def _s3(self) -> aws.S3Access:
        try:
            self._access = self._access or aws.s3_access()
        except aws.AwsSettingsError as error:
            raise RemoteError(str(error), passing=False) from None
        except ImportError:
            fault = (
                "data on S3 needs the package boto3, which is not installed: pip install '.[data]' in the checkout"
            )
            raise RemoteError(fault, passing=False) from None
        return self._access

    def _connected(self) -> Any:
        if self._filesystem is None:
            scheme = self.address.scheme
            self._filesystem = _s3(self._s3()) if scheme == "s3" else _OTHERS[scheme](self.address)
        return self._filesystem

    def _explained(self, error: Exception) -> RemoteError:
        text = str(masked(str(error).partition("\n")[0])).partition(" error_info=")[0]
        text = text.rpartition("a last message of ")[2][:_LONGEST]
        scheme = self.address.scheme
        for words, remedy in _REFUSALS[scheme].items():
            if words in text:
                denied = remedy == aws.DENIED and self._s3().credentials is None
                return RemoteError(f"{self.address}: {aws.NO_CREDENTIALS if denied else remedy}", passing=False)
        if isinstance(error, FileNotFoundError) or "No such file" in text or "does not exist" in text:
            return RemoteError(f"{self.address}: nothing is there", passing=False)
        passing = _NETWORK.search(text) is not None or isinstance(error, TimeoutError)
        if passing and scheme == "s3":
            code = re.search(r"AWS Error (\w+)", text)
            return RemoteError(
                f"{self.address}: {aws.no_answer(self._s3().endpoint, code[1] if code else text)}", passing=True
            )
        if "OAuth2 access token" in text:  # the machine's own is the last that Google's client asks for
            text = f"{text.partition('. The request')[0]}: set GOOGLE_APPLICATION_CREDENTIALS, or check the network"
        if passing and scheme == "gs" and (emulator := os.environ.get("STORAGE_EMULATOR_HOST")):
            text = f"{masked(emulator)} (STORAGE_EMULATOR_HOST) does not answer: {text}"
        return RemoteError(f"{self.address}: {text}", passing=passing)


def _file(info: Any, path: str) -> RemoteFile:
    return RemoteFile(path, int(info.size or 0), str(info.mtime_ns))


def _s3(access: aws.S3Access) -> Any:
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    key, secret, token = access.credentials or (None, None, None)
    endpoint = urlsplit(access.endpoint)
    return S3FileSystem(
        access_key=key,
        secret_key=secret,
        session_token=token,
        anonymous=access.credentials is None,
        region=access.region or None,
        scheme=endpoint.scheme,
        endpoint_override=None if access.is_aws else endpoint.netloc.rpartition("@")[2] + endpoint.path.rstrip("/"),
        proxy_options=None if access.proxy is None else _with_port(access.proxy.url),
        connect_timeout=CONNECT_S,
        request_timeout=READ_S,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=2),
        force_virtual_addressing=access.is_virtual,
        tls_ca_file_path=access.ca_file,
    )


def _with_port(url: str) -> str:
    """A proxy's address as pyarrow takes it: with scheme and port."""
    parsed = urlsplit(url if "://" in url else f"http://{url}")
    port = "" if parsed.port else ":443" if parsed.scheme == "https" else ":80"
    return f"{parsed.scheme}://{parsed.netloc}{port}"


def _gcs(address: RemoteAddress) -> Any:
    """Google Cloud Storage, or the emulator that STORAGE_EMULATOR_HOST names, as Google's own clients read it."""
    from pyarrow.fs import GcsFileSystem

    patience = {"retry_time_limit": timedelta(seconds=CONNECT_S)}
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if emulator:
        scheme, _, host = emulator.rpartition("://")
        return GcsFileSystem(anonymous=True, scheme=scheme or "http", endpoint_override=host.rstrip("/"), **patience)
    return GcsFileSystem(**patience)


def _hdfs(address: RemoteAddress) -> Any:
    from pyarrow.fs import HadoopFileSystem

    host, _, port = address.host.partition(":")
    user = os.environ.get("HADOOP_USER_NAME") or None
    return HadoopFileSystem(host or "default", int(port) if port else 0, user=user)


def _account() -> str:
    names = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
    if not (account := next(filter(None, map(os.environ.get, names)), "")):
        hint = "set AZURE_STORAGE_ACCOUNT, or write container@account.dfs.core.windows.net"
        raise RemoteError(f"the address names no account: {hint}", passing=False)
    return account


def _azure(address: RemoteAddress) -> Any:
    from pyarrow.fs import AzureFileSystem

    account, _, place = (address.host or _account()).partition(".")
    cloud = place.partition(".")[2] or "core.windows.net"  # of China and of governments there are others
    variables = {
        "account_key": ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY"),
        "sas_token": ("AZURE_STORAGE_SAS_TOKEN",),
    }
    given = {name: next(filter(None, map(os.environ.get, names)), None) for name, names in variables.items()}
    if given["account_key"]:
        given["sas_token"] = None  # one of the two; without either, the environment and `az login` are asked
    authorities = {f"{kind}_storage_authority": f".{kind}.{cloud}" for kind in ("blob", "dfs")}
    return AzureFileSystem(account, **authorities, **given)


_OTHERS = {"gs": _gcs, "hdfs": _hdfs, "abfs": _azure}
