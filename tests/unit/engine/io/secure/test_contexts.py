from __future__ import annotations

import logging
import os
import shutil
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from tests.certificates import Authority
from torchweft.engine.io.secure.options import ContextPair, Contexts, Files
from torchweft.errors import ConfigurationError


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> Files:
    """Copies of the files for this test only."""
    copies = []
    for name, path in zip(
        ("certificate", "key", "ca"), (*authority.separate_files(), authority.path), strict=True
    ):
        copies.append(shutil.copy(path, tmp_path / f"{name}.pem"))
    return Files(*map(str, copies))


def contexts_of(files: Files) -> Contexts:
    return Contexts(files, is_mutual=True)


def replace(files: Files, certificate: str | None = None, key: str | None = None) -> None:
    """Replaces files as a program that renews certificates does: by renaming new ones."""
    for new, old in ((certificate, files.certificate), (key, files.key)):
        if new is not None:
            os.replace(shutil.copy(new, f"{old}.new"), old)


def test_nothing_older_than_tls_1_3_is_spoken(files: Files) -> None:
    for context in contexts_of(files).current():
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3


@pytest.mark.parametrize(
    ("which", "complaint"),
    [
        ("certificate", "has no certificate, in PEM"),
        ("key", "has no key, in PEM"),
        ("ca", "has no certificate of an authority, in PEM"),
    ],
)
@pytest.mark.parametrize("content", ["", "nonsense"])
def test_a_file_of_something_else_is_named(
    files: Files, which: str, complaint: str, content: str
) -> None:
    path = getattr(files, which)
    Path(path).write_text(content)
    with pytest.raises(ConfigurationError, match=complaint) as caught:
        contexts_of(files).current()
    assert path in str(caught.value)


def test_the_key_of_another_certificate_is_refused(files: Files, authority: Authority) -> None:
    replace(files, key=authority.separate_files()[1])
    with pytest.raises(ConfigurationError, match="is not that of the certificate"):
        contexts_of(files).current()


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(files: Files) -> None:
    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    Path(files.key).write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"passphrase"),
        )
    )
    with pytest.raises(ConfigurationError, match="has a passphrase"):
        contexts_of(files).current()


# Files that change while a worker runs


def test_renewed_files_are_taken(files: Files, authority: Authority) -> None:
    contexts = contexts_of(files)
    before = contexts.current()
    assert contexts.current() is before
    replace(files, *authority.separate_files())
    after = contexts.current()
    assert after is not before
    assert contexts.current() is after


def test_until_all_files_are_renewed_the_old_ones_stay_in_force(
    files: Files, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    contexts = contexts_of(files)
    before: ContextPair = contexts.current()
    certificate, key = authority.separate_files()
    replace(files, certificate=certificate)
    with caplog.at_level(logging.WARNING, "torchweft"):
        assert contexts.current() is before
        assert contexts.current() is before
    assert len(caplog.messages) == 1  # Not for each connection.
    assert "is not that of the certificate" in caplog.text
    replace(files, key=key)
    assert contexts.current() is not before
