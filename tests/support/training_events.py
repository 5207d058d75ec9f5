"""Follows the events of every child process of a stack: which training steps were done, and when."""

import json
import threading
import time
from pathlib import Path


class TrainingEvents:
    """Reads `events.jsonl` of each work folder, from the moment it appears until `stop`."""

    def __init__(self, home: Path):
        self.work, self.files, self.seen, self.stopped = home / "work", {}, [], threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Reads the rest and ends."""
        self.stopped.set()
        self.thread.join()

    def steps(self, stage: str) -> list[tuple[str, int]]:
        """(attempt, step) of each step that was done."""
        logs = [(attempt, event) for _, attempt, name, event in self.seen if name == stage and event["event"] == "log"]
        return [(attempt, event["step"]) for attempt, event in logs if not event.get("again")]

    def resumed_after(self) -> list[float]:
        """Seconds from the start of each child that resumed from a checkpoint to its first step."""
        resumed = (attempt for _, attempt, _, event in self.seen if "from the checkpoint" in event.get("message", ""))
        found = []
        for attempt in dict.fromkeys(resumed):
            rows = [(at, event) for at, name, _, event in self.seen if name == attempt]
            steps = [at for at, event in rows if event["event"] == "log" and not event.get("again")]
            found += [round(steps[0] - self.files[attempt][1], 2)] if steps else []
        return found

    def _follow(self) -> None:
        while not (last := self.stopped.is_set()):
            for path in self.work.glob("*-*/events.jsonl"):
                if str(path) not in self.files:
                    try:
                        self.files[str(path)] = (path.open(), time.time())
                    except FileNotFoundError:
                        continue
            for name, (file, _) in list(self.files.items()):
                while (line := file.readline()).endswith("\n"):
                    self.seen.append((time.time(), name, Path(name).parent.name.split("-")[1], json.loads(line)))
                file.seek(file.tell() - len(line))
            if not last:
                time.sleep(0.05)
