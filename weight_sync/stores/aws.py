"""S3 and what speaks its language, through boto3: the client, which failures pass, and all of them in words.

Credentials, region, endpoint and proxy are those of `schema.storage.aws`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schema.config.secrets import masked
from schema.storage import aws
from weight_sync.errors import StoreError

CONNECT_S, READ_S = 10.0, 60.0
"""Seconds without an answer, or between two pieces of one, after which an attempt has failed."""
MISSING = ("NoSuchKey", "NotFound", "404")
_PASSING_CODES = {
    "SlowDown",
    "RequestTimeout",
    "RequestTimeTooSkewed",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "OperationAborted",
}
_TOO_MANY, _NOT_IMPLEMENTED = 429, 501


class CutError(Exception):
    """The body of an answer is shorter than it was announced."""


def make_client(parallel: int, read_timeout: float = READ_S) -> Any:
    """A client with time-outs; trying again is `Patience`'s, but for what boto3 mends within a second.

    parallel: requests at once. Raises `StoreError` when the environment's settings make none."""
    try:
        return aws.make_client(
            connect_timeout=min(CONNECT_S, read_timeout),
            read_timeout=read_timeout,
            retries={"mode": "standard", "max_attempts": 2},
            max_pool_connections=parallel + 1,
        )
    except aws.AwsSettingsError as error:
        raise StoreError(str(error)) from None


def code_of(error: Any) -> str:
    """The code of a `ClientError`."""
    return str(error.response.get("Error", {}).get("Code", ""))


def head(client: Any, bucket: str, key: str) -> Any | None:
    """Return what the store says of an object; None: there is none."""
    try:
        return client.head_object(Bucket=bucket, Key=key)
    except client.exceptions.ClientError as error:
        if code_of(error) in MISSING:
            return None
        raise


def complete(
    client: Any,
    bucket: str,
    key: str,
    upload_id: str,
    parts: list[dict[str, Any]],
    is_complete: Callable[[Any | None], bool],
) -> None:
    """Make an object of its parts. is_complete: whether what `head` finds is that object."""
    try:
        client.complete_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts})
    except client.exceptions.ClientError as error:
        # Asked again after an answer that was lost: the upload is gone because it is complete.
        if code_of(error) != "NoSuchUpload" or not is_complete(head(client, bucket, key)):
            raise


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_passing(error: Exception) -> bool:
    """Whether waiting may mend a failure."""
    from botocore import exceptions as boto
    from botocore import parsers

    if isinstance(error, boto.ClientError):
        status = _status(error)
        broken = status >= 500 and status != _NOT_IMPLEMENTED
        return broken or status == _TOO_MANY or code_of(error) in _PASSING_CODES
    return isinstance(error, _of_the_network() | boto.FlexibleChecksumError | parsers.ResponseParserError)


def _of_the_network() -> Any:
    from botocore import exceptions as boto
    from urllib3.exceptions import HTTPError  # boto3 lets some pass through while it reads a body

    return boto.ConnectionError | boto.HTTPClientError | boto.IncompleteReadError | HTTPError | CutError


def explain(error: Exception, client: Any, bucket_key: str) -> str:
    """Describe what went wrong and what to do. Names no credential.

    bucket_key: key of the configuration that names the bucket."""
    from botocore import exceptions as boto

    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return aws.NO_CREDENTIALS
    if isinstance(error, _of_the_network()):
        return aws.no_answer(str(client.meta.endpoint_url), type(error).__name__)
    if isinstance(error, boto.ClientError):
        return _refusal(error, bucket_key)
    return str(masked(f"{type(error).__name__}: {error}"))


def _refusal(error: Any, bucket_key: str) -> str:
    code, status = code_of(error), _status(error)
    missing = f"no such bucket: create it, or correct {bucket_key}"
    remedies = {
        "NoSuchBucket": missing,
        "404": missing,
        "AccessDenied": "access is denied: the credentials of AWS_* need s3:ListBucket on the bucket, and "
        "s3:GetObject, s3:PutObject and s3:DeleteObject on what is in it",
        "403": f"{aws.DENIED} and write there",
        "InvalidAccessKeyId": aws.UNKNOWN_KEY,
        "SignatureDoesNotMatch": aws.WRONG_SECRET,
        "ExpiredToken": aws.EXPIRED,
        "NoSuchUpload": "the store has forgotten the parts that it had: they are sent again with the next start",
    }
    if code in remedies:
        return remedies[code]
    if status in (301, 307):
        return aws.OTHER_REGION
    return str(masked(f"{code or status}: {error.response.get('Error', {}).get('Message', '')}"))
