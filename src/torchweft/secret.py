"""The shared secret of a group: a process that has it may join.

The secret must not leak by accident. A log line, a traceback that prints local variables, a
pickle or a crash report shows what ``repr`` returns. So the secret itself is not kept at all: a
``Secret`` has a keyed hash initialised with it, which can be copied and finished but not read.

Rules of this file:

- No function raises while the secret is in a variable of it, or of its callers in this file.
- No error repeats the secret, or a part of it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from typing import NoReturn

from torchweft import knobs
from torchweft.errors import ConfigurationError

SECRET_VARIABLE = "WEFT_SECRET"
"""Environment variable with the secret itself. It is not a knob, because knobs may be shown."""

LEAST_BYTES = 16
MOST_BYTES = 4096
_NEW_BYTES = 32
_SIGN = b"weft sign\0"
_DERIVE = b"weft derive\0"
_OBSERVERS = b"observers of the group"
_LENGTH_BYTES = 8

_ADVICE = "make one with: torchweft secret new FILE"

_taken_from_environment: Secret | None = None
"""The secret from ``WEFT_SECRET``: it is read once, but a process may join a group again."""


class Secret:
    """The shared secret of a group, which signs but cannot be read. Thread-safe.

    Workers prove by what they ``sign`` that they have the same secret. A secret cannot be pickled;
    a copy is the same object.

    Args:
        key: The secret, from 16 to 4096 bytes, as random as can be. It is not kept.

    Raises:
        ConfigurationError: It is too short or too long.
    """

    __slots__ = ("_begun",)

    def __init__(self, key: bytes) -> None:
        kind = type(key)
        complaint = _complaint(key) if kind is bytes else f"a secret is bytes, not {kind.__name__}"
        if not complaint:
            self._begun = hmac.new(key, digestmod="sha256")
            return
        del key
        raise ConfigurationError(complaint)

    @classmethod
    def from_text(cls, text: str) -> Secret:
        """Returns the secret whose bytes are ``text`` in UTF-8.

        Raises:
            ConfigurationError: It is too short or too long.
        """
        # Lone surrogates are invalid text, but an error about them would repeat the secret.
        made = _make(text.encode(errors="surrogatepass"))
        del text
        return _checked(made)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Secret:
        """Reads a secret from a file, without the line ends that follow it.

        Args:
            path: A file that belongs to this user or root, and that only its owner can read.

        Raises:
            ConfigurationError: The file is missing, is not a plain file, belongs to another user,
                can be read by other users, or its content is too short or too long.
        """
        return _checked(_read(os.fspath(path)))

    @classmethod
    def from_environment(cls) -> Secret | None:
        """Returns the secret that the environment names; None if it names none.

        ``WEFT_SECRET_FILE`` is the path of a file. ``WEFT_SECRET`` is the secret itself: it is
        removed from ``os.environ`` when first read, so that it does not show there and programs
        that this process starts do not inherit it. Later calls return the same secret.

        Raises:
            ConfigurationError: Both are set, or the value does not work. An empty variable is an
                error too: a group must not lose its protection by a typing error.
        """
        variable, path = knobs.SECRET_FILE.variable, knobs.SECRET_FILE.get()
        if not path and variable not in os.environ:
            return _take_from_environment()
        if SECRET_VARIABLE in os.environ:
            raise ConfigurationError(f"both {variable} and {SECRET_VARIABLE} are set; unset one")
        return cls.from_file(path)

    def sign(self, *parts: bytes) -> bytes:
        """Returns a signature of ``parts``: 32 bytes that only a holder of the secret can make.

        The bounds of the parts count: ``sign(b"ab", b"c")`` is not ``sign(b"a", b"bc")``.
        """
        return self._digest(_SIGN, parts)

    def verify(self, signature: bytes, *parts: bytes) -> bool:
        """Returns whether ``signature`` is that of ``parts``; takes equally long in both cases."""
        return hmac.compare_digest(signature, self._digest(_SIGN, parts))

    def derive(self, label: str) -> Secret:
        """Returns a secret for one purpose, which reveals neither this secret nor other ones."""
        return Secret(self._digest(_DERIVE, (label.encode(),)))

    def _digest(self, purpose: bytes, parts: tuple[bytes, ...]) -> bytes:
        state = self._begun.copy()
        state.update(purpose)
        for part in parts:
            state.update(len(part).to_bytes(_LENGTH_BYTES, "little"))
            state.update(part)
        return state.digest()

    def __repr__(self) -> str:
        return "<Secret, not shown>"

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Secret cannot be pickled: it would be readable wherever the pickle goes; "
            f"give the other process the path of its file, in {knobs.SECRET_FILE.variable}"
        )


def key_of_observers(secret: Secret | None) -> Secret:
    """Returns the key by which observers and workers of a group prove themselves to each other.

    Args:
        secret: The secret of the group. Without one, the key is known to everybody, and the kernel
            must tell that the other end belongs to the same user.
    """
    return Secret(_OBSERVERS) if secret is None else secret.derive(_OBSERVERS.decode())


def write_new(path: str | os.PathLike[str]) -> None:
    """Writes a new random secret into a new file that only this user can read.

    Raises:
        ConfigurationError: The file exists already, or cannot be made.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise ConfigurationError(
            f"{os.fspath(path)!r} is there already; another secret in it would lock out those "
            "who have the old one. Remove it first, or choose another name"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"cannot make {os.fspath(path)!r}: {error.strerror}") from None
    with open(descriptor, "w") as file:
        print(secrets.token_hex(_NEW_BYTES), file=file)


def _make(key: bytes) -> Secret | str:
    """Returns the secret, or what is wrong with it."""
    return _complaint(key) or Secret(key)


def _checked(made: Secret | str) -> Secret:
    """Returns the secret, or raises the complaint here, where no variable holds the key."""
    if isinstance(made, str):
        raise ConfigurationError(made)
    return made


def _complaint(key: bytes) -> str:
    size = len(key)
    if LEAST_BYTES <= size <= MOST_BYTES:
        return ""
    limits = f"from {LEAST_BYTES} to {MOST_BYTES} bytes"
    return f"the secret has {size} bytes; it must have {limits}: {_ADVICE}"


def _take_from_environment() -> Secret | None:
    global _taken_from_environment
    if SECRET_VARIABLE in os.environ:
        made = _make(os.environb.pop(SECRET_VARIABLE.encode()))
        if isinstance(made, str):
            raise ConfigurationError(f"environment variable {SECRET_VARIABLE}: {made}")
        _taken_from_environment = made
    return _taken_from_environment


def _read(path: str) -> Secret | str:
    # Non-blocking: opening a pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        return (
            f"cannot read the secret file {path!r}: {error.strerror}; {_ADVICE}, and copy it to "
            "every host"
        )
    try:
        complaint = _file_complaint(path, os.fstat(descriptor))
        if complaint:
            return complaint
        made = _make(os.read(descriptor, MOST_BYTES + 3).rstrip(b"\r\n"))
    finally:
        os.close(descriptor)
    return made if isinstance(made, Secret) else f"secret file {path!r}: {made}"


def _file_complaint(path: str, status: os.stat_result) -> str:
    if not stat.S_ISREG(status.st_mode):
        return f"the secret file {path!r} is no plain file"
    if status.st_uid not in (0, os.geteuid()):
        return f"the secret file {path!r} belongs to another user, who can read it; make your own"
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return (
            f"the secret file {path!r} is open to other users (mode {mode:04o}): "
            f"chmod 600 {path}, and if others may have read it, make a new one"
        )
    return ""
