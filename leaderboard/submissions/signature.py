"""Signatures of submissions and stamps by SSH keys, with `ssh-keygen -Y` of OpenSSH (8.1 or newer).

A record's seal is a checksum: whoever edits a record can seal it again. A signature shows that the holder of a key
vouches for these bytes, and says nothing about how they were computed.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..records.files import digest_of_bytes, read_bytes, write_bytes
from ..records.validation import RecordError
from .declaration import NAME as DECLARATION
from .identity import results_digest

SIGNATURE = "SIGNATURE"
ALLOWED = "allowed_signers"
"""File of a handle's public keys, in the format of OpenSSH's `ALLOWED SIGNERS`; the principal is the handle."""

OF_SUBMISSION, OF_STAMP = "leakbench", "leakbench-verified"
"""Namespaces: a signature of one is none of the other."""
_LARGEST = 64 * 1024


class SignatureError(RecordError):
    """A signature is missing, wrong, or somebody else's, or cannot be made or checked."""


def statement(folder: Path, digest: str) -> bytes:
    """Returns the bytes that a submitter signs: digests of request, declaration and results.

    Args:
        folder: of the submission.
        digest: of its request.
    """
    declaration = digest_of_bytes(read_bytes(folder / DECLARATION, "declaration"))
    lines = ["leakbench submission 1", f"request {digest}", f"declaration {declaration}"]
    return "\n".join([*lines, f"results {results_digest(folder)}", ""]).encode()


def sign(message: bytes, key: Path, target: Path, namespace: str = OF_SUBMISSION) -> Path:
    """Signs a message and writes the signature.

    Args:
        message: to sign.
        key: private key, or public key of a private key that an agent holds.
        target: file of the signature.
        namespace: of the signature.

    Returns:
        The path of its file.

    Raises:
        SignatureError: there is no such key, no `ssh-keygen`, or it refuses.
    """
    if not key.is_file():
        raise SignatureError(f"--sign must be the file of an SSH key, got {key}, which is no file")
    # An absolute path begins with a slash, so it cannot be read as an option.
    done = _ssh_keygen("-Y", "sign", "-n", namespace, "-f", os.fspath(key.absolute()), message=message)
    if done.returncode or not done.stdout.startswith(b"-----BEGIN SSH SIGNATURE-----"):
        raise SignatureError(f"cannot sign with {key}: {_words(done.stderr)}")
    return write_bytes(target, done.stdout)


def check_signature(
    message: bytes, signature: Path, allowed: Path, signer: str, namespace: str = OF_SUBMISSION
) -> None:
    """Checks that a message was signed by a key that its signer is allowed to sign with.

    Args:
        message: that was signed.
        signature: its file.
        allowed: file of public keys.
        signer: principal in `allowed`; a handle.
        namespace: of the signature.

    Raises:
        SignatureError: the signature is missing, of another key, or of other content; or nothing can be checked.
    """
    if not signature.is_file() and not signature.is_symlink():
        raise SignatureError(f"must be there: {allowed.name} has a key of {signer}; sign with --sign KEY")
    with tempfile.TemporaryDirectory() as scratch:
        # Copies: links are refused, and names of submitters' files reach no command line.
        copies = {"signature": signature, "allowed": allowed}
        for name, path in copies.items():
            content = read_bytes(path, name)
            if len(content) > _LARGEST:
                raise SignatureError(f"{path.name} must have at most {_LARGEST} bytes, got {len(content)}")
            Path(scratch, name).write_bytes(content)
        arguments = ["-n", namespace, "-I", signer, "-f", f"{scratch}/allowed", "-s", f"{scratch}/signature"]
        done = _ssh_keygen("-Y", "verify", *arguments, message=message)
    if done.returncode:
        # ssh-keygen's sentences, such as "Could not verify signature", do not say which of the reasons applies.
        raise SignatureError(
            f"must be a signature of this content by a key of {signer} in {allowed.name}: {_words(done.stderr)}"
        )


def can_sign() -> bool:
    """Returns whether this machine has `ssh-keygen`."""
    return shutil.which("ssh-keygen") is not None


def _ssh_keygen(*arguments: str, message: bytes) -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("ssh-keygen")
    if program is None:
        raise SignatureError("needs ssh-keygen, which is not installed here: it comes with OpenSSH 8.1 or newer")
    try:
        # S603: the program is ssh-keygen, and the arguments are ours, absolute paths and a checked handle.
        return subprocess.run([program, *arguments], input=message, capture_output=True, check=False, timeout=300)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise SignatureError("ssh-keygen did not answer within 300 seconds; unlock the key in an agent") from None


def _words(stderr: bytes) -> str:
    text = " ".join(stderr.decode(errors="replace").split())
    return "".join(character for character in text if character.isprintable())[:200] or "ssh-keygen gave no reason"
