"""The client's side of TLS: whom we trust and which certificate we show.

Read anew at each connection, so that a rotated certificate counts. Nothing here speaks to anybody.
"""

from __future__ import annotations

import ssl
from typing import Final

from sidecar.transport.errors import Refused
from sidecar.transport.wire import LinkSettings

NOT_OFFERED: Final = "the server offers no TLS"


def wanted(settings: LinkSettings, server: str) -> bool:
    """Whether nothing may be sent to this server before TLS: its URL or our settings say so.

    Under ``wss`` there is nothing before it: the transport begins with it.
    """
    scheme = server.partition("://")[0].lower()
    return scheme != "wss" and (scheme == "tls" or settings.ca is not None or settings.cert is not None)


def client_context(settings: LinkSettings) -> ssl.SSLContext | None:
    """What the settings ask for; None for the client's default: the system's authorities, no certificate.

    Raises Refused with a line naming the file that cannot be used.
    """
    if settings.ca is None and settings.cert is None:
        return None
    trusted = None if settings.ca is None else str(settings.ca)
    try:
        context = ssl.create_default_context(cafile=trusted)
    except OSError as error:
        raise Refused(f"certificates of {trusted} cannot be used: {_why(error)}") from error
    if settings.cert is not None:
        key = settings.key or settings.cert
        try:
            # A key under a passphrase must not stop the process at a prompt.
            context.load_cert_chain(settings.cert, key, password=lambda: "")
        except OSError as error:
            raise Refused(
                f"certificate {settings.cert} with key {key} cannot be used: {_why(error)}"
            ) from error
    return context


def _why(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or type(error).__name__
