"""Host memory that a process can still use: the machine's, or less where its control groups have a limit."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 62


def available_bytes() -> int:
    """Return the host memory that can be used without swapping, within the limits of the process's control groups."""
    available = int(psutil.virtual_memory().available)
    return min([available, *map(_free_bytes, _control_groups())])


def _control_groups() -> list[Path]:
    """Return the directories of this process's control group (version 2) and of its parents, or an empty list."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return []
    group = CGROUP / own
    return [path for path in (group, *group.parents) if path.is_relative_to(CGROUP)]


def _free_bytes(group: Path) -> int:
    """Return the bytes left below a control group's limit; file pages in the page cache count as free."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return UNLIMITED
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return UNLIMITED
    return int(limit) - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
