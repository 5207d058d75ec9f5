"""OpenStack Swift as an S3 server: its own Python environment, its configuration and its rings."""

import fcntl
import hashlib
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

from configs.errors import StackError

CONSTRAINTS = Path(__file__).with_name("swift-constraints.txt")
ROLES = ("account", "container", "object", "proxy")

DEFAULTS = """[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
log_level = WARNING
# No such socket, and so nothing goes to the system's log: the console is enough.
log_address = {folder}/none
log_udp_host =
"""

STORAGE = """
[pipeline:main]
pipeline = {role}-server

[app:{role}-server]
use = egg:swift#{role}
recon_cache_path = {folder}/cache
"""

# No cache and no ratelimit: both need memcached, and whoever listens on its port is not ours.
PROXY = """
[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck proxy-logging listing_formats bulk tempurl s3api tempauth copy slo dlo versioned_writes symlink proxy-server

[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true

[filter:tempauth]
use = egg:swift#tempauth
user_{user} = {secret} .admin

[filter:s3api]
use = egg:swift#s3api
location = us-east-1
max_upload_part_num = 10000

[filter:slo]
use = egg:swift#slo
max_manifest_segments = 10000

[filter:proxy-logging]
use = egg:swift#proxy_logging
access_log_level = WARNING
access_log_statsd_enable = false
"""

PLAIN_FILTERS = (
    "catch_errors",
    "gatekeeper",
    "healthcheck",
    "listing_formats",
    "bulk",
    "tempurl",
    "copy",
    "dlo",
    "versioned_writes",
    "symlink",
)

RINGS = """
import sys
from swift.common.ring import RingBuilder
folder, ports = sys.argv[1], dict(zip(("account", "container", "object"), map(int, sys.argv[2:])))
for role, port in ports.items():
    builder = RingBuilder(4, 1, 0)
    builder.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": port, "device": "d1", "weight": 1.0,
                     "replication_ip": "127.0.0.1", "replication_port": port})
    builder.rebalance()
    builder.get_ring().save(f"{folder}/{role}.ring.gz")
"""


def obstacle(home: Path) -> str | None:
    """Why Swift cannot run on this machine or keep its data under `home`; None where it can."""
    if not sys.platform.startswith("linux"):
        return f"Swift runs on Linux alone and this is {sys.platform}"
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return f"Swift needs a user name and user id {os.getuid()} has none"
    probe = home / ".xattr-probe"
    probe.touch()
    try:
        os.setxattr(probe, "user.ratchet", b"1")
    except OSError as error:
        return f"Swift needs user xattrs and the file system of {home} refuses them ({error.strerror})"
    finally:
        probe.unlink()
    return None


def environment_folder() -> Path:
    """Swift's own virtual environment: eventlet must not come near Ratchet's. One for all homes."""
    return Path(sys.prefix) / "ratchet-swift"


def install(log: Path, say: Any = print) -> None:
    """Makes that environment unless it is there, whole and of the pinned versions. Raises StackError with the end of pip's output."""
    folder = environment_folder()
    pins = hashlib.sha256(CONSTRAINTS.read_bytes() + sys.version.encode()).hexdigest()
    mark = folder / "ratchet-pins"
    if _read(mark) == pins:
        return
    if not os.access(folder.parent, os.W_OK):
        raise StackError(
            f"{folder} cannot be made for Swift, {folder.parent} is not writable: install Ratchet in a virtual environment of your own"
        )
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # dies with its holder; the mark, written last, tells whole from half-made
        if _read(mark) == pins:
            return
        say(f"Installing Swift, the S3 server, into {folder} (once)")
        pip = [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            str(CONSTRAINTS),
            "swift",
        ]
        for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], pip):
            with open(log, "ab") as out:
                done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            if done.returncode:
                last = log.read_text(errors="replace").strip().splitlines()[-8:]
                raise StackError(
                    f"Swift could not be installed into {folder}: see {log}, which ends\n" + "\n".join(last)
                )
        mark.write_text(pins)


def configure(home: Path, ports: dict[str, int], keys: dict[str, str]) -> None:
    """Writes swift.conf, a configuration per server, and the rings. `keys` as from settings.credentials."""
    folder = home / "swift"
    for sub in ("devices/d1", "cache"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    _private(folder / "swift.conf", _swift_conf(keys))
    values = {"folder": str(folder).replace("%", "%%"), "user": pwd.getpwuid(os.getuid()).pw_name}
    for role in ROLES:
        text = DEFAULTS.format(port=ports["s3" if role == "proxy" else role], **values)
        if role == "proxy":
            account, _, name = keys["access_key"].partition(":")
            text += PROXY.format(user=f"{account}_{name}", secret=keys["secret_key"])
            text += "".join(f"\n[filter:{name}]\nuse = egg:swift#{name}\n" for name in PLAIN_FILTERS)
        else:
            text += STORAGE.format(role=role, **values)
        _private(folder / f"{role}.conf", text)
    # Where an object lies depends on its name alone, so rings made anew with other ports find all data again.
    wanted = [str(ports[role]) for role in ROLES[:3]]
    if _read(folder / "rings") != " ".join(wanted):
        done = subprocess.run([_python(), "-c", RINGS, str(folder), *wanted], capture_output=True, text=True)
        if done.returncode:
            raise StackError(f"Swift's rings could not be made under {folder}: {done.stderr.strip()}")
        (folder / "rings").write_text(" ".join(wanted))


def command(home: Path, role: str) -> list[str]:
    """Argument list of one of the four servers."""
    script = environment_folder() / "bin" / f"swift-{role}-server"
    return [_python(), str(script), str(home / "swift" / f"{role}.conf"), "--verbose"]


def _swift_conf(keys: dict[str, str]) -> str:
    prefix, suffix = keys["hash_prefix"], keys["hash_suffix"]
    return f"[swift-hash]\nswift_hash_path_prefix = {prefix}\nswift_hash_path_suffix = {suffix}\n\n[storage-policy:0]\nname = one\ndefault = yes\n"


def _python() -> str:
    return str(environment_folder() / "bin" / "python")


def _read(file: Path) -> str | None:
    return file.read_text() if file.exists() else None


def _private(file: Path, text: str) -> None:
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        f.write(text)
