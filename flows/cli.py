"""The `ratchet` command. Logs go to stderr, results to stdout; exit code 0 done, 2 bad input, 1 anything else."""

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from configs.errors import ConfigError, RatchetError, Unavailable
from configs.loading import load, parse_set, presets

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Post-training of language models as a pipeline.",
)
Config = Annotated[str, typer.Argument(help="Preset or YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a field; may be repeated.")
]
Port = Annotated[int | None, typer.Option(min=1, max=65535)]


@app.command()
def up(prefect_port: Port = None, mlflow_port: Port = None, s3_port: Port = None) -> None:
    """Starts the embedded stack: S3, MLflow, Prefect and a worker that serves the deployments."""
    from deployments.local import settings, stack

    ports = {"prefect": prefect_port, "mlflow": mlflow_port, "s3": s3_port}
    stack.up(settings.default_home(), {name: port for name, port in ports.items() if port is not None}, say=typer.echo)


@app.command()
def down() -> None:
    """Stops the embedded stack; its data stays."""
    from deployments.local import settings, stack

    stack.down(settings.default_home())


@app.command()
def status() -> None:
    """Says which services of the embedded stack run, and where."""
    from deployments.local import settings, stack

    home = settings.default_home()
    rows = stack.status(home)
    if not rows:
        typer.echo(f"no embedded stack was ever started in {home}; RATCHET_HOME points at another")
    for row in rows:
        typer.echo(f"{row['service']:<18}{row['state']:<10}{row['pid'] or '':<8}{row['url'] or ''}")


@app.command()
def env() -> None:
    """Prints the environment that leads other programs to the embedded stack: `eval "$(ratchet env)"`."""
    from deployments.local import settings

    for name, value in settings.environment(settings.default_home()).items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@app.command()
def run(
    config: Config,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Runs the pipeline here and prints the table and the verdict."""
    values = dict(parse_set(o) for o in overrides or [])
    cfg = load(config, values)
    _use_stack()
    _preflight(cfg)
    _speak_as_worker_runs_do()
    from flows.local_run import run_here

    source = config if config in presets() else str(Path(config).resolve())
    # As Ctrl-C does: the child ends, the run is shown as Crashed, and nothing is left behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    summary = run_here({"preset": source, "overrides": values}).result()
    typer.echo(json.dumps(summary, sort_keys=True)) if as_json else _show(summary)


@app.command()
def check(config: Config, overrides: Overrides = None) -> None:
    """Validates configuration and data, prints batch arithmetic and an estimate of memory, and trains nothing."""
    from tasks.core.execution.preflight import check as examine

    cfg = load(config, dict(parse_set(o) for o in overrides or []))
    _use_stack()
    for row in examine(cfg):
        typer.echo(row)


@app.command()
def gc(
    root: Annotated[str | None, typer.Option(help="Root of the store; RATCHET_STORE by default.")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Remove it.")] = False,
    checkpoints_older_than: Annotated[
        float | None,
        typer.Option(metavar="DAYS", min=0, max=36_500, help="Older checkpoints of unfinished stages too."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Lists, and with --delete removes, what no live run, registered version or kept checkpoint refers to."""
    _use_stack()
    from flows import gc as collector
    from tasks.core.storage.store import open_store

    collector.collect(open_store(root), delete, checkpoints_older_than, as_json, say=typer.echo)


def _use_stack() -> None:
    """Points this process at the embedded stack, where it was started here and the environment names no other. Before Prefect is imported."""
    from deployments.local import settings

    home = settings.default_home()
    if (home / "stack.json").exists():
        settings.apply(home)
    api = os.environ.get("PREFECT_API_URL", "")
    try:
        httpx.URL(api)
    except httpx.InvalidURL as error:
        raise ConfigError(
            f"PREFECT_API_URL is {api!r} and no address ({error}): correct it, or unset it to use the embedded stack"
        ) from error


def _speak_as_worker_runs_do() -> None:
    """Signs of life for the server, and patience with it. Before Prefect is imported."""
    from deployments.local import settings

    for name, value in settings.RUNS.items():
        os.environ.setdefault(name, value)


def _preflight(cfg: Any) -> None:
    """Every service must answer before a run begins: one sentence now rather than a traceback later."""
    from tasks.core.storage.store import open_store
    from tasks.core.tracking import server

    api = os.environ.get("PREFECT_API_URL")
    if api:
        try:
            httpx.get(f"{api}/health", timeout=10).raise_for_status()
        except httpx.HTTPError as error:
            raise Unavailable(
                f"the Prefect server at {api} does not answer ({error}): start it (`ratchet up`), or set PREFECT_API_URL to one that runs"
            ) from error
    open_store(cfg.storage.root).check()
    server.check(server.server_uri(cfg.tracking))


def _show(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from tasks.core.judging import report
    from tasks.core.judging.gates import Verdict

    verdict = Verdict.model_validate(summary["verdict"])
    console = Console()
    for header, rows in (
        (["", *report.columns(summary["metrics"])], report.table(summary["metrics"])),
        (["gate", "outcome", "observed", "limit"], report.gate_rows(verdict)),
    ):
        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for gate in verdict.gates:
        console.print(gate.sentence, soft_wrap=True)
    model = summary["model"]
    console.print(
        f"{summary['state']}: version {model['version']} of {model['name']}, stage {model['stage']}, aliases {', '.join(model['aliases']) or 'none'}"
    )
    for name, url in summary["urls"].items():
        console.print(f"{name.replace('_', ' '):<14}{url}", soft_wrap=True)


def main() -> None:
    """Entry point: errors of the tree become one sentence on stderr and their exit code."""
    try:
        app(standalone_mode=True)
    except RatchetError as error:
        print(f"ratchet: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except httpx.TransportError as error:
        print(
            f"ratchet: the Prefect server went away ({error}): start it again (`ratchet up`), then run the same command: what was finished is kept",
            file=sys.stderr,
        )
        sys.exit(Unavailable.exit_code)


if __name__ == "__main__":
    main()
