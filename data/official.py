"""What the two public corpora are: addresses, sizes, digests, symbols (Mahoney, mattmahoney.net).

enwik8 is the first 10^8 bytes of an English Wikipedia dump of 2006; text8 is made from the same
dump, reduced to a-z and space. Both are read as bytes and cut into 90, 5 and 5 million.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Official:
    """One public corpus.

    `size` and `sha256` are the unpacked text's, `archive_*` those of the zip file at `url`.
    `split_sha256` are the digests of train, valid and test where they have been published.
    `alphabet` lists the byte values that may occur.
    """

    name: str
    url: str
    archive_size: int
    archive_sha256: str
    size: int
    sha256: str
    split_sha256: tuple[str, str, str] | None
    alphabet: bytes


OFFICIAL = {
    "enwik8": Official(
        name="enwik8",
        url="https://mattmahoney.net/dc/enwik8.zip",
        archive_size=36_445_475,
        archive_sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        size=100_000_000,
        sha256="2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
        split_sha256=(
            "f8978bd9ca51fbea387d5145d310652ab39904bcbc8ab2647932c8c2e0539e64",
            "16b8b889f05ebeb5684d497d49383e8e55eb3634cee2f9a023dcab68cbf64f17",
            "86f62c0adeb6c27763f308b8913bec743626421a4d2b4010f1e177a40eef7750",
        ),
        alphabet=bytes(range(256)),
    ),
    "text8": Official(
        name="text8",
        url="https://mattmahoney.net/dc/text8.zip",
        archive_size=31_344_016,
        archive_sha256="a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
        size=100_000_000,
        sha256="6e890197040d37d85beb962ae1f041ff1d9a9ca8d20c7d99c85027eebf51dca7",
        split_sha256=None,
        alphabet=b" abcdefghijklmnopqrstuvwxyz",
    ),
}
