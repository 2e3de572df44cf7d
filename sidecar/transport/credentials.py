"""Reading a NATS credentials file: the user's JWT and the seed that signs the server's nonce.

Read anew at each connection, so that a rotated secret counts. Nothing here keeps or prints what it read.
"""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path

import nkeys  # type: ignore[import-untyped]  # it ships no types

from sidecar.transport.errors import Refused

_JWT = re.compile(rb"-+BEGIN NATS USER JWT-+\s+([A-Za-z0-9_.=-]+)\s+-+END NATS USER JWT-+")
_SEED = re.compile(rb"-+BEGIN USER NKEY SEED-+\s+([A-Z2-7]+)\s+-+END USER NKEY SEED-+")


class CredentialsFile:
    """The callbacks a client asks for when the server wants a signature.

    The client's own reader never returns when the file lacks its JWT, and with it the whole event loop;
    hence ours.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self) -> None:
        """Read both parts once. Raises Refused with a line naming the file."""
        self.jwt()
        self.sign("check")

    def jwt(self) -> bytes:
        """The user's JWT. Raises Refused."""
        return self._find(_JWT, "user JWT")

    def sign(self, nonce: str) -> bytes:
        """Base64 of the signature of the nonce. Raises Refused."""
        seed = bytearray(self._find(_SEED, "user seed"))
        try:
            pair = nkeys.from_seed(seed)
            signature = base64.b64encode(pair.sign(nonce.encode()))
            pair.wipe()
        except (nkeys.NkeysError, binascii.Error, ValueError) as error:
            raise Refused(f"credentials file {self._path}: the user seed is not valid") from error
        return signature

    def _find(self, pattern: re.Pattern[bytes], what: str) -> bytes:
        try:
            text = self._path.read_bytes()
        except OSError as error:
            raise Refused(f"credentials file {self._path} cannot be read: {error.strerror}") from error
        match = pattern.search(text)
        if match is None:
            raise Refused(f"credentials file {self._path} holds no {what}")
        return match[1]
