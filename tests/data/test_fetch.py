"""Downloads: checked, cut off when too long, refused without a trusted certificate."""

import contextlib
import hashlib
import http.server
import io
import shutil
import socket
import ssl
import subprocess
import threading
import time

import pytest

from data import fetch
from data.errors import DataError
from data.fetch import download

BODY = bytes(range(256)) * 20
SHA = hashlib.sha256(BODY).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by path."""

    def do_GET(self):
        if self.path == "/missing":
            self.send_error(403)
            return
        if self.path in ("/moved", "/downgrade", "/here"):
            targets = {"/moved": "ftp://127.0.0.1/x", "/downgrade": "http://127.0.0.1/x"}
            self.send_response(302)
            self.send_header("Location", targets.get(self.path, "/good"))
            self.end_headers()
            return
        body = {"/good": BODY, "/html": b"<!DOCTYPE html>", "/other": BODY[::-1]}.get(
            self.path, BODY
        )
        self.send_response(200)
        if self.path == "/short":
            self.send_header("Content-Length", str(len(BODY)))
            body = BODY[:100]
        elif self.path == "/long":
            body = BODY + b"x"
        elif self.path != "/silent":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.path == "/silent":
            time.sleep(1)
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(served):
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield
    served.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served, serving(served):
        yield f"http://127.0.0.1:{served.server_address[1]}"


@pytest.mark.parametrize("path", ["good", "here"])
def test_the_expected_bytes_arrive(server, path):
    out = io.BytesIO()
    download(f"{server}/{path}", len(BODY), SHA, out)
    assert out.getvalue() == BODY


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "HTTP Error 403"),
        ("html", f"offers 15 bytes, expected {len(BODY)}"),
        ("other", "gave sha256 .*, expected"),
        ("short", f"100 bytes, expected {len(BODY)}"),
        ("long", f"holds more than the expected {len(BODY)} bytes"),
        ("moved", "leads to ftp://127.0.0.1/x, which is refused"),
    ],
)
def test_everything_else_is_refused(server, path, message):
    with pytest.raises(DataError, match=message):
        download(f"{server}/{path}", len(BODY), SHA, io.BytesIO())


def test_silence_ends_in_an_error(server, monkeypatch):
    monkeypatch.setattr(fetch, "TIMEOUT_S", 0.1)
    with pytest.raises(DataError, match="timed out"):
        download(f"{server}/silent", len(BODY), SHA, io.BytesIO())


def test_a_trickle_ends_in_an_error(server, monkeypatch):
    monkeypatch.setattr(fetch, "WHOLE_S", -1.0)
    with pytest.raises(DataError, match="bytes came within"):
        download(f"{server}/good", len(BODY), SHA, io.BytesIO())


def test_no_server_is_an_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DataError, match="Connection refused"):
        download(f"http://127.0.0.1:{port}/x", 1, SHA, io.BytesIO())


def test_a_name_that_cannot_be_resolved_is_an_error():
    with pytest.raises(DataError):
        download("https://nowhere.invalid/enwik8.zip", 1, SHA, io.BytesIO())


@pytest.fixture
def certified(tmp_path):
    """The server behind TLS, with a certificate that nobody vouches for."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        served.socket = context.wrap_socket(served.socket, server_side=True)
        served.handle_error = lambda *_: None  # the client hangs up, as it should
        with serving(served):
            yield f"https://127.0.0.1:{served.server_address[1]}", certificate


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl to make a certificate")
def test_certificates_are_checked(certified, monkeypatch):
    url, certificate = certified
    with pytest.raises(DataError, match="certificate verify failed"):
        download(f"{url}/good", len(BODY), SHA, io.BytesIO())
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    download(f"{url}/good", len(BODY), SHA, io.BytesIO())
    with pytest.raises(DataError, match=r"leads to http://.*, which is refused"):
        download(f"{url}/downgrade", len(BODY), SHA, io.BytesIO())
