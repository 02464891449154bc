"""Who asks: API keys, and the verified callers they stand for. What a request says of itself is never read for that.

The table holds keyed hashes: whoever reads it can neither call with what is in it nor guess a key without the secret.
It belongs to one server; nothing of it reaches the engine but the context and an opaque name for fairness.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from policies.prompt import digest
from policies.types import Context, Request

MIN_SECRET_BYTES, MAX_SECRET_BYTES = 32, 64  # beyond 64 a keyed hash would not hear of the rest


class Principals:
    """`secret` is the server's alone: 32 to 64 random bytes, the same after a restart."""

    def __init__(self, secret: bytes) -> None:
        if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
            raise ValueError(
                f"the secret has {len(secret)} bytes, it must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}: "
                "secrets.token_bytes(32) makes one"
            )
        self._secret = secret
        self._contexts: dict[int, Context] = {}  # by keyed hash: how long a look-up takes tells nothing of the key

    def enrol(self, context: Context) -> str:
        """A new key for this caller. It is told once and kept nowhere; a caller may have several."""
        if not context.tenant:
            raise ValueError("a caller without a tenant would share with all others without one: name the tenant")
        key = secrets.token_urlsafe(32)
        self._contexts[self._hashed(key)] = context
        return key

    def revoke(self, key: str) -> None:
        """It opens nothing any more; nothing happens if it never did."""
        self._contexts.pop(self._hashed(key), None)

    def authenticate(self, key: str) -> Context:
        """Raises PermissionError, the same for whatever is wrong with the key."""
        context = self._contexts.get(self._hashed(key))
        if context is None:
            raise PermissionError("this key is not accepted")
        return context

    def vouch(self, key: str, request: Request) -> Request:
        """The same request as its key's caller makes it, whoever it says it is of. Raises PermissionError.

        The client is one that others cannot name either: its quota and its share are charged to the caller's account.
        """
        context = self.authenticate(key)
        client = digest(self._secret, b"client", context.tenant.encode(), context.user.encode())
        return replace(request, context=context, client_id=f"{client:016x}")

    def _hashed(self, key: str) -> int:
        return digest(self._secret, b"key", key.encode(errors="surrogatepass"), size=32)
