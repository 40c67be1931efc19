"""`[redis]`: the store of the controller's state."""

from __future__ import annotations

import os
from typing import Annotated
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from pydantic import Field

from schema.config.base import Section
from schema.config.key import key


# fmt: off
class RedisConfig(Section):
    """`[redis]`: the store of the controller's state."""

    url: Annotated[str, Field(pattern=r"^$|^(redis|rediss|unix)://.+$")] = key("",
        "redis://, rediss:// (TLS) or unix:// address of a Redis (7.2 or newer) or Valkey server. Empty: an embedded "
        "Valkey started with the job. The password may come from the environment as COSMOS_REDIS_PASSWORD.",
        acts="process: Server that the controller uses.", example="redis://localhost:6379/0")
    key_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")] = key("cosmos",
        "Every key starts with this prefix and the job's id.", acts="file: Names of the keys in Redis.")
    tls_ca: str = key("",
        "PEM file of the authorities that may have signed the certificate of a rediss:// server. Empty: those that "
        "the system trusts.", acts="process: Which server's certificate is trusted.",
        example="/etc/ssl/private-ca.pem")
    tls_cert: str = key("", "PEM file of the certificate that is shown to a rediss:// server which asks for one.",
        acts="process: Certificate shown to a server that asks for one.", example="/etc/ssl/this-side.pem")
    tls_key: str = key("", "PEM file of the private key of redis.tls_cert.",
        acts="process: Certificate shown to a server that asks for one.", example="/etc/ssl/this-side.key")

    def address(self, url: str) -> str:
        """`url` with the TLS files as parameters, as redis-py reads them; what it names itself stays.

        So one address is all that a process needs, next to the password.
        """
        parts = urlsplit(url)
        if parts.scheme != "rediss":
            return url
        files = {"ssl_ca_certs": self.tls_ca, "ssl_certfile": self.tls_cert, "ssl_keyfile": self.tls_key}
        named = {name for name, _ in parse_qsl(parts.query)}
        unnamed = {name: file for name, file in files.items() if file and name not in named}
        added = urlencode({name: os.path.abspath(os.path.expanduser(file)) for name, file in unnamed.items()})
        return urlunsplit(parts._replace(query="&".join(filter(None, [parts.query, added]))))
