"""Build target cpu or vllm-cpu of docker/Dockerfile with buildah, without a container engine.

`python docker/build_image.py` runs as root on Debian or Ubuntu. Without --base-image it makes the base with
debootstrap, so that no registry of images is needed. pip in the build looks where pip on this machine looks.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("buildah", "podman", "debootstrap")
# The rest of a base's package manager would stay in the image.
APT_CACHES = ("var/cache/apt", "var/lib/apt/lists")


@dataclass(frozen=True, slots=True)
class Backend:
    """The sources of an image with one of the engines."""

    target: str  # of the Dockerfile
    packages: str  # of Debian, in its base
    constraints: str  # has the version of torch


BACKENDS = {
    "native": Backend("cpu", "python3-venv", "constraints.txt"),
    # torch.compile needs a compiler and Python's headers where it runs, and vLLM's kernels are linked with libnuma.
    "vllm": Backend("vllm-cpu", "python3-venv,python3-dev,g++,libnuma1", "vllm_plugin/constraints.txt"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="native", choices=BACKENDS, help="engine in the image (native)")
    parser.add_argument("--tag", help="name of the image (localhost/peraxis: and the target)")
    parser.add_argument("--base-image", help="a local image to build on, instead of one made by debootstrap")
    parser.add_argument("--suite", default="bookworm", help="Debian's release of the base (bookworm)")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian", help="where debootstrap gets it")
    parser.add_argument("--torch-index", help="index of torch's CPU builds; empty: only pip's own indexes")
    parser.add_argument("--extras", help="extras of pyproject.toml, separated by commas (otel,s3)")
    arguments = parser.parse_args()
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        parser.error(f"run this as root, with these Debian packages installed: {' '.join(TOOLS)} runc")
    backend = BACKENDS[arguments.backend]
    base = arguments.base_image or debian_base(arguments.suite, arguments.mirror, backend)
    build_arguments = {"BASE_IMAGE": base}
    torch_index = arguments.torch_index
    if torch_index is None and pip_offers_cpu_torch(backend.constraints):
        torch_index = ""
    if torch_index is not None:
        build_arguments["TORCH_INDEX"] = torch_index
    if arguments.extras is not None:
        build_arguments["EXTRAS"] = arguments.extras
    build(backend.target, arguments.tag or f"localhost/peraxis:{backend.target}", build_arguments)


def debian_base(suite: str, mirror: str, backend: Backend) -> str:
    """Return the name of a local image of Debian with what a backend needs of it; make it if it is missing."""
    name = f"localhost/peraxis-base:{suite}-{backend.target}"
    if subprocess.run(["podman", "image", "exists", name]).returncode == 0:
        return name
    with tempfile.TemporaryDirectory(prefix="peraxis-base-") as directory:
        run("debootstrap", "--variant=minbase", f"--include={backend.packages}", suite, directory, mirror)
        for cache in APT_CACHES:
            shutil.rmtree(Path(directory, cache))
        tar = subprocess.Popen(["tar", "-C", directory, "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(["podman", "import", "-", name], stdin=tar.stdout, check=True)
        if tar.wait():
            raise SystemExit(f"tar could not read {directory}")
    return name


def pip_offers_cpu_torch(constraints: str) -> bool:
    """True if pip on this machine finds a CPU build of torch without another index."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
    ]
    command += ["--constraint", str(ROOT / constraints), "--report", "-", "torch"]
    report = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return str(json.loads(report)["install"][0]["metadata"]["version"]).endswith("+cpu")


def pip_settings() -> Mapping[str, str]:
    """Return pip's settings on this machine; those of the environment override those of files."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    settings = {}
    # Lines as global.cert='/...' and :env:.cert='/...'.
    for line in sorted(lines, key=lambda line: line.startswith(":env:")):
        name, value = line.split("=", 1)
        settings[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return settings


def local_paths(settings: Mapping[str, str]) -> list[str]:
    """Return the files and directories of this machine that settings of pip name, also by a file: URL."""
    words = " ".join(settings.values()).split()
    paths = {re.sub(r"^file://", "", word) for word in words}
    # An index of file: URLs may refer to files beside its own directory.
    parents = {os.path.dirname(path.rstrip("/")) if path.endswith("simple") else path for path in paths}
    return sorted(path for path in parents if path.startswith("/") and os.path.exists(path))


def build(target: str, tag: str, build_arguments: Mapping[str, str]) -> None:
    """Build the image. What pip needs of this machine is mounted, and leaves no trace in the image."""
    settings = pip_settings()
    with tempfile.TemporaryDirectory(prefix="peraxis-pip-") as directory:
        configuration = Path(directory, "pip.conf")
        configuration.write_text(
            "[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
        )
        command = ["buildah", "build", "--isolation", "chroot", "--layers=false", "--pull-never"]
        command += ["--format", "docker", "--target", target, "--tag", tag]
        for name, value in build_arguments.items():
            command += ["--build-arg", f"{name}={value}"]
        command += ["--volume", f"{configuration}:/etc/pip.conf:ro"]
        for path in local_paths(settings):
            command += ["--volume", f"{path}:{path}:ro"]
        run(*command, "--file", str(ROOT / "docker/Dockerfile"), str(ROOT))


def run(*command: str) -> None:
    print("+", *command, file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
