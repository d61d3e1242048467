"""Make a certificate authority and certificates for a test with the openssl program."""

from __future__ import annotations

import datetime
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    file: Path
    key: Path


class Authority:
    """A certificate authority that lives in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        assert datetime.datetime.now(datetime.timezone.utc).year > 2000, "certificates need a clock that is set"
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self.file = folder / "ca.crt"
        self._openssl(
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.crt",
            "-subj", "/CN=test-ca",
        )  # fmt: skip

    def issue(self, common_name: str, *, address: str = "") -> Certificate:
        """Issue a certificate: a server's for an IP address, or a client's."""
        key, request, file = (f"{common_name}.{end}" for end in ("key", "csr", "crt"))
        self._openssl(
            "req", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", request, "-subj", f"/CN={common_name}"
        )
        extensions = self._folder / f"{common_name}.ext"
        extensions.write_text(f"subjectAltName=IP:{address}\n" if address else "extendedKeyUsage=clientAuth\n")
        self._openssl(
            "x509", "-req", "-in", request, "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-out", file,
            "-extfile", str(extensions),
        )  # fmt: skip
        return Certificate(self._folder / file, self._folder / key)

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=self._folder)
