"""Who asks: API keys, and the verified callers they stand for. What a request says of itself is never read for that.

The table holds keyed hashes: whoever reads it can neither call with what is in it nor guess a key without the secret.
It belongs to one server; nothing of it reaches the engine but the context and an opaque name for fairness.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies.prompt import digest
from policies.types import Context, Request

MIN_SECRET_BYTES, MAX_SECRET_BYTES = 32, 64  # beyond 64 a keyed hash would not hear of the rest


@dataclass(frozen=True, slots=True)
class Account:
    """Whom a key stands for, and what it may ask for: these classes, the first where a body names another, and no
    priority more urgent (lower) than `most_urgent`."""

    context: Context
    classes: tuple[str, ...]
    most_urgent: int


class Principals:
    """`secret` is the server's alone: 32 to 64 random bytes, the same after a restart."""

    def __init__(self, secret: bytes) -> None:
        if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
            raise ValueError(
                f"the secret has {len(secret)} bytes, it must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}: "
                "secrets.token_bytes(32) makes one"
            )
        self._secret = secret
        self._accounts: dict[int, Account] = {}  # by keyed hash: how long a look-up takes tells nothing of the key

    def enrol(self, context: Context, classes: Sequence[str] = ("default",), most_urgent: int = 0) -> str:
        """A new key for this caller. It is told once and kept nowhere; a caller may have several."""
        if not context.tenant:
            raise ValueError("a caller without a tenant would share with all others without one: name the tenant")
        if not classes:
            raise ValueError(f"a key for tenant {context.tenant!r} that opens no class opens nothing: name one")
        key = secrets.token_urlsafe(32)
        self._accounts[self._hashed(key)] = Account(context, tuple(classes), most_urgent)
        return key

    def revoke(self, key: str) -> None:
        """It opens nothing any more; nothing happens if it never did."""
        self._accounts.pop(self._hashed(key), None)

    def authenticate(self, key: str) -> Context:
        """Raises PermissionError, the same for whatever is wrong with the key."""
        return self._account(key).context

    def vouch(self, key: str, request: Request) -> Request:
        """The same request as its key's caller makes it, whoever it says it is of. Raises PermissionError.

        The client is one that others cannot name either: its quota and its share are charged to the caller's account.
        Class and priority are the body's as far as the account goes.
        """
        account = self._account(key)
        context = account.context
        client = digest(self._secret, b"client", context.tenant.encode(), context.user.encode())
        return replace(
            request,
            context=context,
            client_id=f"{client:016x}",
            class_name=request.class_name if request.class_name in account.classes else account.classes[0],
            priority=max(request.priority, account.most_urgent),
        )

    def _account(self, key: str) -> Account:
        account = self._accounts.get(self._hashed(key))
        if account is None:
            raise PermissionError("this key is not accepted")
        return account

    def _hashed(self, key: str) -> int:
        return digest(self._secret, b"key", key.encode(errors="surrogatepass"), size=32)
