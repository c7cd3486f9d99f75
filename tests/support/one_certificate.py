"""Let Prefect's clients trust one authority. Each client reads the file of certificates, and the usual one takes 20 CPU milliseconds."""

import os
from pathlib import Path

import certifi

_END = "-----END CERTIFICATE-----\n"


def trust_one_certificate(folder: Path) -> None:
    """Name a file with one certificate to Prefect's clients of this process and of its children; their servers have no TLS.

    Does nothing where the user has named a file.
    """
    if "PREFECT_API_SSL_CERT_FILE" not in os.environ:
        file = folder / "one-certificate.pem"
        file.write_text(Path(certifi.where()).read_text(encoding="utf-8").partition(_END)[0] + _END)
        os.environ["PREFECT_API_SSL_CERT_FILE"] = str(file)
