"""Settings of S3 in the environment, for weights, checkpoints and data alike: as boto3 resolves them.

    AWS_ACCESS_KEY_ID, …, AWS_PROFILE, ~/.aws, roles of pods and machines     credentials
    AWS_ENDPOINT_URL[_S3], `endpoint_url` of the profile                      endpoint; else AWS by its region
    AWS_DEFAULT_REGION, `region` of the profile                               region
    AWS_CA_BUNDLE                                                             whom a client trusts at https://
    HTTP_PROXY, HTTPS_PROXY, NO_PROXY                                         by the rule of `schema.util.proxies`

Nothing of it comes from the configuration. boto3 is imported on first use.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from schema.config.secrets import masked
from schema.util.proxies import Proxy, passed_over, proxy_of

log = logging.getLogger(__name__)

_OF_AWS = re.compile(r"https://s3[.-](?:[a-z0-9-]+\.)?amazonaws\.com(?:\.cn)?")
DENIED = "access is denied: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and their right to read"
NO_CREDENTIALS = "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
UNKNOWN_KEY = "AWS_ACCESS_KEY_ID is not known there"
WRONG_SECRET = "AWS_SECRET_ACCESS_KEY does not fit AWS_ACCESS_KEY_ID"  # noqa: S105 - no secret
EXPIRED = "AWS_SESSION_TOKEN has expired"
OTHER_REGION = "the bucket is in another region: set AWS_DEFAULT_REGION"


class AwsSettingsError(ValueError):
    """The settings of the environment make no client; the text says which, and what to do."""


@dataclass(frozen=True)
class S3Access:
    """All that another client than boto3 needs to reach the same place as the same caller.

    endpoint: as an address. is_aws: whether it is AWS's own of the region. credentials: access key, secret key and
    session token, if any; None: there are none. is_virtual: whether buckets are parts of host names everywhere.
    """

    endpoint: str
    region: str
    is_aws: bool
    proxy: Proxy | None
    credentials: tuple[str, str, str | None] | None = field(repr=False)
    ca_file: str | None
    is_virtual: bool


def make_client(**settings: Any) -> Any:
    """A client of boto3. settings: of botocore's `Config`. Raises `AwsSettingsError`."""
    return _client(_session(), settings)


def s3_access() -> S3Access:
    """Resolve the environment. Credentials that end are renewed by a further call. Raises `AwsSettingsError`."""
    session = _session()
    client = _client(session, {})
    endpoint = str(client.meta.endpoint_url)
    try:
        credentials = session.get_credentials()
        frozen = None if credentials is None else credentials.get_frozen_credentials()
        ca_file = session._session.get_config_variable("ca_bundle")
    except Exception as error:  # providers raise what the network and other programs raise
        raise AwsSettingsError(_misset(error)) from None
    return S3Access(
        endpoint=endpoint,
        region=str(client.meta.region_name or ""),
        is_aws=_OF_AWS.fullmatch(endpoint) is not None,
        proxy=proxy_of(endpoint, reads_all=False),
        credentials=None if frozen is None else (frozen.access_key, frozen.secret_key, frozen.token),
        ca_file=str(ca_file) if ca_file else None,
        is_virtual=(client.meta.config.s3 or {}).get("addressing_style") == "virtual",
    )


def _session() -> Any:
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        return boto3.session.Session()
    except (BotoCoreError, ValueError) as error:
        raise AwsSettingsError(_misset(error)) from None


def _client(session: Any, settings: dict[str, Any]) -> Any:
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    config = Config(**settings)
    try:
        client = session.client("s3", config=config)
        if (proxy := passed_over(str(client.meta.endpoint_url), reads_all=False)) is None:
            return client
        log.info("%s is asked without %s: it is near, or NO_PROXY names it", endpoint_of(client), proxy)
        return session.client("s3", config=config.merge(Config(proxies={})))
    except (BotoCoreError, ValueError) as error:
        raise AwsSettingsError(_misset(error)) from None


def endpoint_of(client: Any) -> str:
    """The endpoint of a client, without anything else that its address holds."""
    return place_of(str(client.meta.endpoint_url))


def place_of(url: str) -> str:
    """Scheme, host and port of an address."""
    parsed = urlsplit(url)
    return f"{parsed.scheme}://{parsed.hostname}" + (f":{parsed.port}" if parsed.port else "")


def no_answer(endpoint: str, kind: str) -> str:
    """Describe an endpoint that does not answer, and what to do. kind: of the failure."""
    place = place_of(endpoint)
    if (proxy := proxy_of(endpoint, reads_all=False)) is not None:
        what = f"{place} does not answer through {proxy} ({kind})"
        return f"{what}: check the proxy and AWS_ENDPOINT_URL, or name the host in NO_PROXY"
    return f"{place} does not answer ({kind}): check AWS_ENDPOINT_URL and the network"


def _misset(error: Exception) -> str:
    """Which setting makes no client, and what to do. Repeats no address: it may hold credentials."""
    from botocore import exceptions as boto

    what = str(masked(str(error)))
    if isinstance(error, boto.ProfileNotFound):
        what = f"{error}: correct AWS_PROFILE"
    elif isinstance(error, boto.InvalidRegionError):
        what = f"{error} Correct AWS_DEFAULT_REGION"
    elif str(error).startswith("Invalid endpoint"):  # a plain ValueError
        what = "AWS_ENDPOINT_URL is not an address: write one such as http://host:9000"
    return f"the AWS settings of the environment do not work: {what}"
