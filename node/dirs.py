"""Where a node keeps its files: state that lasts, sockets that do not, models that all nodes of a host share.

State follows the XDG rules. Sockets get a directory of their own with a short path, because the kernel limits
the path of a Unix socket to `MAX_SOCKET_PATH` bytes.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from node.errors import SettingsError

#: Longest path of a Unix socket, bytes: `sun_path` is 108 bytes with its closing zero.
MAX_SOCKET_PATH = 107
#: Where blocks of KV live when the host has it: memory that outlives the engine, shared by path.
SHARED_MEMORY = Path("/dev/shm")
#: Where the unit of `deploy/systemd` keeps its state, as a user of its own.
SERVICE_STATE_DIR = Path("/var/lib/grapevine")
#: What the drivers of NVIDIA and AMD GPUs put into /dev.
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def default_state_dir() -> Path:
    """Directory of what must survive a restart (`$XDG_STATE_HOME/grapevine`)."""
    return _xdg("XDG_STATE_HOME", ".local/state") / "grapevine"


def default_cache_dir() -> Path:
    """Directory of converted models (`$GRAPEVINE_CACHE_DIR`, else `$XDG_CACHE_HOME/grapevine`)."""
    own = os.environ.get("GRAPEVINE_CACHE_DIR")
    return Path(own).expanduser() if own else _xdg("XDG_CACHE_HOME", ".cache") / "grapevine"


def default_run_dir() -> Path:
    """Directory of sockets and locks (`$XDG_RUNTIME_DIR/grapevine`, else below the temporary directory)."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "grapevine"
    return Path(tempfile.gettempdir()) / f"grapevine-{os.getuid()}"


def private_dir(path: Path, flag: str = "--run-dir") -> Path:
    """Make `path` a directory that only this user can enter; `flag` is the option that it comes from.

    Raises `SettingsError` when it cannot be made or is somebody else's: they could take sockets in it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise SettingsError(f"cannot make the directory {path}: {error.strerror}; choose another one") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SettingsError(f"{path} does not belong to this user; choose another directory with {flag}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        try:
            path.chmod(0o700)
        except OSError as error:  # file systems without modes
            told = f"{path} cannot be closed to other users: {error.strerror}; choose another directory with {flag}"
            raise SettingsError(told) from error
    return path


def free_bytes(path: Path) -> int:
    """Free bytes of the file system that `path` is on, 0 when there is none."""
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def has_gpu() -> bool:
    """Whether a driver of NVIDIA or AMD GPUs is loaded. Asks only for device files: quick, and needs no library."""
    return any(device.exists() for device in GPU_DEVICES)


def _xdg(variable: str, below_home: str) -> Path:
    given = os.environ.get(variable)
    return Path(given) if given and Path(given).is_absolute() else Path.home() / below_home
