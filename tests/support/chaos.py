"""Kills a process of the pipeline at a random moment, lets the run finish, and compares what it made with an undisturbed run: `make chaos`.

    python tests/support/chaos.py [ROUNDS [SEED]]     a stack of its own; one line a round, a summary, exit code 1 when anything is not as it must be

A round deletes what SFT and GRPO made (every third one their evaluations too), starts the deployment's run under the worker, sends SIGKILL to the
child, to the task process (the engine) or to the worker, and presses Retry where the run ends Crashed.
"""

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mlflow
import psutil
import tiny
from prefect.client.orchestration import get_client
from prefect.states import AwaitingRetry

from deployments.local import control, settings, stack
from tasks.core.storage.artifacts import find
from tasks.core.storage.store import open_store

# Tells the completions of a model that knows nothing apart, so that GRPO has something to learn; right answers are still worth more.
REWARD = """
def score(completions, gold):
    return [float(text.endswith(f"Final Answer: {right}")) + sum(map(ord, text)) % 7 / 60 for text, right in zip(completions, gold)]
"""
TARGETS = ("child", "engine", "worker")
SAVE_STEPS = 5
STEPS = {"sft": 40, "grpo": 20}
CONFIG = {
    **tiny.RUN,
    "data.test_size": 8,
    "sft": {
        "max_steps": STEPS["sft"],
        "batch_size": 8,
        "logging_steps": 1,
        "save_steps": SAVE_STEPS,
        "lora_dropout": 0.05,
    },
    "grpo": {
        "max_steps": STEPS["grpo"],
        "batch_size": 8,
        "num_generations": 4,
        "max_new_tokens": 8,
        "logging_steps": 1,
        "save_steps": SAVE_STEPS,
    }
    | {"reward_type": "chaos_reward:score", "learning_rate": 1e-3, "lora_dropout": 0.05},
    "evaluation": {"batch_size": 16, "kl_samples": 4},
    "gates": {"accuracy": None, "kl": None, "reward": {"min": -100}},
    "registry.name": "chaos",
}
PATIENCE = 600  # seconds for a run to end


@dataclass
class Round:
    """What happened in one round, and what was found after it."""

    target: str
    after: float
    killed_in: str = "nothing"
    retries: int = 0
    seconds: float = 0.0
    redone: dict[str, int] = field(default_factory=dict)
    resumed_after: list[float] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    orphans: list[str] = field(default_factory=list)
    locks: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    curves: dict[str, list[int]] = field(default_factory=dict)
    state: str = ""

    def wrong(self, digests: dict[str, str]) -> list[str]:
        """What is not as it must be."""
        found = [] if self.state == "Completed" else [f"the run ended {self.state}"]
        found += [
            f"{stage} differs from the undisturbed run's"
            for stage in digests
            if self.digests.get(stage) != digests[stage]
        ]
        found += [
            f"the curve of {stage} has steps {steps}"
            for stage, steps in self.curves.items()
            if steps != list(range(1, STEPS[stage] + 1))
        ]
        found += [f"{n} steps of {stage} were redone" for stage, n in self.redone.items() if n > SAVE_STEPS]
        return found + [f"left behind: {what}" for what in (*self.orphans, *self.locks, *self.left)]


class Steps:
    """Follows the events of every child of a stack, whenever it starts: which steps were done, and when."""

    def __init__(self, home: Path):
        self.work, self.files, self.seen, self.over = home / "work", {}, [], threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Reads what is left."""
        self.over.set()
        self.thread.join()

    def of(self, stage: str) -> list[tuple[str, int]]:
        """(attempt, step) of each step that was done."""
        return [
            (attempt, event["step"])
            for _, attempt, name, event in self.seen
            if name == stage and event["event"] == "log" and not event.get("again")
        ]

    def resumed_after(self) -> list[float]:
        """Seconds from the start of each child that went on from a checkpoint to its first step."""
        found = []
        for attempt in dict.fromkeys(a for _, a, _, e in self.seen if "going on from" in e.get("message", "")):
            rows = [(at, e) for at, a, _, e in self.seen if a == attempt]
            steps = [at for at, e in rows if e["event"] == "log" and not e.get("again")]
            created = self.files[attempt][1]
            found += [round(steps[0] - created, 2)] if steps else []
        return found

    def _follow(self) -> None:
        while not (last := self.over.is_set()):
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


class Chaos:
    """Runs of one small pipeline, under the worker of a stack that runs."""

    def __init__(self, home: Path, project: Path, root: str):
        self.home, self.root, self.store = home, root, open_store(root)
        (project / "chaos_reward.py").write_text(REWARD)

    def undisturbed(self) -> Round:
        """A run that nobody kills."""
        return self.round("nothing", float("inf"), everything=True)

    def round(
        self, target: str, after: float = 0.0, at: tuple[str, int] | None = None, everything: bool = False
    ) -> Round:
        """Kills the target so many seconds after the run's process was there, or when a step of a stage is done, or as soon after it as there is one."""
        done, began = Round(target, after), time.monotonic()
        self._forget(everything)
        steps = Steps(self.home)
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name("post-train/post-train")
            run = client.create_flow_run_from_deployment(
                deployment.id, parameters={"preset": "tiny", "overrides": {**CONFIG, "storage.root": self.root}}
            )
            self._wait(lambda: self._processes("engine") or client.read_flow_run(run.id).state.is_final())
            due = time.monotonic() + after
            while not (state := client.read_flow_run(run.id).state).is_final() or state.name == "Crashed":
                if state.is_final():
                    done.retries += 1
                    client.set_flow_run_state(run.id, AwaitingRetry(), force=True)
                    self._wait(lambda: not client.read_flow_run(run.id).state.is_final())
                reached = time.monotonic() >= due and (at is None or at[1] in [step for _, step in steps.of(at[0])])
                if done.killed_in == "nothing" and reached and (victims := self._processes(target)):
                    done.killed_in = self._stage()
                    victims[0].send_signal(signal.SIGKILL)
                if time.monotonic() - began > PATIENCE:
                    break
                time.sleep(0.1)
            done.state, done.seconds = state.name, round(time.monotonic() - began, 1)
            self._wait(lambda: not self._processes("engine") and not self._processes("child"), 15)
            steps.stop()
            done.orphans = [" ".join(p.cmdline())[:200] for kind in ("engine", "child") for p in self._processes(kind)]
            done.locks = [
                limit.name
                for limit in client.read_global_concurrency_limits(limit=200, offset=0)
                if limit.name.startswith("stage-")
            ]
        done.left = [key for key in self.store.list("") if key.endswith("/owner.json") or "/checkpoints/" in key]
        done.left += [str(p) for p in (self.home / "work").rglob("manifest.json")]
        done.redone = {stage: len(steps.of(stage)) - n for stage, n in STEPS.items()}
        done.resumed_after = steps.resumed_after()
        done.digests = {stage: self._digest(stage) for stage in STEPS}
        done.curves = {stage: curve(str(run.id), stage) for stage in STEPS}
        return done

    def _forget(self, everything: bool) -> None:
        """Takes away what training makes, and on demand its evaluations and their verdict too; data and base stay."""
        gone = ("sft/", "grpo/", "register/", *(("evaluate_sft/", "evaluate_grpo/", "judge/") if everything else ()))
        self.store.delete([key for key in self.store.list("") if key.startswith(gone)])

    def _digest(self, stage: str) -> str:
        manifests = [
            find(self.store, key.removesuffix("/manifest.json"))
            for key in self.store.list(f"{stage}/")
            if key.endswith("/manifest.json")
        ]
        return " ".join(m.digest for m in manifests if m is not None)

    def _processes(self, kind: str) -> list[psutil.Process]:
        """Running processes of this stack: flow run engines, children, or the worker."""
        words = {"child": "tasks.core.execution.child", "engine": "prefect.engine", "worker": "worker start"}
        found = []
        for process in control.processes(self.home):
            try:
                if (
                    words.get(kind, "no such process") in " ".join(process.cmdline())
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def _stage(self) -> str:
        folders = [f.name.split("-")[1] for f in (self.home / "work").glob("*-*")]
        return folders[-1] if folders else "between stages"

    @staticmethod
    def _wait(true, seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while not true() and time.monotonic() < until:
            time.sleep(0.1)


def curve(flow_run: str, stage: str) -> list[int]:
    """The steps at which the stage's MLflow run has a loss, in order, each as often as it is there."""
    client = mlflow.MlflowClient()
    experiments = [e.experiment_id for e in client.search_experiments()]
    parent = client.search_runs(experiments, f"tags.`ratchet.flow_run_id` = '{flow_run}'")[0].info.run_id
    runs = client.search_runs(
        experiments, f"tags.`mlflow.parentRunId` = '{parent}' and tags.`ratchet.stage` = '{stage}'"
    )
    return sorted(point.step for run in runs for point in client.get_metric_history(run.info.run_id, "loss"))


@contextmanager
def own_stack() -> Iterator[tuple[Path, Path]]:
    """(home, project) of a stack for this process alone; the environment leads to it."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        home, project = Path(folder) / "home", Path(folder) / "project"
        project.mkdir()
        os.environ["PREFECT_WORKER_QUERY_SECONDS"] = "2"
        try:
            stack.up(
                home,
                ports={name: settings.free_port() for name in settings.PORTS},
                die_with=os.getpid(),
                say=lambda line: None,
                project=project,
            )
            settings.apply(home)
            yield home, project
        finally:
            stack.down(home)


def main(rounds: int = 30, seed: int = 1) -> int:
    """Exit code 0 when every round ended as it must."""
    with own_stack() as (home, project):
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: os.environ["PREFECT_API_URL"]}):
            chaos, bad = Chaos(home, project, "s3://ratchet/chaos"), 0
            chaos.undisturbed()  # data and base are there from here on
            quiet = chaos.undisturbed()
            print(json.dumps({"undisturbed": asdict(quiet)}), flush=True)
            made = []
            for n in range(rounds):
                chance = random.Random(f"{seed}-{n}")
                target = TARGETS[n % len(TARGETS)]
                # By the clock, most moments fall into start-ups and other stages: two of three are a random step.
                if n % 9 >= 3:
                    stage = chance.choice(list(STEPS))
                    done = chaos.round(target, at=(stage, chance.randrange(1, STEPS[stage])))
                else:
                    done = chaos.round(target, round(chance.uniform(0, 0.6 * quiet.seconds), 2), everything=True)
                wrong = done.wrong(quiet.digests)
                bad += bool(wrong)
                made.append(done)
                print(json.dumps({"round": n, "seed": f"{seed}-{n}", **asdict(done), "wrong": wrong}), flush=True)
    resumed = sorted(s for done in made for s in done.resumed_after)
    most = {stage: max((done.redone[stage] for done in made), default=0) for stage in STEPS}
    print(
        f"{rounds} rounds, seed {seed}: {bad} wrong; killed {sum(d.killed_in != 'nothing' for d in made)}; most steps redone {most} of {SAVE_STEPS} allowed;"
    )
    print(f"seconds from a child's start to its first resumed step: {resumed}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:])))
