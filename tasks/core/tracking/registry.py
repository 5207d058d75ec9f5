"""The model registry: how an artifact in the store becomes a model version, and the aliases and stages of versions.

The aliases decide: `champion` serves, `challenger` is the candidate, and `previous` served before the champion. Stages
follow the aliases: Production for the champion, Staging for the challenger, Archived for versions that were either.
"""

import hashlib
import re
import tempfile
import warnings
from collections.abc import Iterator
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
# The address of a model in an artifact of a Ratchet store.
OUR_MODEL = re.compile(r"(?P<root>.+)/(?P<prefix>[^/]+/[^/]+)/(?P<attempt>attempt-[0-9a-f]{12})/model")


class Version(BaseModel):
    """A model version in the registry."""

    name: str
    version: int
    stage: str
    aliases: list[str]
    tags: dict[str, str] = {}
    source: str = ""

    @property
    def passed(self) -> bool:
        """Whether the version passed its gates."""
        return self.tags.get(STATUS_TAG) == "passed"


def model_digest(model_uri: str) -> str:
    """SHA-256 over the names and bytes of the files at a model's address. Downloads them one at a time."""
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
    """Raises IntegrityError if the version's model in the store differs from the registered one, byte for byte.

    The artifact is then taken out of use, so that the next pipeline run makes it again.
    """
    uri, registered = version.tags["ratchet.model_uri"], version.tags[DIGEST_TAG]
    if model_digest(uri) == registered:
        return
    if ours := OUR_MODEL.fullmatch(uri):
        store, prefix = open_store(ours["root"]), ours["prefix"]
        manifest = artifacts.find(store, prefix)
        if manifest is not None and manifest.folder == ours["attempt"]:
            artifacts.condemn(store, prefix, manifest)
    raise IntegrityError(
        f"version {version.version} of {version.name} is damaged: {uri} differs from the registered model; "
        "run the pipeline again: it redoes the stage that made the model and registers a new version"
    )


def register(
    section: RegistrySection,
    tracking: Tracking,
    model_uri: str,
    run_id: str | None,
    tags: dict[str, str],
    key: str,
    verified: Path | None = None,
) -> Version:
    """Returns the version with this key, and registers it if it does not exist.

    The version's source is the artifact's own `model/` folder in the store, not a copy. MLflow does not accept a folder
    on this machine (`file://`) as a source, so such a model is uploaded to the run's experiment.
    `verified` is a local copy of the model that was compared with the artifact's manifest. With it, the bytes in the
    store are not read; without it, they are read once.
    Raises ModelError if the folder is not an MLflow model, StorageUnavailable, TrackingUnavailable, BadInput.
    """
    _check_file_names(model_uri)
    found = find(section, tracking, key)
    if found is not None:
        return found
    name, client = section.name, tracking.client
    with mlflow_errors(f"register a version of {name!r}", tracking.uri):
        _ensure_model(client, name)
        digest = model_digest(verified.as_uri() if verified else model_uri)
        tags = {**tags, KEY_TAG: key, "ratchet.model_uri": model_uri, DIGEST_TAG: digest}
        source, model_id = model_uri, None
        if model_uri.startswith("file://"):
            model_id = _upload(tracking, verified or folder_of(model_uri), name, run_id)
            source, tags = f"models:/{model_id}", {**tags, "ratchet.model_id": model_id}
        options = {"run_id": run_id or None, "tags": tags, "await_creation_for": None, "model_id": model_id}
        number = int(client.create_model_version(name, source, **options).version)
        # If another run has registered the same key at the same time, both keep the lower number.
        first = min(_numbers_with_key(tracking, name, key), default=number)
        if first != number:
            client.delete_model_version(name, str(number))
    return describe(name, first, tracking)


def _check_file_names(model_uri: str) -> None:
    """Raises ModelError if files are missing: MLflow registers a folder that does not exist without an error."""
    names = open_store(model_uri).list()
    missing = [n for n in ("MLmodel", "config.json") if n not in names]
    missing += [] if any(n.endswith((".safetensors", ".bin")) for n in names) else ["weights"]
    if missing:
        raise ModelError(
            f"{model_uri} cannot be registered, because {', '.join(missing)} is missing: redo the stage that made it"
        )


def _ensure_model(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _upload(tracking: Tracking, folder: Path, name: str, run_id: str | None) -> str:
    """Copies the folder into MLflow's own artifact store as a logged model. Returns its id."""
    model = tracking.client.create_logged_model(tracking.experiment(), name=name, source_run_id=run_id or None)
    tracking.client.log_model_artifacts(model.model_id, str(folder))
    tracking.client.finalize_logged_model(model.model_id, "READY")
    return model.model_id


def find(section: RegistrySection, tracking: Tracking, key: str) -> Version | None:
    """The version that was registered with this key, or None."""
    with mlflow_errors(f"look for a version of {section.name!r}", tracking.uri):
        numbers = _numbers_with_key(tracking, section.name, key)
    return describe(section.name, min(numbers), tracking) if numbers else None


def describe(name: str, version: int, tracking: Tracking) -> Version:
    """The current state of the version. Raises BadInput if it does not exist."""
    missing = (
        f"version {version} of the model {name!r} does not exist in the registry at {tracking.uri}: "
        "choose one that the registry lists"
    )
    with mlflow_errors(f"show version {version} of {name!r}", tracking.uri, missing):
        found = tracking.client.get_model_version(name, str(version))
    return _version(found, sorted(found.aliases))


def version_url(version: Version, tracking: Tracking) -> str:
    """The address of the version's page in the MLflow UI."""
    return f"{tracking.uri}/#/models/{version.name}/versions/{version.version}{PAGE}"


def aliases(model: str, tracking: Tracking) -> dict[str, int]:
    """Alias -> version number. Raises BadInput if the model does not exist."""
    missing = (
        f"the model {model!r} does not exist in the registry at {tracking.uri}: "
        "check its name, or run the pipeline first"
    )
    with mlflow_errors(f"show the model {model!r}", tracking.uri, missing):
        return {alias: int(number) for alias, number in tracking.client.get_registered_model(model).aliases.items()}


def stage_challenger(version: Version, tracking: Tracking) -> Version:
    """Makes a version the challenger, in Staging, and archives the old challenger. The champion does not change."""
    with mlflow_errors(f"stage version {version.version} of {version.name!r}", tracking.uri):
        if aliases(version.name, tracking).get(CHAMPION) != version.version:
            tracking.client.set_registered_model_alias(version.name, CHALLENGER, str(version.version))
        update_stages(version.name, tracking)
    return describe(version.name, version.version, tracking)


def update_stages(model: str, tracking: Tracking) -> None:
    """Sets the stage of every version to match the aliases. Calling it again changes nothing."""
    now = aliases(model, tracking)
    # The champion comes last: a champion that is still the challenger is in Production.
    named = {now[alias]: STAGE_OF[alias] for alias in (CHALLENGER, CHAMPION) if alias in now}
    for number, stage in stages(model, tracking).items():
        wanted = named.get(number, "Archived" if stage in STAGE_OF.values() else stage)
        if stage != wanted:
            with warnings.catch_warnings():
                # MLflow plans to remove stages. The aliases do not depend on them.
                warnings.simplefilter("ignore", FutureWarning)
                change = tracking.client.transition_model_version_stage
                change(model, str(number), wanted, archive_existing_versions=False)


def stages(model: str, tracking: Tracking) -> dict[int, str]:
    """Version number -> stage, for all versions of the model. Raises what MLflow raises."""
    return {int(v.version): v.current_stage for v in _search(tracking, _name_filter(model))}


def every_version(tracking: Tracking) -> list[Version]:
    """All versions of all models, without their aliases, which a search does not return.

    Raises TrackingUnavailable, BadInput.
    """
    with mlflow_errors("list the versions of all models", tracking.uri):
        return [_version(found, []) for found in _search(tracking, "")]


def _numbers_with_key(tracking: Tracking, name: str, key: str) -> list[int]:
    return [int(v.version) for v in _search(tracking, f"{_name_filter(name)} and tag.`{KEY_TAG}`='{key}'")]


def _name_filter(model: str) -> str:
    quote = '"' if "'" in model else "'"
    return f"name={quote}{model}{quote}"


def _search(tracking: Tracking, query: str) -> Iterator[Any]:
    """All model versions that match the query, page by page."""
    token = None
    while token is None or token:
        page = tracking.client.search_model_versions(query, page_token=token or None)
        yield from page
        token = page.token or ""


def _version(found: Any, aliases: list[str]) -> Version:
    number, source = int(found.version), found.source or ""
    return Version(
        name=found.name, version=number, stage=found.current_stage, aliases=aliases, tags=found.tags, source=source
    )
