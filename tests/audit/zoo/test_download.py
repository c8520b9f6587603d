"""Downloads by digest, from a server of the test: whole files alone are kept, and others refused."""

import functools
import http.server
import json
import shutil
import threading

import pytest

import leakbench
from leakbench.audit.zoo.index import Pinned, ZooError, read_index, write_index

from .conftest import NAMES

DP = NAMES[0]


@pytest.fixture
def server(built, tmp_path):
    """A copy of the zoo behind an address."""
    served = tmp_path / "served"
    shutil.copytree(built, served)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=served)) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield served, f"http://127.0.0.1:{running.server_port}", running
        running.shutdown()
        thread.join()


@pytest.fixture
def indexed(server, tmp_path, monkeypatch):
    """An index without folders, whose entries lead to the server; a data folder without files."""
    served, address, _ = server
    folder, data = tmp_path / "indexed", tmp_path / "data"
    data.mkdir()
    entries = {name: Pinned(sha256=p.sha256, url=f"{address}/{name}") for name, p in read_index(served).items()}
    write_index(folder, entries)
    monkeypatch.setenv("LEAKBENCH_ZOO", str(folder))
    monkeypatch.setenv("LEAKBENCH_DATA", str(data))
    return folder, data


def test_a_checkpoint_is_downloaded_once_and_is_the_one_of_the_index(server, indexed):
    served, _, _ = server
    checkpoint = leakbench.zoo.load(DP)
    assert checkpoint.sha256 == read_index(served)[DP].sha256
    assert checkpoint.folder.is_relative_to(indexed[1]) and len(checkpoint.shadow_outputs[0]) == 4
    shutil.rmtree(served)
    assert leakbench.zoo.load(DP).sha256 == checkpoint.sha256


@pytest.mark.parametrize("file", ["manifest.json", "weights.safetensors"])
def test_a_file_of_another_digest_is_refused_and_not_kept(server, indexed, file):
    path = server[0] / DP / file
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ZooError, match="must have the SHA-256"):
        leakbench.zoo.load(DP)
    assert not list(indexed[1].rglob(file)) and not list(indexed[1].rglob("manifest.json"))


def test_a_file_longer_than_its_manifest_says_is_not_read_to_its_end(server, indexed):
    with (server[0] / DP / "split.json").open("ab") as file:
        file.write(b" " * 1000)
    size = json.loads((server[0] / DP / "manifest.json").read_text())["files"]["split.json"]["bytes"]
    with pytest.raises(ZooError, match=f"must have at most {size} bytes, and has more"):
        leakbench.zoo.load(DP)


def test_without_a_network_the_error_names_address_and_folder(server, indexed):
    write_index(indexed[0], {DP: Pinned(sha256="0" * 64, url="http://127.0.0.1:9/none")})
    with pytest.raises(
        ZooError, match=r"is not on this machine, and http://127\.0\.0\.1:9/none/manifest\.json could"
    ) as e:
        leakbench.zoo.load(DP)
    assert "connect to the network once, or put its files into" in str(e.value) and "\n" not in str(e.value)


def test_a_folder_of_this_machine_is_an_address_too(server, indexed):
    served = server[0]
    write_index(indexed[0], {DP: Pinned(sha256=read_index(served)[DP].sha256, url=f"file://{served}/{DP}")})
    assert leakbench.zoo.load(DP).model is not None


def test_other_schemes_are_refused(server, indexed):
    write_index(indexed[0], {DP: Pinned(sha256="0" * 64, url="ftp://example/none")})
    with pytest.raises(ZooError, match="must begin with https, http, file, got 'ftp:"):
        leakbench.zoo.load(DP)
