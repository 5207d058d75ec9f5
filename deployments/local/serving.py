"""Work pool and deployments of the embedded Prefect server."""

import hashlib
import json
import os
import subprocess
import sys
import urllib.error
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

import configs
import deployments
import flows
import tasks
from configs.errors import StackError
from deployments.local import settings
from deployments.local.health import ask, tail
from deployments.local.services import POOL, WORKER

PREFECT_FILE = Path(deployments.__file__).with_name("prefect.yaml")
AUTOMATIONS = PREFECT_FILE.with_name("automations.yaml")
QUEUE = "training"  # as prefect.yaml names it


def work_pool(api: str) -> None:
    """Makes the process work pool and its queue for trainings unless they are there: one training at a time, for this is one machine."""
    _make(
        f"{api}/work_pools/{POOL}",
        f"{api}/work_pools/",
        {"name": POOL, "type": "process", "description": "Flow runs as processes of this machine."},
    )
    # Only where it is made: a limit that the user has changed stays.
    training = {
        "name": QUEUE,
        "concurrency_limit": 1,
        "description": "One training at a time; others wait. Promotions are not in this queue.",
    }
    _make(f"{api}/work_pools/{POOL}/queues/{QUEUE}", f"{api}/work_pools/{POOL}/queues", training)


def automations(api: str) -> None:
    """Installs what automations.yaml defines, once each, and brings what differs from it up to date; paused ones stay paused."""
    for wanted in yaml.safe_load(AUTOMATIONS.read_text())["automations"]:
        found = ask(f"{api}/automations/filter", {"automations": {"name": {"any_": [wanted["name"]]}}})
        if not found:
            ask(f"{api}/automations/", wanted)
        elif not _covers(found[0], wanted):
            ask(f"{api}/automations/{found[0]['id']}", {"enabled": found[0]["enabled"]} | wanted, method="PUT")


def _covers(found: Any, wanted: Any) -> bool:
    """Whether all that is wanted was found; the server adds defaults."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            name in found and _covers(found[name], value) for name, value in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(_covers, found, wanted))
    return found == wanted


def _make(there: str, at: str, body: dict[str, Any]) -> None:
    if ask(there) is None:
        try:
            ask(at, body)
        except urllib.error.HTTPError as error:
            if error.code != 409:  # somebody else was quicker
                raise


def worker_online(api: str, since: float) -> bool:
    """Whether the worker has reported to the server after `since` (seconds of the epoch): the server remembers those of an earlier start."""
    try:
        workers = ask(f"{api}/work_pools/{POOL}/workers/filter", {}) or []
    except OSError:
        return False
    seen = [
        datetime.fromisoformat(w["last_heartbeat_time"]).timestamp()
        for w in workers
        if w["name"] == WORKER and w["last_heartbeat_time"]
    ]
    return any(at >= since for at in seen)


def deploy(home: Path, api: str, project: Path) -> bool:
    """Deploys what prefect.yaml names, unless the server has just that already; says whether it had to. Raises StackError."""
    digest = _digest(project)
    mark = home / "deployed.json"
    known, names = last_deployed(mark)
    if known == digest and _on_server(api) >= names:
        return False
    env = {name: value for name, value in os.environ.items() if name != "PREFECT_API_KEY"} | settings.environment(home)
    env |= {"RATCHET_PROJECT": str(project), "PREFECT_API_URL": api}
    log = home / "logs" / "deploy.log"
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--prefect-file", str(PREFECT_FILE), "--all"]
    with open(log, "wb") as out:
        done = subprocess.run(command, cwd=project, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    names = _declared()
    missing = names - _on_server(api)
    if done.returncode or missing:
        raise StackError(
            f"the deployments {', '.join(sorted(missing or names))} could not be made: see {log}, which ends\n{tail(log, 25)}"
        )
    mark.write_text(json.dumps({"digest": digest, "names": sorted(names)}))
    return True


def last_deployed(mark: Path) -> tuple[str | None, set[str]]:
    """Digest and names that `deploy` has noted; no digest where it never did or the note is damaged: deploying again mends that."""
    try:
        known = json.loads(mark.read_text())
        return known["digest"], set(known["names"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None, set()


def _declared() -> set[str]:
    return {d["name"] for d in yaml.safe_load(PREFECT_FILE.read_text())["deployments"]}


def _on_server(api: str) -> set[str]:
    return {d["name"] for d in ask(f"{api}/deployments/filter", {"limit": 200})}


def _digest(project: Path) -> str:
    """Of everything that a deployment and its form are made of."""
    total = hashlib.sha256(f"{project} {version('prefect')} ".encode() + PREFECT_FILE.read_bytes())
    for package in (configs, flows, tasks):
        for file in sorted(Path(package.__file__).parent.rglob("*.py")):
            total.update(file.read_bytes())
    return total.hexdigest()
