"""The log of every process of a server: one format on standard error, with the process's role."""

from __future__ import annotations

import logging


def configure_logging(role: str) -> None:
    """Log to standard error, with `role` and the process id in each line; the server's own modules from INFO on."""
    logging.basicConfig(
        format=f"%(asctime)s %(levelname)s {role}[%(process)d] %(name)s: %(message)s", force=True
    )
    logging.getLogger("server").setLevel(logging.INFO)
