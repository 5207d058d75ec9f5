"""The Prefect task that finds the champion."""

from prefect import get_run_logger, task

from configs.errors import BadInput, ConfigError
from configs.schema import Gate, RegistrySection
from tasks.core.storage import artifacts
from tasks.core.tracking import registry
from tasks.runtime.stage import RETRIES, Artifact, Run


@task(name="champion", task_run_name="champion", **RETRIES)
def find_champion(run: Run, section: RegistrySection, gates: dict[str, Gate | None]) -> Artifact | None:
    """The artifact of the registered model's champion, to be evaluated too; None if there is no champion yet.

    A champion whose artifact is damaged or in another store is left out with a warning. Raises ConfigError when a gate
    needs it.
    """
    try:
        number = registry.aliases(section.name, run.tracking).get(registry.CHAMPION)
    except BadInput:  # there is no model of that name yet: this run registers the first version
        return None
    if number is None:
        return None
    version = registry.describe(section.name, number, run.tracking)
    uri = version.tags.get("ratchet.model_uri", version.source)
    ours = registry.OUR_MODEL.fullmatch(uri)
    in_store = ours and ours["root"] == run.store.root.rstrip("/")
    manifest = artifacts.find(run.store, ours["prefix"]) if in_store else None
    if manifest is not None and manifest.folder == ours["attempt"]:
        stage, _, key = ours["prefix"].partition("/")
        uri = uri.removesuffix("/model")
        return Artifact(stage=stage, key=key, uri=uri, digest=manifest.digest, cached=True, seconds=0.0)
    problem = (
        f"version {number} of {section.name} is the champion and its model is {uri}, "
        f"but there is no whole artifact at that address in the store of this run, {run.store.root}"
    )
    if any(gate and gate.rival == "champion" for gate in gates.values()):
        raise ConfigError(
            f"{problem}: remove the gate with rival champion, use the champion's store, "
            "or promote a version that is in this store"
        )
    get_run_logger().warning("%s: the champion is not evaluated", problem)
    return None
