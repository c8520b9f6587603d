"""Signatures by SSH keys: whose, of what, and what a machine without OpenSSH says."""

import shutil
import subprocess

import pytest

from leakbench.leaderboard.submissions import signature
from leakbench.leaderboard.submissions.signature import OF_STAMP, SignatureError, can_sign, check_signature, sign

needs_ssh = pytest.mark.skipif(not can_sign(), reason="needs ssh-keygen, of OpenSSH")
MESSAGE = b"leakbench submission 1\n"


def make_key(path):
    subprocess.run(
        [shutil.which("ssh-keygen") or "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)],
        check=True,
    )
    return path


def allow(folder, principal, key):
    line = f"{principal} {key.with_suffix('.pub').read_text()}"
    (folder / "allowed_signers").write_text(line)
    return folder / "allowed_signers"


@needs_ssh
def test_a_signature_holds_for_its_message_signer_and_purpose_alone(tmp_path):
    ada, eve = make_key(tmp_path / "ada"), make_key(tmp_path / "eve")
    written = sign(MESSAGE, ada, tmp_path / "SIGNATURE")
    allowed = allow(tmp_path, "ada", ada)
    check_signature(MESSAGE, written, allowed, "ada")
    for message, signer, namespace in (
        (MESSAGE + b"x", "ada", "leakbench"),
        (MESSAGE, "eve", "leakbench"),
        (MESSAGE, "ada", OF_STAMP),
    ):
        with pytest.raises(SignatureError, match=f"by a key of {signer}"):
            check_signature(message, written, allowed, signer, namespace)
    with pytest.raises(SignatureError, match="by a key of ada"):
        check_signature(MESSAGE, sign(MESSAGE, eve, tmp_path / "other"), allowed, "ada")


@needs_ssh
def test_missing_torn_and_linked_signatures_are_refused(tmp_path):
    ada = make_key(tmp_path / "ada")
    allowed = allow(tmp_path, "ada", ada)
    with pytest.raises(SignatureError, match="must be there"):
        check_signature(MESSAGE, tmp_path / "SIGNATURE", allowed, "ada")
    written = sign(MESSAGE, ada, tmp_path / "SIGNATURE")
    (tmp_path / "torn").write_bytes(written.read_bytes()[:60])
    (tmp_path / "bomb").write_bytes(b"x" * 10**6)
    (tmp_path / "link").symlink_to(written)
    for name in ("torn", "bomb", "link"):
        with pytest.raises(ValueError, match=r"ada|bytes|symbolic link"):
            check_signature(MESSAGE, tmp_path / name, allowed, "ada")


@needs_ssh
def test_names_of_files_are_no_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "-Oprint-pubkey x"
    folder.mkdir()
    make_key(tmp_path / "plain")
    (tmp_path / "plain").rename(folder / "-f")
    written = sign(MESSAGE, type(tmp_path)("-Oprint-pubkey x/-f"), folder / "-s")
    (folder / "allowed_signers").write_text("ada " + (tmp_path / "plain.pub").read_text())
    check_signature(MESSAGE, written, folder / "allowed_signers", "ada")


def test_a_key_that_is_not_there_and_a_machine_without_openssh_are_sentences(tmp_path, monkeypatch):
    with pytest.raises(SignatureError, match="--sign must be the file of an SSH key"):
        sign(MESSAGE, tmp_path / "none", tmp_path / "SIGNATURE")
    monkeypatch.setattr(signature.shutil, "which", lambda name: None)
    (tmp_path / "key").write_text("")
    assert not can_sign()
    with pytest.raises(SignatureError, match="needs ssh-keygen, which is not installed here"):
        sign(MESSAGE, tmp_path / "key", tmp_path / "SIGNATURE")
