"""Kills a process of the pipeline at a random moment, lets the run finish, and compares it with an undisturbed run.

    python tests/support/chaos.py [ROUNDS [SEED]]

`make chaos` calls it. It starts a stack of its own, prints one line per round and a summary, and exits with 1 if
anything is wrong. A round deletes what SFT and GRPO made (every third round also their evaluations), starts a run of
the deployment, sends SIGKILL to the child, to the process of the flow run (the engine) or to the worker, and presses
Retry if the run ends Crashed.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mlflow
import psutil
from prefect.client.orchestration import get_client
from prefect.states import AwaitingRetry
from small_run import CONFIG, PASSING, REWARD, REWARD_FILE, SAVE_STEPS, STEPS
from training_events import TrainingEvents

from deployments.local import control, settings, stack
from tasks.core.storage.artifacts import find
from tasks.core.storage.store import open_store

TARGETS = ("child", "engine", "worker")
TRAINED = ("sft", "grpo")
EVALUATED = ("evaluate_sft", "evaluate_grpo", "judge")
MOST_SECONDS = 600  # for a run to end


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

    def errors(self, digests: dict[str, str]) -> list[str]:
        """How the round differs from an undisturbed one with these digests."""
        found = [] if self.state == "Completed" else [f"the run ended {self.state}"]
        for stage in digests:
            if self.digests.get(stage) != digests[stage]:
                found.append(f"{stage} differs from the undisturbed run's")
        for stage, steps in self.curves.items():
            if steps != list(range(1, STEPS[stage] + 1)):
                found.append(f"the curve of {stage} has the steps {steps}")
        found += [f"{n} steps of {stage} were redone" for stage, n in self.redone.items() if n > SAVE_STEPS]
        return found + [f"left behind: {what}" for what in (*self.orphans, *self.locks, *self.left)]


class Chaos:
    """Runs of the small pipeline under the worker of a running stack."""

    def __init__(self, home: Path, project: Path, root: str):
        self.home, self.root, self.store = home, root, open_store(root)
        (project / REWARD_FILE).write_text(REWARD)

    def undisturbed(self) -> Round:
        """A run without a kill."""
        return self.round("nothing", float("inf"), redo=(*TRAINED, *EVALUATED))

    def round(
        self,
        target: str,
        after: float = 0.0,
        at: tuple[str, int] | None = None,
        redo: tuple[str, ...] = TRAINED,
    ) -> Round:
        """Deletes the artifacts of the stages `redo`, runs the pipeline, and kills the target once.

        The kill is `after` seconds after the flow run's process starts, and not before step `at` = (stage, step).
        """
        done, started = Round(target, after), time.monotonic()
        self._delete(*redo, "register")
        events = TrainingEvents(self.home)
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name("post-train/post-train")
            overrides = {**CONFIG, **PASSING, "storage.root": self.root, "registry.name": "chaos"}
            parameters = {"preset": "tiny", "overrides": overrides}
            run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
            _wait(lambda: self._processes("engine") or client.read_flow_run(run.id).state.is_final())
            due = time.monotonic() + after
            while not (state := client.read_flow_run(run.id).state).is_final() or state.name == "Crashed":
                if state.is_final():
                    done.retries += 1
                    client.set_flow_run_state(run.id, AwaitingRetry(), force=True)
                    _wait(lambda: not client.read_flow_run(run.id).state.is_final())
                reached = time.monotonic() >= due and (at is None or at[1] in [n for _, n in events.steps(at[0])])
                if done.killed_in == "nothing" and reached and (victims := self._processes(target)):
                    done.killed_in = self._current_stage()
                    victims[0].send_signal(signal.SIGKILL)
                if time.monotonic() - started > MOST_SECONDS:
                    break
                time.sleep(0.1)
            done.state, done.seconds = state.name, round(time.monotonic() - started, 1)
            _wait(lambda: not self._processes("engine") and not self._processes("child"), 15)
            events.stop()
            limits = client.read_global_concurrency_limits(limit=200, offset=0)
        self._inspect(done, str(run.id), events, [limit.name for limit in limits])
        return done

    def _inspect(self, done: Round, flow_run: str, events: TrainingEvents, limits: list[str]) -> None:
        """Fills in what the round has left: artifacts, curves, processes, locks and files."""
        done.orphans = [" ".join(p.cmdline())[:200] for kind in ("engine", "child") for p in self._processes(kind)]
        done.locks = [name for name in limits if name.startswith("stage-")]
        done.left = [key for key in self.store.list("") if key.endswith("/owner.json") or "/checkpoints/" in key]
        done.left += [str(path) for path in (self.home / "work").rglob("manifest.json")]
        trained = [stage for stage in STEPS if events.steps(stage)]
        done.redone = {stage: len(events.steps(stage)) - STEPS[stage] for stage in trained}
        done.resumed_after = events.resumed_after()
        done.digests = {stage: self._digest(stage) for stage in STEPS}
        done.curves = {stage: curve(flow_run, stage) for stage in trained}

    def _delete(self, *stages: str) -> None:
        prefixes = tuple(f"{stage}/" for stage in stages)
        self.store.delete([key for key in self.store.list("") if key.startswith(prefixes)])

    def _digest(self, stage: str) -> str:
        keys = [key.removesuffix("/manifest.json") for key in self.store.list(f"{stage}/") if "/manifest" in key]
        return " ".join(m.digest for key in keys if (m := find(self.store, key)) is not None)

    def _processes(self, kind: str) -> list[psutil.Process]:
        """Living processes of this stack: engines of flow runs, children of stages, or the worker."""
        words = {"child": "tasks.core.execution.child", "engine": "prefect.engine", "worker": "worker start"}
        found = []
        for process in control.processes(self.home):
            try:
                is_kind = words.get(kind, "no such process") in " ".join(process.cmdline())
                if is_kind and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def _current_stage(self) -> str:
        folders = [folder.name.split("-")[1] for folder in (self.home / "work").glob("*-*")]
        return folders[-1] if folders else "between stages"


def _wait(condition, seconds: float = 120) -> None:
    """Waits until the condition holds, at most `seconds`."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.1)


def curve(flow_run: str, stage: str) -> list[int]:
    """The steps at which the stage's MLflow run has a loss, in order, with repetitions."""
    client = mlflow.MlflowClient()
    experiments = [e.experiment_id for e in client.search_experiments()]
    [parent] = client.search_runs(experiments, f"tags.`ratchet.flow_run_id` = '{flow_run}'")
    query = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}' and tags.`ratchet.stage` = '{stage}'"
    runs = client.search_runs(experiments, query)
    return sorted(point.step for run in runs for point in client.get_metric_history(run.info.run_id, "loss"))


@contextmanager
def own_stack() -> Iterator[tuple[Path, Path]]:
    """(home, project) of a stack for this process alone; sets the environment to it."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        home, project = Path(folder) / "home", Path(folder) / "project"
        project.mkdir()
        ports = {name: settings.free_port() for name in settings.PORTS}
        os.environ["PREFECT_WORKER_QUERY_SECONDS"] = "2"
        try:
            stack.up(home, ports=ports, die_with=os.getpid(), say=lambda line: None, project=project)
            settings.apply(home)
            yield home, project
        finally:
            stack.down(home)


def main(rounds: int = 30, seed: int = 1) -> int:
    """Exit code 0 if every round ended like the undisturbed one."""
    with own_stack() as (home, project):
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: os.environ["PREFECT_API_URL"]}):
            chaos, bad = Chaos(home, project, "s3://ratchet/chaos"), 0
            chaos.undisturbed()  # makes data and base, which all later rounds find cached
            quiet = chaos.undisturbed()
            print(json.dumps({"undisturbed": asdict(quiet)}), flush=True)
            done = []
            for number in range(rounds):
                done.append(random_round(chaos, number, random.Random(f"{seed}-{number}"), quiet.seconds))
                errors = done[-1].errors(quiet.digests)
                bad += bool(errors)
                shown = {"round": number, "seed": f"{seed}-{number}", **asdict(done[-1]), "errors": errors}
                print(json.dumps(shown), flush=True)
    resumed = sorted(seconds for r in done for seconds in r.resumed_after)
    most = {stage: max((r.redone.get(stage, 0) for r in done), default=0) for stage in STEPS}
    killed = sum(r.killed_in != "nothing" for r in done)
    print(
        f"{rounds} rounds, seed {seed}: {bad} wrong, {killed} killed, most steps redone {most} of {SAVE_STEPS} allowed"
    )
    print(f"seconds from a child's start to its first resumed step: {resumed}")
    return 1 if bad else 0


def random_round(chaos: Chaos, number: int, chance: random.Random, undisturbed_seconds: float) -> Round:
    """A round with a random kill: six of nine at a training step, the others at a moment of the whole run."""
    target = TARGETS[number % len(TARGETS)]
    if number % 9 >= 3:
        stage = chance.choice(list(STEPS))
        return chaos.round(target, at=(stage, chance.randrange(1, STEPS[stage])))
    after = round(chance.uniform(0, 0.6 * undisturbed_seconds), 2)
    return chaos.round(target, after, redo=(*TRAINED, *EVALUATED))


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:])))
