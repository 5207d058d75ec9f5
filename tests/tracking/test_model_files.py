import hashlib

import pytest

from configs.errors import ModelError
from tasks.core.tracking import model_files


def digests(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_writing_the_mlmodel_again_changes_nothing(model_folder):
    before = digests(model_folder)
    model_files.write_mlmodel(model_folder)
    assert digests(model_folder) == before


def test_the_mlmodel_contains_no_time_id_or_path(model_folder):
    text = (model_folder / "MLmodel").read_text()
    assert [w for w in ("utc_time_created", "model_uuid", "run_id", str(model_folder)) if w in text] == []


def test_the_weights_are_in_the_folder_once(model_folder):
    weights = [path.relative_to(model_folder).as_posix() for path in model_folder.rglob("*.safetensors")]
    assert weights == ["model.safetensors"]


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    sentence = "is not a Hugging Face model: it must contain config.json and safetensors weights"
    with pytest.raises(ModelError, match=sentence):
        model_files.write_mlmodel(tmp_path)
