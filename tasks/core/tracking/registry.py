"""The model registry: versions made of artifacts that lie in the store already, and the aliases and stages they move through.

Aliases are the truth: `champion` serves, `challenger` waits, `previous` served before. Stages mirror them: Production is the champion, Staging
the challenger, and any other version that was in one of these is Archived.
"""

import hashlib
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.errors import IntegrityError, ModelError
from configs.schema import RegistrySection
from tasks.core.storage import artifacts
from tasks.core.storage.files import folder_of
from tasks.core.storage.store import open_store
from tasks.core.tracking.runs import PAGE, Tracking
from tasks.core.tracking.server import mlflow_errors

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
STAGE_OF = {CHAMPION: "Production", CHALLENGER: "Staging"}
KEY_TAG, STATUS_TAG, DIGEST_TAG = "ratchet.key", "gate.status", "ratchet.model_sha256"
OUR_MODEL = re.compile(r"(?P<root>.+)/(?P<prefix>[^/]+/[^/]+)/(?P<attempt>attempt-[0-9a-f]{12})/model")


class Version(BaseModel):
    """A model version as the registry has it."""

    name: str
    version: int
    stage: str
    aliases: list[str]
    tags: dict[str, str] = {}
    source: str = ""

    @property
    def passed(self) -> bool:
        """Whether the gates let it through."""
        return self.tags.get(STATUS_TAG) == "passed"


def model_digest(model_uri: str) -> str:
    """SHA-256 over the names and bytes of the files under a model's address, as they are in the store now; downloads them one at a time."""
    store = open_store(model_uri)
    total = hashlib.sha256()
    with tempfile.TemporaryDirectory() as scratch:
        for key in store.list():
            file = Path(scratch) / "file"
            store.get_file(key, file)
            with file.open("rb") as stream:
                total.update(f"{key} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def check_bytes(version: Version) -> None:
    """Raises IntegrityError unless the version's model in the store is, byte for byte, the one that was registered; the artifact is then out of use."""
    uri, registered = version.tags["ratchet.model_uri"], version.tags[DIGEST_TAG]
    if model_digest(uri) == registered:
        return
    if ours := OUR_MODEL.fullmatch(uri):
        store, prefix = open_store(ours["root"]), ours["prefix"]
        manifest = artifacts.find(store, prefix)
        if manifest is not None and manifest.folder == ours["attempt"]:
            artifacts.condemn(store, prefix, manifest)
    raise IntegrityError(
        f"version {version.version} of {version.name} is damaged: {uri} differs from what was registered; run the pipeline again: "
        "it redoes the stage that made it and registers a version that is whole"
    )


def register(
    section: RegistrySection,
    tracking: Tracking,
    model_uri: str,
    run_id: str | None,
    tags: dict[str, str],
    key: str,
    checked: Path | None = None,
) -> Version:
    """The version with this key, made when there is none: its source is the `model/` folder of our own artifact, not a copy.

    `checked` is a copy on this disk that was compared with the artifact's manifest: it is hashed in place of another download.

    A folder on this machine (`file://`), which MLflow does not take as a source, is uploaded to the run's experiment instead.
    Raises ModelError when the folder holds no MLflow model, StorageUnavailable, TrackingUnavailable, BadInput.
    """
    _check_objects(model_uri)
    found = find(section, tracking, key)
    if found is not None:
        return found
    name, client = section.name, tracking.client
    with mlflow_errors(f"register a version of {name!r}", tracking.uri):
        _ensure_model(client, name)
        tags = {
            **tags,
            KEY_TAG: key,
            "ratchet.model_uri": model_uri,
            DIGEST_TAG: model_digest(checked.as_uri() if checked else model_uri),
        }
        source, model_id = model_uri, None
        if model_uri.startswith("file://"):
            model_id = _upload(tracking, folder_of(model_uri), name, run_id)
            source, tags = f"models:/{model_id}", {**tags, "ratchet.model_id": model_id}
        made = client.create_model_version(
            name, source, run_id=run_id or None, tags=tags, await_creation_for=None, model_id=model_id
        )
        # Two that registered at the same time agree on the lower number.
        first = min(_with_key(client, name, key), default=int(made.version))
        if first != int(made.version):
            client.delete_model_version(name, str(made.version))
    return describe(name, first, tracking)


def _check_objects(model_uri: str) -> None:
    """MLflow makes a READY version of a folder that is not there: raises ModelError first."""
    names = open_store(model_uri).list()
    missing = [n for n in ("MLmodel", "config.json") if n not in names]
    missing += [] if any(n.endswith((".safetensors", ".bin")) for n in names) else ["weights"]
    if missing:
        raise ModelError(
            f"{model_uri} is no model that can be registered, for {', '.join(missing)} is missing: redo the stage that made it"
        )


def _ensure_model(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _upload(tracking: Tracking, folder: Path, name: str, run_id: str | None) -> str:
    """Copies the folder into MLflow's own artifact store as a logged model; returns its id."""
    model = tracking.client.create_logged_model(tracking.experiment(), name=name, source_run_id=run_id or None)
    tracking.client.log_model_artifacts(model.model_id, str(folder))
    tracking.client.finalize_logged_model(model.model_id, "READY")
    return model.model_id


def _with_key(client: Any, name: str, key: str) -> list[int]:
    quote = '"' if "'" in name else "'"
    found = client.search_model_versions(f"name={quote}{name}{quote} and tag.`{KEY_TAG}`='{key}'")
    return [int(v.version) for v in found]


def find(section: RegistrySection, tracking: Tracking, key: str) -> Version | None:
    """The version that was registered with this key, or None."""
    with mlflow_errors(f"look for a version of {section.name!r}", tracking.uri):
        numbers = _with_key(tracking.client, section.name, key)
    return describe(section.name, min(numbers), tracking) if numbers else None


def describe(name: str, version: int, tracking: Tracking) -> Version:
    """The version as it is now. Raises BadInput when there is none."""
    missing = f"version {version} of the model {name!r} does not exist in the registry at {tracking.uri}: see there which ones do"
    with mlflow_errors(f"show version {version} of {name!r}", tracking.uri, missing):
        found = tracking.client.get_model_version(name, str(version))
    return Version(
        name=name,
        version=version,
        stage=found.current_stage,
        aliases=sorted(found.aliases),
        tags=found.tags,
        source=found.source,
    )


def version_url(version: Version, tracking: Tracking) -> str:
    """Where the version is shown in the MLflow UI."""
    return f"{tracking.uri}/#/models/{version.name}/versions/{version.version}{PAGE}"


def aliases(model: str, tracking: Tracking) -> dict[str, int]:
    """Alias -> version number. Raises BadInput when there is no such model."""
    missing = f"the model {model!r} does not exist in the registry at {tracking.uri}: check its name, or run the pipeline first"
    with mlflow_errors(f"show the model {model!r}", tracking.uri, missing):
        return {alias: int(number) for alias, number in tracking.client.get_registered_model(model).aliases.items()}


def stage_challenger(version: Version, tracking: Tracking) -> Version:
    """Makes a version the challenger, in Staging; the challenger before it goes to Archived. The champion stays what it is."""
    with mlflow_errors(f"stage version {version.version} of {version.name!r}", tracking.uri):
        if aliases(version.name, tracking).get(CHAMPION) != version.version:
            tracking.client.set_registered_model_alias(version.name, CHALLENGER, str(version.version))
        mirror(version.name, tracking)
    return describe(version.name, version.version, tracking)


def mirror(model: str, tracking: Tracking) -> None:
    """Sets every version's stage to what the aliases say; may be repeated at any time."""
    now = aliases(model, tracking)
    # The champion last: it is in Production even where it is still the challenger too.
    named = {now[alias]: STAGE_OF[alias] for alias in (CHALLENGER, CHAMPION) if alias in now}
    for number, stage in stages(model, tracking).items():
        wanted = named.get(number, "Archived" if stage in STAGE_OF.values() else stage)
        if stage != wanted:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", FutureWarning
                )  # stages are to go in some later MLflow; aliases carry the truth
                tracking.client.transition_model_version_stage(
                    model, str(number), wanted, archive_existing_versions=False
                )


def stages(model: str, tracking: Tracking) -> dict[int, str]:
    """Version number -> stage, of all versions of the model. Raises what MLflow raises."""
    quote = '"' if "'" in model else "'"
    found: dict[int, str] = {}
    token = None
    while token is None or token:
        page = tracking.client.search_model_versions(f"name={quote}{model}{quote}", page_token=token or None)
        found |= {int(v.version): v.current_stage for v in page}
        token = page.token or ""
    return found


def every_version(tracking: Tracking) -> list[Version]:
    """All versions of all models, with their tags and sources; without aliases, which a search does not give. Raises TrackingUnavailable, BadInput."""
    found: list[Version] = []
    token = None
    with mlflow_errors("list the versions of all models", tracking.uri):
        while token is None or token:
            page = tracking.client.search_model_versions("", page_token=token or None)
            found += [
                Version(
                    name=v.name,
                    version=int(v.version),
                    stage=v.current_stage,
                    aliases=[],
                    tags=v.tags,
                    source=v.source or "",
                )
                for v in page
            ]
            token = page.token or ""
    return found
