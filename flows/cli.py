"""The `ratchet` command. Results go to stdout, logs to stderr. Exit codes: 0 done, 2 bad input, 1 any other error."""

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
    help="Post-trains language models as a pipeline.",
)
Config = Annotated[str, typer.Argument(help="Preset or YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a field; can be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535)]


@app.command()
def up(prefect_port: Port = None, mlflow_port: Port = None, s3_port: Port = None) -> None:
    """Starts the embedded stack: S3, MLflow, Prefect, and a worker that serves the deployments."""
    from deployments.local import settings, stack

    ports = {"prefect": prefect_port, "mlflow": mlflow_port, "s3": s3_port}
    stack.up(settings.default_home(), {name: port for name, port in ports.items() if port is not None}, say=typer.echo)


@app.command()
def down() -> None:
    """Stops the embedded stack. Its data is kept."""
    from deployments.local import settings, stack

    stack.down(settings.default_home())


@app.command()
def status() -> None:
    """Shows the state and address of each service of the embedded stack."""
    from deployments.local import settings, stack

    home = settings.default_home()
    rows = stack.status(home)
    if not rows:
        typer.echo(f"no embedded stack was ever started in {home}; set RATCHET_HOME to use another folder")
    for row in rows:
        typer.echo(f"{row['service']:<18}{row['state']:<10}{row['pid'] or '':<8}{row['url'] or ''}")


@app.command()
def env() -> None:
    """Prints the environment variables of the embedded stack for other programs: `eval "$(ratchet env)"`."""
    from deployments.local import settings

    for name, value in settings.environment(settings.default_home()).items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@app.command()
def run(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Runs the pipeline in this process and prints the table and the verdict."""
    values = dict(parse_set(o) for o in overrides or [])
    cfg = load(config, values)
    _use_embedded_stack()
    _check_services(cfg)
    _use_settings_of_worker_runs()
    from flows.local_run import run_in_this_process

    source = config if config in presets() else str(Path(config).resolve())
    # SIGTERM ends the run as Ctrl-C does: the child process ends too, and Prefect shows the run as Crashed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    summary = run_in_this_process({"preset": source, "overrides": values}).result()
    if as_json:
        typer.echo(json.dumps(summary, sort_keys=True))
    else:
        _print_summary(summary)


@app.command()
def check(config: Config, overrides: Overrides = None) -> None:
    """Validates configuration and data, and prints batch arithmetic and a memory estimate. Trains nothing."""
    from tasks.core.execution import preflight

    cfg = load(config, dict(parse_set(o) for o in overrides or []))
    _use_embedded_stack()
    for line in preflight.check(cfg):
        typer.echo(line)


@app.command()
def gc(
    root: Annotated[str | None, typer.Option(help="Root of the store. Default: RATCHET_STORE.")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete it.")] = False,
    checkpoints_older_than: Annotated[
        float | None,
        typer.Option(metavar="DAYS", min=0, max=36_500, help="Include older checkpoints of unfinished stages."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lists, and with --delete deletes, what no live run, registered version or kept checkpoint refers to."""
    _use_embedded_stack()
    from flows import gc as collector
    from tasks.core.storage.store import open_store

    collector.collect(open_store(root), delete, checkpoints_older_than, as_json, say=typer.echo)


def _use_embedded_stack() -> None:
    """Sets the addresses of the embedded stack, if it was started in this folder and the environment names no others.

    Must be called before Prefect is imported. Raises ConfigError.
    """
    from deployments.local import settings

    home = settings.default_home()
    if (home / "stack.json").exists():
        settings.apply(home)
    api = os.environ.get("PREFECT_API_URL", "")
    try:
        httpx.URL(api)
    except httpx.InvalidURL as error:
        raise ConfigError(
            f"PREFECT_API_URL is {api!r} and must be an http(s) address ({error}): "
            "correct it, or unset it to use the embedded stack"
        ) from error


def _use_settings_of_worker_runs() -> None:
    """Turns on heartbeats and long retries of Prefect's client, as the worker does. Before Prefect is imported."""
    from deployments.local import settings

    for name, value in settings.RUNS.items():
        os.environ.setdefault(name, value)


def _check_services(cfg: Any) -> None:
    """Raises an error with one sentence if Prefect, the store or MLflow does not answer."""
    from tasks.core.storage.store import open_store
    from tasks.core.tracking import server

    api = os.environ.get("PREFECT_API_URL")
    if api:
        try:
            httpx.get(f"{api}/health", timeout=10).raise_for_status()
        except httpx.HTTPError as error:
            raise Unavailable(
                f"the Prefect server at {api} does not answer ({error}): "
                "start it (`ratchet up`), or set PREFECT_API_URL to a server that runs"
            ) from error
    open_store(cfg.storage.root).check()
    server.check(server.server_uri(cfg.tracking))


def _print_summary(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from tasks.core.judging import report
    from tasks.core.judging.gates import Verdict

    verdict = Verdict.model_validate(summary["verdict"])
    metrics = summary["metrics"]
    console = Console()
    for header, rows in (
        (["", *report.columns(metrics)], report.table(metrics)),
        (["gate", "outcome", "observed", "limit"], report.gate_rows(verdict)),
    ):
        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for gate in verdict.gates:
        console.print(gate.sentence, soft_wrap=True)
    model = summary["model"]
    aliases = ", ".join(model["aliases"]) or "none"
    console.print(
        f"{summary['state']}: version {model['version']} of {model['name']}, stage {model['stage']}, aliases {aliases}"
    )
    for name, url in summary["urls"].items():
        console.print(f"{name.replace('_', ' '):<14}{url}", soft_wrap=True)


def main() -> None:
    """Entry point. Prints Ratchet's own errors as one sentence on stderr and exits with their exit code."""
    try:
        app(standalone_mode=True)
    except RatchetError as error:
        print(f"ratchet: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except httpx.TransportError as error:
        print(
            f"ratchet: the Prefect server no longer answers ({error}): "
            "start it again (`ratchet up`), then repeat the command; finished stages are kept",
            file=sys.stderr,
        )
        sys.exit(Unavailable.exit_code)


if __name__ == "__main__":
    main()
