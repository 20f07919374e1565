"""Exit with 0 if the server of this container answers `/health`. Uses the standard library alone: it runs every 30 s.

Reads the address from PERAXIS_HOST and PERAXIS_PORT, so a container is configured by its environment.
"""

from __future__ import annotations

import http.client
import os
import sys

# Shorter than the timeout of the HEALTHCHECK, so that the log of checks has the reason.
TIMEOUT_S = 8.0
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main() -> int:
    host = os.environ.get("PERAXIS_HOST") or "0.0.0.0"
    port = int(os.environ.get("PERAXIS_PORT") or 8080)
    connection = http.client.HTTPConnection(LOOPBACK.get(host, host), port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        print(f"no answer from {host} port {port}: {error}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    if status != http.client.OK:
        print(f"/health answers {status}", file=sys.stderr)
    return int(status != http.client.OK)


if __name__ == "__main__":
    sys.exit(main())
