"""A download over https that yields the expected bytes or an error, within seconds if offline."""

from __future__ import annotations

import hashlib
import http.client
import ssl
import time
import urllib.request
from io import BufferedIOBase
from typing import Any
from urllib.parse import urlsplit

from data.digests import CHUNK
from data.errors import DataError

TIMEOUT_S = 10.0  # for the connection, and for any silence while data flow
WHOLE_S = 900.0  # for everything


def download(url: str, size: int, sha256: str, out: BufferedIOBase) -> None:
    """Write the `size` bytes at `url` to `out`.

    Raises:
        DataError: no connection, an untrusted certificate, a status other than 200, a redirect
            to another scheme, or content of another size or digest.
    """
    digest, received = hashlib.sha256(), 0
    start = time.monotonic()
    request = urllib.request.Request(url, headers={"User-Agent": "longchar"})
    trusted = urllib.request.HTTPSHandler(context=ssl.create_default_context())
    opener = urllib.request.build_opener(trusted, _SameScheme)
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            _check_offer(response, url, size)
            while chunk := response.read(min(CHUNK, size + 1 - received)):
                received += len(chunk)
                if received > size:
                    raise DataError(f"{url} holds more than the expected {size} bytes")
                if time.monotonic() - start > WHOLE_S:
                    raise DataError(f"only {received} of {size} bytes came within {WHOLE_S:.0f} s")
                digest.update(chunk)
                out.write(chunk)
    except (OSError, http.client.HTTPException) as error:
        # urllib wraps the cause ("Name or service not known", "certificate verify failed").
        reason = getattr(error, "reason", None)
        raise DataError(str(reason if isinstance(reason, OSError) else error)) from error
    if received != size:
        raise DataError(f"{url} gave {received} bytes, expected {size}")
    if digest.hexdigest() != sha256:
        raise DataError(f"{url} gave sha256 {digest.hexdigest()}, expected {sha256}")


class _SameScheme(urllib.request.HTTPRedirectHandler):
    """Follows no redirect from https to something else."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: Any,
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme != urlsplit(req.full_url).scheme:
            raise DataError(f"{req.full_url} leads to {newurl}, which is refused")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_offer(response: http.client.HTTPResponse, url: str, size: int) -> None:
    if response.status != http.HTTPStatus.OK:
        raise DataError(f"{url} answered with status {response.status}")
    offered = response.headers.get("Content-Length")
    if offered is not None and offered != str(size):
        raise DataError(f"{url} offers {offered} bytes, expected {size}")
